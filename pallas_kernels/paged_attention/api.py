"""Attention of a few query tokens a row over a paged KV cache: the contract, and who carries it out."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.device import NotHereError, on_hopper
from pallas_kernels.paged_attention import mosaic_gpu, reference

Implementation = Literal["auto", "mosaic_gpu", "reference"]


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """softmax(q kᵀ / √H) v over the pages of each row, causal by position, softmax in fp32.

    In plain JAX, with S = W * page and p = positions clipped to [0, S):

        k, v = keys[table], values[table]  as [B, S, G, H]
        scores = einsum("btgqh,bsgh->btgqs", q, k) / sqrt(H)
        scores = where(s <= p[b, t], scores, -inf)
        out = einsum("btgqs,bsgh->btgqh", softmax(scores), v)

    Time and memory traffic follow the longest position of each row, not the table's width. No page is read
    but those up to that position; table columns behind it may hold anything. Inside its page, positions that
    no query sees must hold finite values. Dead rows may have any positions and pages: they cost what the
    clipped positions say, and touch no other row's result.

    The cache is read where it lies, in whole pages. Works inside shard_map with check_vma on.

    Args:
      q: [B, T, G, Q, H], T tokens a row, Q query heads for each of the G KV heads.
      keys: [P, page, G, H].
      values: like keys.
      table: [B, W] int32, the pages of each row in order.
      positions: [B, T] int32, the last position that each token sees.
      implementation: `auto` takes the kernel where there is one.

    Returns:
      [B, T, G, Q, H] in q's dtype.

    Raises:
      NotHereError: `auto` or `mosaic_gpu`, and no kernel takes this.
      ValueError: shapes that do not belong together.
    """
    _check(q, keys, values, table, positions)
    if implementation == "reference":
        return reference.paged_attention(q, keys, values, table, positions)
    reason = mosaic_gpu.why_not(q, keys)
    if reason is None and implementation == "auto" and not on_hopper():
        reason = "it needs a Hopper GPU"
    if reason is not None:
        raise NotHereError(f"no paged attention kernel here: {reason}")
    return mosaic_gpu.paged_attention(q, keys, values, table, positions)


def _check(q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array) -> None:
    if q.ndim != 5 or keys.ndim != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(
            "q must be [B, T, G, Q, H], keys and values alike [P, page, G, H]; got"
            f" {q.shape}, {keys.dtype}{keys.shape}, {values.dtype}{values.shape}"
        )
    b, t, g, _, h = q.shape
    if keys.shape[2:] != (g, h):
        raise ValueError(f"keys must have the {g} KV heads of {h} that q has, got {keys.shape[2:]}")
    if positions.shape != (b, t) or table.ndim != 2 or table.shape[0] != b or table.shape[1] < 1:
        raise ValueError(
            f"table must be [{b}, W], positions [{b}, {t}]; got {table.shape} and {positions.shape}"
        )
    if not (jnp.issubdtype(table.dtype, jnp.integer) and jnp.issubdtype(positions.dtype, jnp.integer)):
        raise ValueError(f"table and positions must be integers, got {table.dtype} and {positions.dtype}")
