"""Scores of a lightning indexer over a paged cache: the contract, and who carries it out."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.device import NotHereError, on_hopper
from pallas_kernels.indexer_logits import mosaic_gpu, reference

Implementation = Literal["auto", "mosaic_gpu", "reference"]


def indexer_logits(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    scales: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """What each token's indexer thinks of each earlier position; sums in fp32.

    In plain JAX, for token t of row b, with S = W * page and k = keys[table[b]] as [S, H]:

        scores[t, s] = sum over i of relu(q[t, i] . k[s]) * weights[t, i]
        scores[t, s] *= scales[table[b]] as [S]      (where there are scales)
        scores[t, s] = -inf                          (where s > positions[b, t])

    Time follows the longest position of each row: of the table's width only the -inf behind it are written.
    Table columns behind it, and positions that no token sees, may hold anything: what is read of them, in
    a row's last tile, is thrown away. Works inside shard_map with check_vma on.

    Args:
      q: [B * T, I, H], T tokens a row, I heads of the indexer. In the keys' dtype; a scale of float8 queries
        belongs into `weights`.
      weights: [B * T, I] fp32, of any sign.
      keys: [P, page, H], bfloat16 or float8_e4m3fn.
      table: [B, W] int32, the pages of each row in order.
      positions: [B, T] int32, the last position that each token sees; a negative one sees nothing.
      scales: [P, page] fp32, of the keys.
      implementation: `auto` takes the kernel where there is one.

    Returns:
      [B * T, W * page] fp32.

    Raises:
      NotHereError: `auto` or `mosaic_gpu`, and no kernel takes this.
      ValueError: shapes that do not belong together.
    """
    _check(q, weights, keys, table, positions, scales)
    if implementation == "reference":
        return reference.indexer_logits(q, weights, keys, table, positions, scales)
    reason = mosaic_gpu.why_not(q, keys)
    if reason is None and implementation == "auto" and not on_hopper():
        reason = "it needs a Hopper GPU"
    if reason is not None:
        raise NotHereError(f"no indexer kernel here: {reason}")
    return mosaic_gpu.indexer_logits(q, weights, keys, table, positions, scales)


def _check(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    scales: jax.Array | None,
) -> None:
    if q.ndim != 3 or keys.ndim != 3 or q.shape[2] != keys.shape[2] or q.dtype != keys.dtype:
        raise ValueError(
            "q must be [B * T, I, H], keys [P, page, H] in the same dtype; got"
            f" {q.dtype}{q.shape}, {keys.dtype}{keys.shape}"
        )
    if weights.shape != q.shape[:2] or weights.dtype != jnp.float32:
        raise ValueError(f"weights must be float32{q.shape[:2]}, got {weights.dtype}{weights.shape}")
    if table.ndim != 2 or positions.ndim != 2 or table.shape[0] != positions.shape[0] or table.shape[1] < 1:
        raise ValueError(f"table must be [B, W], positions [B, T]; got {table.shape} and {positions.shape}")
    if positions.size != q.shape[0]:
        raise ValueError(f"positions must be those of {q.shape[0]} tokens, got {positions.shape}")
    if not (jnp.issubdtype(table.dtype, jnp.integer) and jnp.issubdtype(positions.dtype, jnp.integer)):
        raise ValueError(f"table and positions must be integers, got {table.dtype} and {positions.dtype}")
    if scales is not None and (scales.shape != keys.shape[:2] or scales.dtype != jnp.float32):
        raise ValueError(f"scales must be float32{keys.shape[:2]}, got {scales.dtype}{scales.shape}")
