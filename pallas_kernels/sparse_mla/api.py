"""Attention of query tokens over chosen rows of a latent cache: the contract, and who carries it out."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.device import NotHereError, on_hopper, on_tpu
from pallas_kernels.sparse_mla import mosaic_gpu, mosaic_tpu, packed, reference

Implementation = Literal["auto", "mosaic_gpu", "mosaic_tpu", "reference"]


def sparse_mla(
    q: jax.Array,
    cache: jax.Array,
    indices: jax.Array,
    scale: float,
    *,
    value_width: int = 512,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * q kᵀ) v over the rows that each token names, softmax in fp32.

    In plain JAX, with `rows` the cache as [P * page, R]:

        k = rows[indices]  as [T, J, R]
        scores = where(indices >= 0, einsum("tnr,tjr->tnj", q, k) * scale, -inf)
        out = einsum("tnj,tjv->tnv", softmax(scores), k[..., :value_width])
        lse = logsumexp(scores)

    A token may name a row twice: it then counts twice. No row is read but those that are named. The cache is
    read where it lies. Works inside shard_map with check_vma on.

    Args:
      q: [T, N, R], absorbed queries: N heads of a latent part and a rotated part.
      cache: [P, page, R] or [rows, R]; or, for the TPU kernel, such rows as int32 words (`pack_rows`).
      indices: [T, J] int32, rows of the flattened cache (`rows_of` finds them); negative: none, anywhere.
        What lies behind the last row must not be named.
      scale: of the scores.
      value_width: the first features of a row, which are its value.
      implementation: `auto` takes the kernel where there is one.

    Returns:
      ([T, N, value_width] in q's dtype, log-sum-exp of the scores [T, N] fp32, natural). A token that names
      no row gets 0 and -inf.

    Raises:
      NotHereError: not `reference`, and no kernel takes this.
      ValueError: shapes that do not belong together.
    """
    _check(q, cache, indices, value_width)
    if implementation == "reference":
        return reference.sparse_mla(q, cache, indices, scale, value_width)
    if implementation == "auto":
        implementation = "mosaic_tpu" if on_tpu() else "mosaic_gpu"
        reason = None if on_tpu() or on_hopper() else "it needs a Hopper GPU or a TPU"
    else:
        reason = None
    kernel = mosaic_tpu if implementation == "mosaic_tpu" else mosaic_gpu
    reason = kernel.why_not(q, cache, value_width) or reason
    if reason is not None:
        raise NotHereError(f"no sparse MLA kernel here: {reason}")
    if implementation == "mosaic_tpu":
        return mosaic_tpu.sparse_mla(q, cache, indices, scale, value_width)
    return mosaic_gpu.sparse_mla(q, cache, indices, scale)


def rows_of(positions: jax.Array, table: jax.Array, page_size: int) -> jax.Array:
    """Rows of the flattened cache at positions [B, ...] of sequences with pages `table` [B, W]; -1 stays."""
    flat = positions.reshape(positions.shape[0], -1)
    at = jnp.maximum(flat, 0)
    page = jnp.take_along_axis(table, at // page_size, axis=1)
    return jnp.where(flat >= 0, page * page_size + at % page_size, -1).reshape(positions.shape)


def _check(q: jax.Array, cache: jax.Array, indices: jax.Array, value_width: int) -> None:
    width = packed.num_words(q.shape[-1]) if cache.dtype == jnp.int32 else q.shape[-1]
    if q.ndim != 3 or cache.ndim not in (2, 3) or cache.shape[-1] != width:
        raise ValueError(
            f"q must be [T, N, R], cache [P, page, R] or [rows, R], or words of such rows, got {q.shape}"
            f" and {cache.dtype}{cache.shape}"
        )
    if indices.ndim != 2 or indices.shape[0] != q.shape[0] or indices.shape[1] < 1:
        raise ValueError(f"indices must be [{q.shape[0]}, J] with J >= 1, got {indices.shape}")
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        raise ValueError(f"indices must be signed integers, got {indices.dtype}")
    if not 0 < value_width <= q.shape[-1]:
        raise ValueError(f"value_width must be 1 to {q.shape[-1]}, got {value_width}")
