"""Layers that the model families share. Weights keep Hugging Face's [out, in] orientation.

On CPU that orientation is the fast one for the few rows of a decode step (the product reads each
weight row once, in order), on GPU and TPU the compiler takes either, and loading needs no transpose.

Where `kernels` is true, what a kernel of `pallas_kernels/few_rows` can take is left to it. They have no
gradient, so only the engine asks for them. They take no weights in float8 (`scaled.py`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import jax
import jax.numpy as jnp

from mtp_jax.config import ExpertsConfig, ModelConfig, RopeScaling
from mtp_jax.models.scaled import BlockScaled, Weight, dense
from pallas_kernels import few_rows

if TYPE_CHECKING:
    from mtp_jax.config import BlocksConfig
    from mtp_jax.models.delta import DeltaInputs, DeltaWeights
    from mtp_jax.models.delta_net import DeltaHeads


@dataclasses.dataclass(frozen=True)
class SumOver:
    """Sums partial products over the devices of these mesh axes, among which their weights are split.

    Along `rows`, some of the axes, devices have other tokens: `gather` gives each of them all rows, and the
    sum gives them back their own.
    """

    axes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    @property
    def over_one_device(self) -> bool:
        """Whether weights are whole here: then the sum says so to shard_map, and does nothing."""
        return all(jax.lax.axis_size(axis) == 1 for axis in self.axes)

    def index(self) -> jax.Array:
        """This device's number among them, int32."""
        return jax.lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def gather(self, x: jax.Array) -> jax.Array:
        """Rows [M, ...] of every device whose weights these devices have a part of."""
        return jax.lax.all_gather(x, self.rows, axis=0, tiled=True) if self.rows else x

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rows:
            x = jax.lax.psum_scatter(x, self.rows, scatter_dimension=0, tiled=True)
        axes = tuple(axis for axis in self.axes if axis not in self.rows)
        return jax.lax.psum(x, axes) if axes else x


UNSPLIT = SumOver()


Cache = tuple[jax.Array, ...]  # one layer's caches, as `caches` of its module describes them
Rope = tuple[jax.Array, jax.Array]  # cosines and sines of `rope_tables`


