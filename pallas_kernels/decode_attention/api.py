"""Attention of the newest tokens of each row, which writes their keys and values: the contract."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import mosaic_gpu, reference
from pallas_kernels.device import NotHereError, on_hopper

Implementation = Literal["auto", "mosaic_gpu", "reference"]


def decode_attention(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    limit: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes the keys and values of T new tokens a row into the cache, then attends like `paged_attention`.

    Token (b, t) goes to page table[b, p // page], offset p % page, with p = positions[b, t], where
    0 <= p < limit[b] and p < W * page; elsewhere nothing is written. Positions of a row ascend. No two rows
    may write to one place, nor one read a page that another writes, but for rows of limit 0: what they
    read, and so their result, is anything. What is not finite is written as nan_to_num would have it: a
    masked position weighs 0, and 0 times inf is NaN.

    The caches are written in place where the caller gives them up (donated, or the carry of a loop).
    Works inside shard_map with check_vma on.

    Args:
      qkv: [B * T, G, Q + 2, H]: of each KV head the queries, the key, the value of each token.
      keys: [P, page, G, H].
      values: like keys.
      table: [B, W] int32, the pages of each row in order.
      positions: [B, T] int32, of the tokens; each sees those up to its own.
      limit: [B] int32: a row with limit 0 writes nothing.
      implementation: `auto` takes the kernel where there is one.

    Returns:
      ([B * T, G, Q, H] in qkv's dtype, keys, values).

    Raises:
      NotHereError: `auto` or `mosaic_gpu`, and no kernel takes this.
      ValueError: shapes that do not belong together.
    """
    _check(qkv, keys, values, table, positions, limit)
    if implementation == "reference":
        return reference.decode_attention(qkv, keys, values, table, positions, limit)
    reason = mosaic_gpu.why_not(qkv, keys, positions.shape[1])
    if reason is None and implementation == "auto" and not on_hopper():
        reason = "it needs a Hopper GPU"
    if reason is not None:
        raise NotHereError(f"no decode attention kernel here: {reason}")
    return mosaic_gpu.decode_attention(qkv, keys, values, table, positions, limit)


def _check(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    limit: jax.Array,
) -> None:
    if qkv.ndim != 4 or keys.ndim != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(
            "qkv must be [B * T, G, Q + 2, H], keys and values alike [P, page, G, H]; got"
            f" {qkv.shape}, {keys.dtype}{keys.shape}, {values.dtype}{values.shape}"
        )
    rows, g, per_group, h = qkv.shape
    if keys.shape[2:] != (g, h) or per_group < 3:
        raise ValueError(f"keys must have the {g} KV heads of {h} that qkv has, got {keys.shape[2:]}")
    b = table.shape[0]
    if table.ndim != 2 or positions.ndim != 2 or positions.shape[0] != b or positions.size != rows:
        raise ValueError(
            f"table must be [B, W], positions [B, T] of {rows} tokens; got {table.shape}, {positions.shape}"
        )
    if limit.shape != (b,):
        raise ValueError(f"limit must be [{b}], got {limit.shape}")
    if not all(jnp.issubdtype(x.dtype, jnp.integer) for x in (table, positions, limit)):
        raise ValueError(
            "table, positions and limit must be integers, got"
            f" {table.dtype}, {positions.dtype} and {limit.dtype}"
        )
