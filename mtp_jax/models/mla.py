"""Multi-head latent attention (DeepSeek-V2), whole or sparse (DeepSeek-V3.2, GLM-5), as a pre-norm block.

One latent c of R features a token stands for the keys and values of all heads, beside one rotated key of
Hr features. What is cached is the row [c | key]. The product that would expand c into a head's keys is
applied to the query instead (*absorbed*: q_nope . (U c) = (U^T q_nope) . c), and so is that of the values to
what attention gives: all heads share one row a token, and attention is multi-query attention over rows.

Checkpoints rotate neighbouring features (2i, 2i + 1). The rows of the weights that make rotated features are
sorted at loading, even ones first, so that the engine's half-split rotation does the same: products of
queries with keys do not depend on the order of features.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtp_jax.config import IndexerConfig, LatentConfig, ModelConfig
from mtp_jax.models.layers import (
    Around,
    Cache,
    CacheRows,
    apply_rope,
    linear,
    product,
    project_add,
    rms_norm,
    yarn_magnitude,
)
from mtp_jax.models.leaves import Leaf, Make, Stored, inside, never_float8, norm, plain, reordered

INDEXER_EPS = 1e-6  # of the LayerNorm of indexer keys, whatever rms_norm_eps is
LATENT_EPS = 1e-6  # of the norms of both latents, likewise


class LatentAttention(nnx.Module):
    """Latent attention; with an indexer, or given its positions, over the best positions only."""

    def __init__(self, config: ModelConfig, owns_indexer: bool, dtype: jnp.dtype, make: Make):
        latent = _latent(config)
        shapes = {leaf.path[0]: leaf.shape for leaf in self._own_leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(shapes[name], dtype))

        self.eps = config.rms_norm_eps
        self.latent = latent
        self.scale = softmax_scale(config)
        self.input_norm = parameter("input_norm")
        ranked = latent.q_rank is not None
        self.q_down = parameter("q_down") if ranked else None
        self.q_norm = parameter("q_norm") if ranked else None
        self.q_up = parameter("q_up")
        self.kv_down, self.kv_norm = parameter("kv_down"), parameter("kv_norm")
        self.k_up, self.v_up = parameter("k_up"), parameter("v_up")
        self.o = parameter("o")
        self.indexer = Indexer(config, dtype, make) if owns_indexer else None

    def __call__(
        self, x: jax.Array, indices: jax.Array | None, cache: Cache, around: Around
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """x [M, D] -> (x + attention [M, D], positions attended to [M, J] or None, cache).

        `indices` are those of an earlier layer; a layer with an indexer of its own makes new ones.
        """
        latent, rows_cache = self.latent, cache[0]
        normed = rms_norm(x, self.input_norm[...], self.eps)
        q_latent = normed  # where queries have no latent of their own
        if self.q_down is not None and self.q_norm is not None:
            q_latent = rms_norm(linear(normed, self.q_down[...]), self.q_norm[...], LATENT_EPS)
        q = linear(q_latent, self.q_up[...])  # M N nope + rope
        keys = cache[1:]
        if self.indexer is not None and not (around.reuse_indices and indices is not None):
            indices, *keys = self.indexer(normed, q_latent, keys[0], around)
        row = linear(normed, self.kv_down[...])
        row = jnp.concatenate(
            [
                rms_norm(row[:, : latent.kv_rank], self.kv_norm[...], LATENT_EPS),
                apply_rope(row[:, latent.kv_rank :], around.rope),
            ],
            axis=1,
        )
        absorbed = product("mnh,nhr->mnr", q[:, :, : latent.nope_dim], self.k_up[...])
        query = jnp.concatenate([absorbed, apply_rope(q[:, :, latent.nope_dim :], around.rope)], axis=2)
        mixed, rows_cache = around.attend.latent(
            query, row, rows_cache, self.scale, latent.kv_rank, indices, around.reuse_indices
        )
        mixed = product("mnr,nhr->mnh", mixed, self.v_up[...])
        mixed, o = mixed.reshape(x.shape[0], -1), self.o[...].reshape(x.shape[1], -1)
        x = project_add(mixed, o, x, around.sum_attention, around.kernels)
        return x, indices, (rows_cache, *keys)

    @staticmethod
    def leaves(config: ModelConfig, owns_indexer: bool) -> tuple[Leaf, ...]:
        """Its weights; query heads are the logical axis `heads`."""
        own = LatentAttention._own_leaves(config)
        return own + inside("indexer", Indexer.leaves(config)) if owns_indexer else own

    @staticmethod
    def _own_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        latent, d, n = _latent(config), config.hidden_size, config.num_attention_heads
        r, nope, rope, v = latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.v_dim
        order = rotation_order(rope, latent.interleaved)

        def behind(first: int) -> np.ndarray:
            return np.concatenate([np.arange(first), first + order])

        def expand(first: int, last: int) -> Stored:
            def part(array: np.ndarray) -> list[np.ndarray]:
                return [np.pad(array, ((0, 0), (first, nope + v - last), (0, 0)))]

            tensors = (("self_attn.kv_b_proj.weight", (n * (nope + v), r)),)
            return Stored(tensors, lambda parts: parts[0].reshape(n, nope + v, r)[:, first:last], part)

        q_in, q_name = (d, "q_proj") if latent.q_rank is None else (latent.q_rank, "q_b_proj")
        q_shape, kv_shape = (n, nope + rope, q_in), (r + rope, d)
        q_up = reordered(f"self_attn.{q_name}.weight", (n * (nope + rope), q_in), q_shape, 1, behind(nope))
        kv_down = reordered("self_attn.kv_a_proj_with_mqa.weight", kv_shape, kv_shape, 0, behind(r))
        head = ("heads", None, None)
        return (
            norm("input_norm", d, "input_layernorm.weight", config.zero_centred_norms),
            *LatentAttention._q_latent_leaves(config),
            Leaf(("q_up",), q_shape, head, (q_up,)),
            Leaf(("kv_down",), kv_shape, (None, None), (kv_down,)),
            plain("kv_norm", (r,), (None,), "self_attn.kv_a_layernorm.weight"),
            Leaf(("k_up",), (n, nope, r), head, (expand(0, nope),)),
            Leaf(("v_up",), (n, v, r), head, (expand(nope, nope + v),)),
            plain("o", (d, n, v), (None, "heads", None), "self_attn.o_proj.weight", (d, n * v)),
        )

    @staticmethod
    def _q_latent_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Of the queries' latent, where there is one."""
        rank, d = _latent(config).q_rank, config.hidden_size
        if rank is None:
            return ()
        return (
            plain("q_down", (rank, d), (None, None), "self_attn.q_a_proj.weight"),
            plain("q_norm", (rank,), (None,), "self_attn.q_a_layernorm.weight"),
        )

    @staticmethod
    def caches(config: ModelConfig, owns_indexer: bool) -> tuple[CacheRows, ...]:
        """Latent rows, the same on every device; and the indexer's keys."""
        latent = _latent(config)
        rows = CacheRows((latent.kv_rank + latent.rope_dim,), (None,))
        return (rows, *Indexer.caches(config)) if owns_indexer else (rows,)


