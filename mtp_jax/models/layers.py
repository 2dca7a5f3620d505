"""Layers that the model families share. Weights keep Hugging Face's [out, in] orientation.

On CPU that orientation is the fast one for the few rows of a decode step (the product reads each
weight row once, in order), on GPU and TPU the compiler takes either, and loading needs no transpose.

Where `kernels` is true, what a kernel of `pallas_kernels/few_rows` can take is left to it. They have no
gradient, so only the engine asks for them.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig, RopeScaling
from pallas_kernels import few_rows


@dataclasses.dataclass(frozen=True)
class SumOver:
    """Sums partial products over the devices of these mesh axes, among which their weights are split."""

    axes: tuple[str, ...] = ()

    @property
    def over_one_device(self) -> bool:
        """Whether weights are whole here: then the sum says so to shard_map, and does nothing."""
        return all(jax.lax.axis_size(axis) == 1 for axis in self.axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.axes) if self.axes else x


UNSPLIT = SumOver()


class Attend(Protocol):
    """Writes this layer's new keys and values to its cache and attends over it.

    Takes qkv [M, G, Q + 2, H] as `norm_qkv_rope` returns it and the cache; returns ([M, G, Q, H], the new
    cache).
    """

    def __call__(self, qkv: jax.Array, cache: "KVCache") -> tuple[jax.Array, "KVCache"]: ...


KVCache = tuple[jax.Array, jax.Array]  # keys and values, each [P, page_size, G, H]
Rope = tuple[jax.Array, jax.Array]  # cosines and sines of `rope_tables`


CPU_CACHE_BYTES = 2**24  # a matrix up to this size is still in the last cache when the next row wants it


def linear(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [M, in] times weight [out..., in] -> [M, out...]; fp32 in full precision on every platform.

    `out_dtype` keeps more of the sums than x's own type would.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # One flat matrix: around an output of several axes XLA would transpose the whole weight first.
    flat = weight.reshape(-1, weight.shape[-1])

    def product(x: jax.Array, flat: jax.Array) -> jax.Array:
        contract = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, flat, contract, precision=precision, preferred_element_type=out_dtype)

    def row_by_row(x: jax.Array, flat: jax.Array) -> jax.Array:
        return jnp.concatenate([product(x[row : row + 1], flat) for row in range(x.shape[0])])

    # On CPU a product of 2 to 8 rows takes 2.4 times one row's, whatever their number: it repacks the
    # weights. A row at a time reads them again, but from the cache: about 1.4 and 2 times for 2 and 4.
    few = 1 < x.shape[0] <= 4 and flat.size * flat.dtype.itemsize <= CPU_CACHE_BYTES
    if not few:
        return product(x, flat).reshape(x.shape[0], *weight.shape[:-1])
    out = jax.lax.platform_dependent(x, flat, cpu=row_by_row, default=product)
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


def rope_tables(positions: jax.Array, config: ModelConfig) -> Rope:
    """Cosines and sines, each [M, H/2] fp32, for token positions [M]."""
    speeds = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = positions.astype(jnp.float32)[:, None] * speeds
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: Rope) -> jax.Array:
    """Rotates x [M, ..., H] in half-split layout (plane i pairs features i and i + H/2), in fp32."""
    cos, sin = (t.reshape(t.shape[0], *(1,) * (x.ndim - 2), t.shape[1]) for t in tables)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def norm_qkv_rope(
    x: jax.Array,
    norm: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rope: Rope,
    eps: float,
    kernels: bool,
) -> jax.Array:
    """x [M, D] -> [M, G, Q + 2, H]: of each KV head its queries and its key, rotated, and its value."""
    if kernels:
        with contextlib.suppress(few_rows.NotHereError):
            return few_rows.norm_qkv_rope(x, norm, weight, bias, rope, eps)
    qkv = linear(rms_norm(x, norm, eps), weight)
    if bias is not None:
        qkv = qkv + bias
    return jnp.concatenate([apply_rope(qkv[:, :, :-1], rope), qkv[:, :, -1:]], axis=2)


def split_qkv(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[M, G, Q + 2, H] -> queries [M, G, Q, H], keys and values [M, G, H]."""
    return qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]


def norm_swiglu(x: jax.Array, norm: jax.Array, gate_up: jax.Array, eps: float, kernels: bool) -> jax.Array:
    """x [M, D] -> [M, F]: gate_up [2, F, D] after a norm, SiLU of the one half times the other."""
    if kernels:
        with contextlib.suppress(few_rows.NotHereError):
            return few_rows.norm_swiglu(x, norm, gate_up, eps)
    out = linear(rms_norm(x, norm, eps), gate_up)  # M 2 F
    return jax.nn.silu(out[:, 0]) * out[:, 1]


def project_add(
    x: jax.Array, weight: jax.Array, residual: jax.Array, reduce: SumOver, kernels: bool
) -> jax.Array:
    """residual [M, D] + the product of x [M, in] and weight [D, in], summed over the devices with parts."""
    if kernels and reduce.over_one_device:
        with contextlib.suppress(few_rows.NotHereError):
            return reduce(few_rows.project_add(x, weight, residual))
    return residual + reduce(linear(x, weight))


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
        rope: Rope,
        attend: Attend,
        reduce_attention: SumOver = UNSPLIT,
        reduce_ffn: SumOver = UNSPLIT,
        kernels: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """x [M, D] -> ([M, D], cache). `reduce_*` sums partial products over the devices that share them."""
        with jax.named_scope("attention"):
            bias = None if self.qkv_bias is None else self.qkv_bias[...]
            qkv = norm_qkv_rope(x, self.input_norm[...], self.qkv[...], bias, rope, self.eps, kernels)
            mixed, cache = attend(qkv, cache)
            mixed, o = mixed.reshape(x.shape[0], -1), self.o[...].reshape(x.shape[1], -1)
            x = project_add(mixed, o, x, reduce_attention, kernels)
        with jax.named_scope("ffn"):
            act = norm_swiglu(x, self.post_norm[...], self.gate_up[...], self.eps, kernels)
            return project_add(act, self.down[...], x, reduce_ffn, kernels), cache
