"""Layers that the model families share. Weights keep Hugging Face's [out, in] orientation.

On CPU that orientation is the fast one for the few rows of a decode step (the product reads each
weight row once, in order), on GPU and TPU the compiler takes either, and loading needs no transpose.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig, RopeScaling

Reduce = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """The `Reduce` of weights that are whole on every device."""
    return x


class Attend(Protocol):
    """Writes this layer's new keys and values to its cache and attends over it.

    Takes q [M, G, Q, H], k and v [M, G, H] and the cache; returns ([M, G, Q, H], the new cache).
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: "KVCache"
    ) -> tuple[jax.Array, "KVCache"]: ...


KVCache = tuple[jax.Array, jax.Array]  # keys and values, each [P, page_size, G, H]


def linear(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [M, in] times weight [out..., in] -> [M, out...]; fp32 in full precision on every platform.

    `out_dtype` keeps more of the sums than x's own type would.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # One flat matrix: around an output of several axes XLA would transpose the whole weight first.
    flat = weight.reshape(-1, weight.shape[-1])
    contract = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, flat, contract, precision=precision, preferred_element_type=out_dtype)
    return out.reshape(x.shape[0], *weight.shape[:-1])


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis: normalised in fp32, cast, then scaled (Llama's order)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Rotation speed of each of the H/2 planes, radians a position, fp32."""
    speeds = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return speeds
    if scaling.kind == "linear":
        return speeds / scaling.factor
    # llama3: long waves are stretched, short ones kept, and a linear blend lies between.
    turns = scaling.original_max_position * speeds / (2 * jnp.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return blend * speeds + (1 - blend) * speeds / scaling.factor


def rope_tables(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, each [M, H/2] fp32, for token positions [M]."""
    speeds = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = positions.astype(jnp.float32)[:, None] * speeds
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [M, ..., H] in half-split layout (plane i pairs features i and i + H/2), in fp32."""
    cos, sin = (t.reshape(t.shape[0], *(1,) * (x.ndim - 2), t.shape[1]) for t in tables)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: grouped-query attention and SwiGLU (Llama, Qwen2, MiMo).

    q, k and v are one product, grouped by KV head so that a shard of G is contiguous; so are gate and up.
    """

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, make: Callable[[tuple[int, ...], jnp.dtype], jax.Array]
    ):
        d, h, g, f = config.hidden_size, config.head_dim, config.num_key_value_heads, config.intermediate_size
        q = config.num_attention_heads // g
        self.eps = config.rms_norm_eps
        self.input_norm = nnx.Param(make((d,), dtype))
        self.qkv = nnx.Param(make((g, q + 2, h, d), dtype))
        self.qkv_bias = nnx.Param(make((g, q + 2, h), dtype)) if config.attention_bias else None
        self.o = nnx.Param(make((d, g, q, h), dtype))
        self.post_norm = nnx.Param(make((d,), dtype))
        self.gate_up = nnx.Param(make((2, f, d), dtype))
        self.down = nnx.Param(make((d, f), dtype))

    def __call__(
        self,
        x: jax.Array,
        cache: KVCache,
        rope: tuple[jax.Array, jax.Array],
        attend: Attend,
        reduce_attention: Reduce = identity,
        reduce_ffn: Reduce = identity,
    ) -> tuple[jax.Array, KVCache]:
        """x [M, D] -> ([M, D], cache). `reduce_*` sums partial products over the devices that share them."""
        with jax.named_scope("attention"):
            qkv = linear(rms_norm(x, self.input_norm[...], self.eps), self.qkv[...])  # M G Q+2 H
            if self.qkv_bias is not None:
                qkv = qkv + self.qkv_bias[...]
            rotated = apply_rope(qkv[:, :, :-1], rope)
            mixed, cache = attend(rotated[:, :, :-1], rotated[:, :, -1], qkv[:, :, -1], cache)
            o = self.o[...]
            out = linear(mixed.reshape(mixed.shape[0], -1), o.reshape(o.shape[0], -1))
            x = x + reduce_attention(out)
        with jax.named_scope("ffn"):
            gate_up = linear(rms_norm(x, self.post_norm[...], self.eps), self.gate_up[...])  # M 2 F
            out = linear(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], self.down[...])
            return x + reduce_ffn(out), cache
