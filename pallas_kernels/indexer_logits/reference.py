"""An indexer's scores in plain JAX and fp32: what every implementation must compute."""

import jax
import jax.numpy as jnp


def indexer_logits(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    scales: jax.Array | None = None,
) -> jax.Array:
    """See api.indexer_logits. Gathers the whole table, so its cost follows the table's width."""
    (b, w), page = table.shape, keys.shape[1]
    t = positions.shape[1]
    own = jnp.arange(w) <= positions.max(axis=1)[:, None] // page  # B W
    pages = jnp.where(own, jnp.clip(table, 0, keys.shape[0] - 1), 0)
    k = keys[pages].astype(jnp.float32).reshape(b, w * page, -1)  # B S H
    exact = jax.lax.Precision.HIGHEST
    heads = q.astype(jnp.float32).reshape(b, t, *q.shape[1:])
    scores = jax.nn.relu(jnp.einsum("btih,bsh->btis", heads, k, precision=exact))
    scores = jnp.einsum("btis,bti->bts", scores, weights.reshape(b, t, -1), precision=exact)
    if scales is not None:
        scores *= scales[pages].reshape(b, 1, w * page)
    seen = jnp.arange(w * page) <= positions[:, :, None]  # B T S
    return jnp.where(seen, scores, -jnp.inf).reshape(b * t, w * page)