class Indexer(nnx.Module):
    """The lightning indexer: scores of all earlier positions by small heads, and the best of them.

    Rotated features come first (in latent attention they come last). A published reference multiplies
    queries and keys by a Hadamard matrix, which changes no product; it is left out.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        indexer = _indexer(config)
        shapes = {leaf.path[0]: leaf.shape for leaf in self.leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(shapes[name], dtype))

        self.topk = indexer.topk
        self.scale = indexer.head_dim**-0.5 * indexer.num_heads**-0.5
        self.q, self.k = parameter("q"), parameter("k")
        self.k_norm, self.k_norm_bias = parameter("k_norm"), parameter("k_norm_bias")
        self.weights = parameter("weights")

    def __call__(
        self, x: jax.Array, q_latent: jax.Array, cache: jax.Array, around: Around
    ) -> tuple[jax.Array, jax.Array]:
        """Normed x [M, D] and the query latents [M, Rq] -> (positions [M, topk], -1 where fewer; cache).

        A loss of its own trains it, and leaves the rest of the model alone (DeepSeek-V3.2).
        """
        x, q_latent = jax.lax.stop_gradient((x, q_latent))
        q = apply_rope(linear(q_latent, self.q[...]), around.rope)  # M I H
        key = layer_norm(linear(x, self.k[...]), self.k_norm[...], self.k_norm_bias[...], INDEXER_EPS)
        key = apply_rope(key, around.rope)
        weights = linear(x.astype(jnp.float32), self.weights[...].astype(jnp.float32)) * self.scale
        return around.attend.select(q, weights, key, cache, self.topk)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights, whole on every device: scores are sums over all heads."""
        indexer, latent, d = _indexer(config), _latent(config), config.hidden_size
        i, h, q_rank = indexer.num_heads, indexer.head_dim, latent.q_rank or d
        order = np.arange(h)
        order[: latent.rope_dim] = rotation_order(latent.rope_dim, indexer.interleaved)

        def sorted_rows(path: str, name: str, shape: tuple[int, ...]) -> Leaf:
            stored = reordered(f"self_attn.indexer.{name}", shape, shape, 0, order)
            return Leaf((path,), shape, (None,) * len(shape), (stored,))

        q_shape = (i, h, q_rank)
        q_stored = reordered("self_attn.indexer.wq_b.weight", (i * h, q_rank), q_shape, 1, order)
        return (
            Leaf(("q",), q_shape, (None, None, None), (q_stored,)),
            sorted_rows("k", "wk.weight", (h, d)),
            sorted_rows("k_norm", "k_norm.weight", (h,)),
            sorted_rows("k_norm_bias", "k_norm.bias", (h,)),
            never_float8(plain("weights", (i, d), (None, None), "self_attn.indexer.weights_proj.weight")),
        )

    @staticmethod
    def caches(config: ModelConfig) -> tuple[CacheRows, ...]:
        """Its keys."""
        return (CacheRows((_indexer(config).head_dim,), (None,), is_index=True),)


def rotation_order(width: int, interleaved: bool) -> np.ndarray:
    """Where the checkpoint has each of the engine's half-split rotated features."""
    features = np.arange(width)
    return np.concatenate([features[::2], features[1::2]]) if interleaved else features


def softmax_scale(config: ModelConfig) -> float:
    """What scores are multiplied by: 1 / sqrt of the query width, and YaRN's magnitude twice."""
    latent, scaling = _latent(config), config.rope_scaling
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if scaling is not None and scaling.kind == "yarn":
        scale *= yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm over the last axis, in fp32."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _latent(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None
    return config.latent


def _indexer(config: ModelConfig) -> IndexerConfig:
    assert config.indexer is not None
    return config.indexer
