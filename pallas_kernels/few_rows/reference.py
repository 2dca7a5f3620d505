"""The parts of a decoder layer on a few rows in plain JAX: what every implementation must compute."""

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST


def norm_qkv_rope(
    x: jax.Array,
    norm: jax.Array,
    qkv: jax.Array,
    bias: jax.Array | None,
    rope: tuple[jax.Array, jax.Array],
    eps: float,
) -> jax.Array:
    """See api.norm_qkv_rope."""
    out = jnp.einsum("md,gqhd->mgqh", _normed(x, norm, eps), _wide(qkv), precision=_EXACT)
    if bias is not None:
        out += _wide(bias)
    cos, sin = (table[:, None, None] for table in rope)
    low, high = jnp.split(out[:, :, :-1], 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return jnp.concatenate([rotated, out[:, :, -1:]], axis=2).astype(x.dtype)


def norm_swiglu(x: jax.Array, norm: jax.Array, gate_up: jax.Array, eps: float) -> jax.Array:
    """See api.norm_swiglu."""
    out = jnp.einsum("md,pfd->pmf", _normed(x, norm, eps), _wide(gate_up), precision=_EXACT)
    return (jax.nn.silu(out[0]) * out[1]).astype(x.dtype)


def project_add(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
    """See api.project_add."""
    product = jnp.einsum("mi,oi->mo", _wide(x), _wide(weight), precision=_EXACT)
    return (product + _wide(residual)).astype(residual.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _normed(x: jax.Array, norm: jax.Array, eps: float) -> jax.Array:
    x = _wide(x)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * _wide(norm)
