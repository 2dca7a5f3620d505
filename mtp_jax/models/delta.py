"""The gated delta net as a pre-norm block (Qwen3-Next, Qwen3.5): attention by a state instead of a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtp_jax.config import DeltaConfig, ModelConfig
from mtp_jax.models.delta_net import DeltaHeads, gated_rms_norm, interleaved_rows
from mtp_jax.models.layers import Around, Cache, CacheRows, linear, project_add, rms_norm
from mtp_jax.models.leaves import Leaf, Make, Shape, Stored, never_float8, norm, plain, reordered, whole

FLOAT32 = jnp.dtype("float32")


class DeltaAttention(nnx.Module):
    """q, k and v are one product, grouped by key head so that a shard of key heads is contiguous."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        table = {leaf.path[0]: leaf for leaf in self.leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(table[name].shape, table[name].dtype or dtype))

        self.eps = config.rms_norm_eps
        self.input_norm = parameter("input_norm") if config.streams is None else None
        self.qkv, self.z = parameter("qkv"), parameter("z")
        self.b, self.a = parameter("b"), parameter("a")
        self.conv, self.a_log, self.dt_bias = parameter("conv"), parameter("a_log"), parameter("dt_bias")
        self.out_norm, self.o = parameter("out_norm"), parameter("o")
        self.heads = heads_of(config)
        self.sigmoid_gate = _delta(config).gate == "sigmoid"

    def __call__(
        self, x: jax.Array, indices: jax.Array | None, cache: Cache, around: Around
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """x [M, D] -> (x + the net's output [M, D], indices as they came, cache).

        Without a norm of its own it takes what hyper-connections give, and returns no sum with it.
        """
        m, groups = x.shape[0], self.qkv.shape[0]
        heads = dataclasses.replace(
            self.heads, num_key_heads=groups, num_value_heads=groups * self.b.shape[1]
        )
        normed = x if self.input_norm is None else rms_norm(x, self.input_norm[...], self.eps)
        channels = self._by_part(linear(normed, self.qkv[...]), heads)
        b, a = (linear(normed, weight[...]).reshape(m, -1) for weight in (self.b, self.a))
        weights = DeltaWeights(
            self._by_part(self.conv[...].transpose(2, 0, 1), heads).T,
            self.a_log[...].reshape(-1),
            self.dt_bias[...].reshape(-1),
        )
        out, cache = around.attend.recurrent(DeltaInputs(channels, b, a), weights, heads, cache)
        z = linear(normed, self.z[...]).reshape(out.shape)
        activation = jax.nn.sigmoid if self.sigmoid_gate else jax.nn.silu
        out = gated_rms_norm(out, z, self.out_norm[...], self.eps, activation).reshape(m, -1)
        residual, o = None if self.input_norm is None else x, self.o[...].reshape(x.shape[1], -1)
        return project_add(out, o, residual, around.sum_attention, around.kernels), indices, cache

    @staticmethod
    def _by_part(grouped: jax.Array, heads: DeltaHeads) -> jax.Array:
        """[n, I, 2 X + J Y], key head by key head -> [n, A]: all queries, all keys, all values."""
        edges = (heads.key_width, 2 * heads.key_width)
        parts = (part.reshape(grouped.shape[0], -1) for part in jnp.split(grouped, edges, axis=2))
        return jnp.concatenate(list(parts), axis=1)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights; key heads are the logical axis `key_heads`."""
        delta, heads, d = _delta(config), heads_of(config), config.hidden_size
        i, x, y = heads.num_key_heads, heads.key_width, heads.value_width
        j = heads.num_value_heads // i
        taps = delta.conv_taps
        split = ("key_heads", None, None)

        def per_head(path: str, name: str) -> Leaf:
            stored = plain(path, (i, j), split[:2], f"linear_attn.{name}", (i * j,))
            return dataclasses.replace(stored, dtype=FLOAT32)

        packed = _packed(config)
        conv = reordered(
            "linear_attn.conv1d.weight",
            (heads.num_channels, 1, taps),
            (heads.num_channels, taps),
            0,
            _grouped_order(heads),
        )
        before = norm("input_norm", d, "input_layernorm.weight", config.zero_centred_norms)
        return (
            *((before,) if config.streams is None else ()),
            Leaf(("qkv",), (i, 2 * x + j * y, d), split, packed["qkv"]),
            Leaf(("z",), (i, j * y, d), split, packed["z"]),
            Leaf(("b",), (i, j, d), split, packed["b"]),
            Leaf(("a",), (i, j, d), split, packed["a"]),
            never_float8(Leaf(("conv",), (i, 2 * x + j * y, taps), split, (conv,))),
            per_head("a_log", "A_log"),
            per_head("dt_bias", "dt_bias"),
            plain("out_norm", (y,), (None,), "linear_attn.norm.weight"),
            plain(
                "o", (d, i, j * y), (None, "key_heads", None), "linear_attn.out_proj.weight", (d, i * j * y)
            ),
        )

    @staticmethod
    def caches(config: ModelConfig) -> tuple[CacheRows, ...]:
        """The state and the convolution's window of a slot, and the journal of its last round.

        The journal: the convolution's inputs, keys, deltas and decays.
        """
        delta, heads = _delta(config), heads_of(config)
        split = ("key_heads", None, None)
        i, ij, x, y = heads.num_key_heads, heads.num_value_heads, heads.key_width, heads.value_width
        return (
            CacheRows((ij, x, y), split, "slot", FLOAT32),
            CacheRows((delta.conv_taps - 1, heads.num_channels), (None, "key_heads"), "slot"),
            CacheRows((heads.num_channels,), ("key_heads",), "round"),
            CacheRows((i, x), split[:2], "round", FLOAT32),
            CacheRows((ij, y), split[:2], "round", FLOAT32),
            CacheRows((ij,), split[:1], "round", FLOAT32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaInputs:
    """Projections that the recurrence takes; token rows M, or B T of a segment."""

    channels: jax.Array  # M A   the convolution's inputs
    b: jax.Array  # M IJ
    a: jax.Array  # M IJ


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaWeights:
    """What the recurrence itself needs of a layer's weights."""

    conv: jax.Array  # A taps
    a_log: jax.Array  # IJ
    dt_bias: jax.Array  # IJ


def heads_of(config: ModelConfig) -> DeltaHeads:
    """Head counts and widths of a model's delta nets."""
    delta = _delta(config)
    return DeltaHeads(delta.num_key_heads, delta.num_value_heads, delta.key_width, delta.value_width)


def _grouped_order(heads: DeltaHeads) -> np.ndarray:
    """Channels of all queries, keys and values, in the order of key heads."""
    i = heads.num_key_heads
    qk, v = i * heads.key_width, heads.num_value_heads * heads.value_width
    parts = np.split(np.arange(2 * qk + v), (qk, 2 * qk))
    return np.concatenate([part.reshape(i, -1) for part in parts], axis=1).reshape(-1)


def _packed(config: ModelConfig) -> dict[str, tuple[Stored, ...]]:
    """How projections are stored: apart (Qwen3.5), or two by two, key head by key head (Qwen3-Next)."""
    heads, d = heads_of(config), config.hidden_size
    i, x, y = heads.num_key_heads, heads.key_width, heads.value_width
    j = heads.num_value_heads // i
    channels = heads.num_channels
    qkvz_shape, ba_shape = (channels + i * j * y, d), (2 * i * j, d)
    q, k, v, z = interleaved_rows(i, (x, x, j * y, j * y))
    b, a = interleaved_rows(i, (j, j))
    qkv = np.concatenate([rows.reshape(i, -1) for rows in (q, k, v)], axis=1).reshape(-1)
    apart = reordered(
        "linear_attn.in_proj_qkv.weight", (channels, d), (channels, d), 0, _grouped_order(heads)
    )
    qkvz, ba = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
    return {
        "qkv": (apart, _rows_of(qkvz, qkvz_shape, qkv)),
        "z": (whole("linear_attn.in_proj_z.weight", (i * j * y, d)), _rows_of(qkvz, qkvz_shape, z)),
        "b": (whole("linear_attn.in_proj_b.weight", (i * j, d)), _rows_of(ba, ba_shape, b)),
        "a": (whole("linear_attn.in_proj_a.weight", (i * j, d)), _rows_of(ba, ba_shape, a)),
    }


def _rows_of(name: str, shape: Shape, rows: np.ndarray) -> Stored:
    """Some rows of a tensor that other leaves share."""

    def part(array: np.ndarray) -> list[np.ndarray]:
        shared = np.zeros(shape, array.dtype)
        shared[rows] = array.reshape(-1, shape[1])
        return [shared]

    return Stored(((name, shape),), lambda parts: parts[0][rows], part)


def _delta(config: ModelConfig) -> DeltaConfig:
    assert config.delta is not None
    return config.delta
