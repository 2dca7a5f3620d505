"""Grouped-query attention as a pre-norm block: Llama, Qwen2, MiMo, GLM-4.5, Qwen3-Next, Qwen3.5."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtp_jax.config import ModelConfig
from mtp_jax.models.layers import (
    Around,
    Cache,
    CacheRows,
    apply_rope,
    linear,
    norm_qkv_rope,
    project_add,
    rms_norm,
)
from mtp_jax.models.leaves import Leaf, Make, Stored, norm, plain


class GroupedAttention(nnx.Module):
    """q, k and v are one product, grouped by KV head so that a shard of G is contiguous."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        table = {leaf.path[0]: leaf for leaf in self.leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(table[name].shape, table[name].dtype or dtype))

        self.eps = config.rms_norm_eps
        self.input_norm = parameter("input_norm") if config.streams is None else None
        self.qkv, self.o = parameter("qkv"), parameter("o")
        self.qkv_bias = parameter("qkv_bias") if config.attention_bias else None
        self.q_norm = parameter("q_norm") if config.qk_norm else None
        self.k_norm = parameter("k_norm") if config.qk_norm else None
        self.gate = parameter("gate") if config.output_gate else None
        self.whole_rotation = config.rotary_dim in (None, config.head_dim)

    def __call__(
        self, x: jax.Array, indices: jax.Array | None, cache: Cache, around: Around
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """x [M, D] -> (x + attention [M, D], positions attended to or indices as they came, cache).

        Without a norm of its own the block takes what hyper-connections give, and returns no sum with it.
        """
        mixed, indices, cache = self._attend(x, self._qkv(x, around), indices, cache, around)
        if self.gate is not None:
            mixed = mixed * jax.nn.sigmoid(linear(self._normed(x), self.gate[...]))  # M G Q H
        mixed, o = mixed.reshape(x.shape[0], -1), self.o[...].reshape(x.shape[1], -1)
        residual = None if self.input_norm is None else x
        return project_add(mixed, o, residual, around.sum_attention, around.kernels), indices, cache

    def _attend(
        self, x: jax.Array, qkv: jax.Array, indices: jax.Array | None, cache: Cache, around: Around
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """Over the whole context: (mixed values [M, G, Q, H], indices, cache)."""
        del x
        mixed, cache = around.attend.grouped(qkv, cache)
        return mixed, indices, cache

    def _normed(self, x: jax.Array) -> jax.Array:
        return x if self.input_norm is None else rms_norm(x, self.input_norm[...], self.eps)

    def _qkv(self, x: jax.Array, around: Around) -> jax.Array:
        """[M, G, Q + 2, H], queries and keys rotated."""
        bias = None if self.qkv_bias is None else self.qkv_bias[...]
        weight = self.qkv[...]
        if self.whole_rotation and self.q_norm is None and self.input_norm is not None:
            norm = self.input_norm[...]
            return norm_qkv_rope(x, norm, weight, bias, around.rope, self.eps, around.kernels)
        qkv = linear(self._normed(x), weight)
        if bias is not None:
            qkv = qkv + bias
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm[...], self.eps), rms_norm(k, self.k_norm[...], self.eps)
        return jnp.concatenate([apply_rope(q, around.rope), apply_rope(k, around.rope), v], axis=2)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights; KV heads are the logical axis `kv_heads`."""
        d, h, g = config.hidden_size, config.head_dim, config.num_key_value_heads
        n = config.num_attention_heads
        q = n // g
        leaves = [
            _qkv_leaf("qkv", "weight", config, (d,)),
            plain("o", (d, g, q, h), (None, "kv_heads", None, None), "self_attn.o_proj.weight", (d, n * h)),
        ]
        if config.streams is None:
            leaves.insert(0, norm("input_norm", d, "input_layernorm.weight", config.zero_centred_norms))
        if config.attention_bias:
            leaves.append(_qkv_leaf("qkv_bias", "bias", config, ()))
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                leaves.append(norm(name, h, f"self_attn.{name}.weight", config.zero_centred_norms))
        if config.output_gate:
            leaves.append(_gate_leaf(config))
        return tuple(leaves)

    @staticmethod
    def caches(config: ModelConfig) -> tuple[CacheRows, ...]:
        """Keys and values."""
        rows = CacheRows((config.num_key_value_heads, config.head_dim), ("kv_heads", None))
        return rows, rows


def _qkv_leaf(path: str, kind: str, config: ModelConfig, tail: tuple[int, ...]) -> Leaf:
    h, g, n = config.head_dim, config.num_key_value_heads, config.num_attention_heads
    gates = 2 if config.output_gate else 1  # q_proj then has a head's query and its gate, one after the other
    rows = {"q": n * h * gates, "k": g * h, "v": g * h}

    def join(parts: list[np.ndarray]) -> np.ndarray:
        queries = parts[0].reshape(g, n // g, gates, h, *tail)[:, :, 0]
        return np.concatenate([queries, *(part.reshape(g, 1, h, *tail) for part in parts[1:])], axis=1)

    def part(array: np.ndarray) -> list[np.ndarray]:
        queries = np.zeros((g, n // g, gates, h, *tail), array.dtype)
        queries[:, :, 0] = array[:, :-2]
        return [queries, array[:, -2], array[:, -1]]

    tensors = tuple((f"self_attn.{name}_proj.{kind}", (count, *tail)) for name, count in rows.items())
    axes = ("kv_heads", None, None, *(None for _ in tail))
    return Leaf((path,), (g, n // g + 2, h, *tail), axes, (Stored(tensors, join, part),))


def _gate_leaf(config: ModelConfig) -> Leaf:
    """The output gate's part of q_proj."""
    d, h, g, n = (
        config.hidden_size,
        config.head_dim,
        config.num_key_value_heads,
        config.num_attention_heads,
    )

    def join(parts: list[np.ndarray]) -> np.ndarray:
        return parts[0].reshape(g, n // g, 2, h, d)[:, :, 1]

    def part(array: np.ndarray) -> list[np.ndarray]:
        both = np.zeros((g, n // g, 2, h, d), array.dtype)
        both[:, :, 1] = array
        return [both]

    stored = Stored((("self_attn.q_proj.weight", (2 * n * h, d)),), join, part)
    return Leaf(("gate",), (g, n // g, h, d), ("kv_heads", None, None, None), (stored,))
