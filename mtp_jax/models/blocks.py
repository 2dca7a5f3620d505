"""Grouped attention over blocks of tokens that an indexer chooses (Qwen4Exp).

The indexer has a few query heads and one key a token, which is cached as it is projected. A block's key is
the mean of its tokens' keys, then normalised, and rotated as the block's first token would be. Scores are
sums of relu(q . k) over heads, without learned weights. A cache of keys by position needs no rollback: what a
rejected token has left there is written anew before anybody sees it, and blocks' keys are made when read.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import BlocksConfig, ModelConfig
from mtp_jax.models.attention import GroupedAttention
from mtp_jax.models.layers import Around, Cache, CacheRows, apply_rope, linear, rms_norm, rope_tables
from mtp_jax.models.leaves import Leaf, Make, inside, norm, plain


class BlockAttention(GroupedAttention):
    """Grouped attention over the positions of its own indexer, or those that it is given."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        super().__init__(config, dtype, make)
        self.indexer = BlockIndexer(config, dtype, make)

    def _attend(
        self, x: jax.Array, qkv: jax.Array, indices: jax.Array | None, cache: Cache, around: Around
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        keys, values, index = cache
        reused = around.reuse_indices and indices is not None
        if not reused:
            indices, index = self.indexer(self._normed(x), index, around)
        assert indices is not None
        mixed, rows = around.attend.grouped_chosen(qkv, (keys, values), indices, reused)
        return mixed, indices, (*rows, index)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights; KV heads are the logical axis `kv_heads`."""
        return GroupedAttention.leaves(config) + inside("indexer", BlockIndexer.leaves(config))

    @staticmethod
    def caches(config: ModelConfig) -> tuple[CacheRows, ...]:
        """Keys and values, and the indexer's keys."""
        index = CacheRows((_blocks(config).head_dim,), (None,), is_index=True)
        return (*GroupedAttention.caches(config), index)


class BlockIndexer(nnx.Module):
    """Which positions each token attends to."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        leaves = {leaf.path[0]: leaf for leaf in self.leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(leaves[name].shape, leaves[name].dtype or dtype))

        self.config, self.blocks = config, _blocks(config)
        self.qk = parameter("qk")
        self.q_norm, self.k_norm = parameter("q_norm"), parameter("k_norm")

    def __call__(self, x: jax.Array, cache: jax.Array, around: Around) -> tuple[jax.Array, jax.Array]:
        """x [M, D] -> (positions [M, J], -1 where a token sees fewer; cache)."""
        both = linear(x, self.qk[...])  # M I + 1 H
        query = apply_rope(self._norm(both[:, :-1], self.q_norm), around.rope)
        return around.attend.select_blocks(query, both[:, -1], cache, self.blocks, self._block_keys)

    def _block_keys(self, means: jax.Array, first: jax.Array) -> jax.Array:
        """Keys of blocks [..., H] from their tokens' mean and their first positions [...]."""
        flat = self._norm(means, self.k_norm).reshape(-1, means.shape[-1])
        return apply_rope(flat, rope_tables(first.reshape(-1), self.config)).reshape(means.shape)

    def _norm(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        return rms_norm(x, weight[...], self.config.rms_norm_eps)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights, whole on every device: scores are sums over all heads."""
        blocks, d, zero_centred = _blocks(config), config.hidden_size, config.zero_centred_norms
        i, h, prefix = blocks.num_heads, blocks.head_dim, "self_attn.indexer."
        stored = ((i + 1) * h, d)
        return (
            plain("qk", (i + 1, h, d), (None, None, None), f"{prefix}index_qk_proj.weight", stored),
            norm("q_norm", h, f"{prefix}q_layernorm.weight", zero_centred),
            norm("k_norm", h, f"{prefix}k_layernorm.weight", zero_centred),
        )


def _blocks(config: ModelConfig) -> BlocksConfig:
    assert config.blocks is not None
    return config.blocks