class Attend(Protocol):
    """The caches' owner: writes a layer's new rows and attends over what the rows may see."""

    def grouped(self, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Grouped-query attention.

        Takes qkv [M, G, Q + 2, H] as `norm_qkv_rope` returns it and (keys, values), each [P, page, G, H];
        returns ([M, G, Q, H], the new cache).
        """
        ...

    def grouped_chosen(
        self, qkv: jax.Array, cache: Cache, indices: jax.Array, reused: bool
    ) -> tuple[jax.Array, Cache]:
        """As `grouped`, over the positions [M, J] (-1: none) of these tokens or, `reused`, of another one."""
        ...

    def latent(
        self,
        q: jax.Array,
        row: jax.Array,
        cache: jax.Array,
        scale: float,
        width: int,
        indices: jax.Array | None,
        reused: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """Multi-query attention over latent rows, whose first R = `width` features are also the values.

        Takes q [M, N, R + Hr], the tokens' own rows [M, R + Hr], the cache [P, page, R + Hr] and, where
        attention is sparse, positions [M, J] (-1: none) of these tokens or, `reused`, of another one;
        returns ([M, N, R], the new cache).
        """
        ...

    def select(
        self, q: jax.Array, weights: jax.Array, key: jax.Array, cache: jax.Array, topk: int
    ) -> tuple[jax.Array, jax.Array]:
        """The `topk` positions with the best indexer scores, sum over heads of weight * relu(q . key).

        Takes q [M, I, H], weights [M, I] fp32, the tokens' own keys [M, H] and the cache [P, page, H];
        returns (positions [M, topk], -1 where a token sees fewer, and the new cache).
        """
        ...

    def select_blocks(
        self,
        q: jax.Array,
        key: jax.Array,
        cache: jax.Array,
        blocks: "BlocksConfig",
        block_keys: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Positions of the blocks of tokens with the best scores, and of tokens behind the last whole one.

        Takes q [M, I, H], the tokens' own keys [M, H], the cache [P, page, H] and what makes the keys of
        blocks [..., H] from the means of their tokens' keys and the blocks' first positions [...]; returns
        (positions [M, J], -1 where a token sees fewer, and the new cache).
        """
        ...

    def convolve(
        self, x: jax.Array, weight: jax.Array, dilation: int, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """A depthwise causal convolution over each row's sequence.

        Takes x [M, A], weight [A, taps] and (the windows of slots, the inputs of their last rounds); returns
        ([M, A] fp32, the new cache).
        """
        ...

    def recurrent(
        self,
        inputs: "DeltaInputs",
        weights: "DeltaWeights",
        heads: "DeltaHeads",
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """A gated delta net over each row's sequence.

        Takes M rows of inputs and the caches that `DeltaAttention.caches` describes; returns (outputs
        [M, IJ, Y] fp32, the new caches).
        """
        ...


# Takes a router's logits [M, E] fp32, the chosen experts [M, J], and the mixture's configuration.
Routed = Callable[[jax.Array, jax.Array, ExpertsConfig], None]


@dataclasses.dataclass(frozen=True)
class CacheRows:
    """One cache array of a layer: rows of this shape, split along these logical axes.

    There is a row for each token, in pages; or one for each slot; or one for each row of a slot's round.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    per: Literal["token", "slot", "round"] = "token"
    dtype: jnp.dtype | None = None  # None: the engine's
    is_index: bool = False  # keys of an indexer, which the memory plan lists by themselves


@dataclasses.dataclass(frozen=True)
class Around:
    """What a layer gets from whoever runs it.

    `sum_*` add partial products over the devices that share a layer's weights.
    """

    rope: Rope
    attend: Attend
    sum_attention: SumOver = UNSPLIT
    sum_ffn: SumOver = UNSPLIT
    sum_experts: SumOver = UNSPLIT
    kernels: bool = False
    reuse_indices: bool = False  # a layer with an indexer takes the positions it is given all the same
    ngram: jax.Array | None = None  # M X, the tokens' n-gram embeddings, where the layer takes them
    routed: Routed | None = None  # a trainer's: is told what the routers of experts say and choose


CPU_CACHE_BYTES = 2**24  # a matrix up to this size is still in the last cache when the next row wants it


def linear(x: jax.Array, weight: Weight, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [M, in] times weight [out..., in] -> [M, out...]; fp32 in full precision on every platform.

    `out_dtype` keeps more of the sums than x's own type would.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # One flat matrix: around an output of several axes XLA would transpose the whole weight first.
    x, flat = dense(x, weight.reshape(-1, weight.shape[-1]))

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


def product(
    equation: str, x: jax.Array, weight: Weight, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """An einsum, fp32 in full precision on every platform; `out_dtype` keeps more of the sums."""
    x, weight = dense(x, weight)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=out_dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis: normalised in fp32, cast, then scaled (Llama's order).

    Weights in fp32 scale before the cast (Qwen3-Next's order).
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if weight.dtype == jnp.float32:
        return (wide * weight).astype(x.dtype)
    return wide.astype(x.dtype) * weight


def rope_frequencies(width: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Rotation speed of each of the `width` / 2 planes, radians a position, fp32."""
    speeds = 1.0 / theta ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    if scaling is None:
        return speeds
    if scaling.kind == "linear":
        return speeds / scaling.factor
    if scaling.kind == "llama3":
        # Long waves are stretched, short ones kept, and a linear blend lies between.
        turns = scaling.original_max_position * speeds / (2 * jnp.pi)
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        # YaRN: the blend is linear in the plane's number, between the planes with these many turns.
        first, last = (
            _plane(turns, width, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        blend = 1 - (jnp.arange(width // 2, dtype=jnp.float32) - first) / max(last - first, 0.001)
    blend = jnp.clip(blend, 0.0, 1.0)
    return blend * speeds + (1 - blend) * speeds / scaling.factor


def _plane(turns: float, width: int, theta: float, scaling: RopeScaling) -> float:
    """Number of the plane that turns so often over the original context."""
    wave = scaling.original_max_position / (turns * 2 * math.pi)
    return width * math.log(wave) / (2 * math.log(theta))


def rope_tables(positions: jax.Array, config: ModelConfig) -> Rope:
    """Cosines and sines, each [M, rotated / 2] fp32, for token positions [M]."""
    width = config.rotary_dim or config.head_dim
    if config.latent is not None:
        width = config.latent.rope_dim
    speeds = rope_frequencies(width, config.rope_theta, config.rope_scaling)
    angles = positions.astype(jnp.float32)[:, None] * speeds
    stretch = _rope_stretch(config.rope_scaling)
    return jnp.cos(angles) * stretch, jnp.sin(angles) * stretch


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's correction of attention's magnitude for a context that is `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_stretch(scaling: RopeScaling | None) -> float:
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(
        scaling.factor, scaling.mscale_all_dim
    )


def apply_rope(x: jax.Array, tables: Rope) -> jax.Array:
    """Rotates the first features of x [M, ..., H], as many as the tables have, in fp32.

    Half-split layout: of r rotated features, plane i pairs i and i + r / 2.
    """
    cos, sin = (t.reshape(t.shape[0], *(1,) * (x.ndim - 2), t.shape[1]) for t in tables)
    half = cos.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    low, high = wide[..., :half], wide[..., half:]
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
    return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def norm_qkv_rope(
    x: jax.Array,
    norm: jax.Array,
    weight: Weight,
    bias: jax.Array | None,
    rope: Rope,
    eps: float,
    kernels: bool,
) -> jax.Array:
    """x [M, D] -> [M, G, Q + 2, H]: of each KV head its queries and its key, rotated, and its value."""
    if kernels and norm.dtype == x.dtype and not isinstance(weight, BlockScaled):
        with contextlib.suppress(few_rows.NotHereError):
            return few_rows.norm_qkv_rope(x, norm, weight, bias, rope, eps)
    qkv = linear(rms_norm(x, norm, eps), weight)
    if bias is not None:
        qkv = qkv + bias
    return jnp.concatenate([apply_rope(qkv[:, :, :-1], rope), qkv[:, :, -1:]], axis=2)


def split_qkv(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[M, G, Q + 2, H] -> queries [M, G, Q, H], keys and values [M, G, H]."""
    return qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]


def norm_swiglu(x: jax.Array, norm: jax.Array, gate_up: Weight, eps: float, kernels: bool) -> jax.Array:
    """x [M, D] -> [M, F]: gate_up [2, F, D] after a norm, SiLU of the one half times the other."""
    if kernels and norm.dtype == x.dtype and not isinstance(gate_up, BlockScaled):
        with contextlib.suppress(few_rows.NotHereError):
            return few_rows.norm_swiglu(x, norm, gate_up, eps)
    out = linear(rms_norm(x, norm, eps), gate_up)  # M 2 F
    return jax.nn.silu(out[:, 0]) * out[:, 1]


def project_add(
    x: jax.Array, weight: Weight, residual: jax.Array | None, reduce: SumOver, kernels: bool
) -> jax.Array:
    """residual [M, D] + the product of x [M, in] and weight [D, in], summed over the devices with parts.

    Without a residual the product alone: hyper-connections add it to their streams.
    """
    if residual is None:
        return reduce(linear(x, weight))
    if kernels and reduce.over_one_device and not isinstance(weight, BlockScaled):
        with contextlib.suppress(few_rows.NotHereError):
            return reduce(few_rows.project_add(x, weight, residual))
    return residual + reduce(linear(x, weight))
