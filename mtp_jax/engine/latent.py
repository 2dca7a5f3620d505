"""Latent attention over pages, whole and sparse, and the indexer's choice, in blocks of tokens.

The choice is made, and attended to, by kernels where they fit, else by XLA, as the rest is.

What is gathered for a block of token rows stays below a few times what one row of a long context takes, so
that a long prefill never holds a gathered copy of its whole context for every token.
"""

import contextlib
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from mtp_jax.models.layers import product
from pallas_kernels.device import NotHereError
from pallas_kernels.indexer_logits import indexer_logits
from pallas_kernels.sparse_mla import rows_of, sparse_mla
from pallas_kernels.topk_indices import topk_indices

MASKED = -1e30  # score of a position that is not seen
BLOCK = 16  # tokens of a row that are worked on at once
CONTEXT = 65536  # positions of all rows that are worked on at once
SCORED = 64  # tokens of a row whose scores kernels write at once
SCORES = 2**25  # scores of all tokens that kernels write at once


def attend_all(
    q: jax.Array, cache: jax.Array, table: jax.Array, positions: jax.Array, scale: float, width: int
) -> jax.Array:
    """q [B * T, N, R + Hr] over all earlier positions of each row -> [B * T, N, R].

    Args:
      q: queries.
      cache: latent rows [P, page, R + Hr].
      table: pages [B, W].
      positions: of the tokens, [B, T].
      scale: of the scores.
      width: R, the first features of a row, which are its value.
    """

    def block(table: jax.Array, q: jax.Array, positions: jax.Array) -> jax.Array:
        rows = pages(cache, table)  # B S R + Hr
        seen = jnp.arange(rows.shape[1]) <= positions[:, :, None]  # B T S
        scores = product("btnr,bsr->btns", q, rows, out_dtype=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, MASKED), axis=-1).astype(rows.dtype)
        return product("btns,bsr->btnr", weights, rows[..., :width])

    return by_blocks(block, cache, table, q, positions.reshape(-1))


def attend_chosen(
    q: jax.Array, cache: jax.Array, table: jax.Array, indices: jax.Array, scale: float, width: int
) -> jax.Array:
    """As `attend_all`, over the positions `indices` [B * T, J] of each token (-1: none)."""
    b, page_size = table.shape[0], cache.shape[1]
    with contextlib.suppress(NotHereError):
        rows = rows_of(indices.reshape(b, -1), table, page_size).reshape(indices.shape)
        return sparse_mla(q, cache, rows, scale, value_width=width)[0]

    def block(table: jax.Array, q: jax.Array, indices: jax.Array) -> jax.Array:
        at = jnp.maximum(indices, 0)
        page = jnp.take_along_axis(table[:, None], at // page_size, axis=2)
        rows = cache[page, at % page_size]  # B T J R + Hr
        scores = product("btnr,btjr->btnj", q, rows, out_dtype=jnp.float32) * scale
        scores = jnp.where((indices >= 0)[:, :, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(rows.dtype)
        return product("btnj,btjr->btnr", weights, rows[..., :width])

    return by_blocks(block, cache, table, q, indices, gathered=indices.size // b)


def select(
    q: jax.Array, weights: jax.Array, cache: jax.Array, table: jax.Array, positions: jax.Array, topk: int
) -> jax.Array:
    """The positions with the best indexer scores, [B * T, topk] int32, -1 where a token sees fewer.

    Of equal scores the lower positions are chosen. Their order is anything.

    Args:
      q: the indexer's queries [B * T, I, H].
      weights: of its heads, [B * T, I] fp32.
      cache: its keys [P, page, H].
      table: pages [B, W].
      positions: of the tokens, [B, T].
    """
    with contextlib.suppress(NotHereError):
        return _select_by_kernels(q, weights, cache, table, positions, topk)
    length = table.shape[1] * cache.shape[1]
    places, count = jnp.arange(length, dtype=jnp.int32), min(topk, length)

    def block(table: jax.Array, q: jax.Array, weights: jax.Array, positions: jax.Array) -> jax.Array:
        scores = jax.nn.relu(product("btih,bsh->btis", q, pages(cache, table), out_dtype=jnp.float32))
        scores = jnp.einsum("btis,bti->bts", scores, weights, precision=jax.lax.Precision.HIGHEST)
        seen = places <= positions[:, :, None]
        best, chosen = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), count)
        return jnp.where(best > -jnp.inf, chosen.astype(jnp.int32), -1)

    chosen = by_blocks(block, cache, table, q, weights, positions.reshape(-1))
    return jnp.pad(chosen, ((0, 0), (0, topk - count)), constant_values=-1)


def _select_by_kernels(
    q: jax.Array,
    weights: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    topk: int,
    implementation: Literal["auto", "reference"] = "auto",
) -> jax.Array:
    def block(table: jax.Array, q: jax.Array, weights: jax.Array, positions: jax.Array) -> jax.Array:
        q, weights = (x.reshape(positions.size, *x.shape[2:]) for x in (q, weights))
        scores = indexer_logits(q, weights, cache, table, positions, implementation=implementation)
        chosen = topk_indices(scores, positions.reshape(-1) + 1, topk, implementation=implementation)
        return chosen.reshape(*positions.shape, topk)

    t = positions.shape[1]
    context = SCORES // min(t, SCORED)
    return by_blocks(block, cache, table, q, weights, positions.reshape(-1), block=SCORED, context=context)


def pages(cache: jax.Array, table: jax.Array) -> jax.Array:
    """Rows of all positions, [B, W * page, ...]."""
    b, w = table.shape
    return cache[table].reshape(b, w * cache.shape[1], *cache.shape[2:])


def by_blocks(
    run: Callable[..., jax.Array],
    cache: jax.Array,
    table: jax.Array,
    *tokens: jax.Array,
    block: int = BLOCK,
    context: int = CONTEXT,
    gathered: int | None = None,
) -> jax.Array:
    """run(table [b, W], *tokens [b, t, ...]) for blocks of rows and tokens: [B * T, ...] -> [B * T, ...].

    A block has up to `block` tokens, of one row at least and else of so many that what they gather together
    stays below `context` positions. A row gathers `gathered`; None: its whole context.
    """
    rows, width = table.shape
    t = tokens[0].shape[0] // rows
    tokens = tuple(x.reshape(rows, t, *x.shape[1:]) for x in tokens)
    most = max(context // (gathered or width * cache.shape[1]), 1)
    if t <= block and rows <= most:
        out = run(table, *tokens)
        return out.reshape(rows * t, *out.shape[2:])
    if t > block:  # a prompt chunk, the last block filled up
        count, size = -(-t // block), block
        padded = (jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2)) for x in tokens)
        blocks = tuple(jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0) for x in padded)
        out = jax.lax.map(lambda part: run(table, *part), blocks)
        out = jnp.moveaxis(out, 0, 1)
        return out.reshape(rows, count * size, *out.shape[3:])[:, :t].reshape(rows * t, *out.shape[3:])
    while rows % most:
        most -= 1
    blocks = tuple(x.reshape(rows // most, most, *x.shape[1:]) for x in (table, *tokens))
    out = jax.lax.map(lambda part: run(*part), blocks)
    return out.reshape(rows * t, *out.shape[3:])
