"""Attention over chosen latent rows in plain JAX and fp32: what every implementation must compute."""

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_mla import packed


def sparse_mla(
    q: jax.Array, cache: jax.Array, indices: jax.Array, scale: float, value_width: int
) -> tuple[jax.Array, jax.Array]:
    """See api.sparse_mla. Gathers all rows at once, so its memory is that of T * J rows in fp32."""
    there = indices >= 0  # T J
    if cache.dtype == jnp.int32:
        cache = packed.unpack_rows(cache, q.shape[-1], value_width)
    rows = cache.reshape(-1, cache.shape[-1])[jnp.maximum(indices, 0)].astype(jnp.float32)
    rows = jnp.where(
        there[..., None], rows, 0.0
    )  # the row that stands for none may be anything, NaN included
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tnr,tjr->tnj", q.astype(jnp.float32), rows, precision=exact) * scale
    scores = jnp.where(there[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("tnj,tjv->tnv", weights, rows[..., :value_width], precision=exact)
    return out.astype(q.dtype), lse
