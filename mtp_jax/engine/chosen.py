"""Grouped attention over chosen positions, and the choice of blocks of tokens: plain XLA, in blocks of rows.

See `latent.by_blocks` for what bounds the memory of what is gathered.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mtp_jax.config import BlocksConfig
from mtp_jax.engine.latent import MASKED, by_blocks, pages
from mtp_jax.models.layers import Cache, product


def attend_chosen(q: jax.Array, cache: Cache, table: jax.Array, indices: jax.Array) -> jax.Array:
    """q [B * T, G, Q, H] over the positions `indices` [B * T, J] of each token (-1: none), as q.

    Args:
      q: queries.
      cache: keys and values, [P, page, G, H] each.
      table: pages [B, W].
      indices: positions.
    """
    keys, values = cache
    page_size, scale = keys.shape[1], keys.shape[3] ** -0.5

    def block(table: jax.Array, q: jax.Array, indices: jax.Array) -> jax.Array:
        at = jnp.maximum(indices, 0)
        page = jnp.take_along_axis(table[:, None], at // page_size, axis=2)
        k, v = (rows[page, at % page_size] for rows in (keys, values))  # B T J G H
        scores = product("btgqh,btjgh->btgqj", q, k, out_dtype=jnp.float32) * scale
        scores = jnp.where((indices >= 0)[:, :, None, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return product("btgqj,btjgh->btgqh", weights, v)

    return by_blocks(block, keys, table, q, indices, gathered=indices.size // table.shape[0])


def select_blocks(
    q: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    blocks: BlocksConfig,
    block_keys: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Positions of the best whole blocks, then of the tokens behind the last one: [B * T, J] int32, -1: none.

    Equal scores go to the earlier block.

    Args:
      q: the indexer's queries [B * T, I, H].
      cache: its keys [P, page, H], one a token.
      table: pages [B, W].
      positions: of the tokens, [B, T].
      blocks: sizes.
      block_keys: see `Attend.select_blocks`.
    """
    size, whole = blocks.block, table.shape[1] * cache.shape[1] // blocks.block
    count = min(blocks.budget // size, whole)
    scale = cache.shape[2] ** -0.5

    def block(table: jax.Array, q: jax.Array, positions: jax.Array) -> jax.Array:
        rows = pages(cache, table)[:, : whole * size]
        rows = rows.reshape(rows.shape[0], whole, size, -1).astype(jnp.float32)
        numbers = jnp.arange(whole, dtype=jnp.int32)
        first = jnp.broadcast_to(numbers * size, rows.shape[:2])
        keys = block_keys(jnp.mean(rows, axis=2).astype(cache.dtype), first)  # B blocks H
        scores = jax.nn.relu(product("btih,bsh->btis", q, keys, out_dtype=jnp.float32))
        scores = jnp.sum(scores, axis=2) * scale
        complete = (positions + 1) // size
        seen = numbers < complete[:, :, None]
        best, chosen = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), count)
        inside = jnp.arange(size, dtype=jnp.int32)
        found = chosen.astype(jnp.int32)[..., None] * size + inside  # B T count size
        found = jnp.where((best > -jnp.inf)[..., None], found, -1).reshape(*chosen.shape[:2], -1)
        tail = (complete * size)[..., None] + inside[:-1]
        return jnp.concatenate([found, jnp.where(tail <= positions[..., None], tail, -1)], axis=2)

    found = by_blocks(block, cache, table, q, positions.reshape(-1))
    return jnp.pad(found, ((0, 0), (0, blocks.positions - found.shape[1])), constant_values=-1)
