"""Paged decode attention in plain JAX and fp32: what every implementation must compute."""

import jax
import jax.numpy as jnp


def paged_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array
) -> jax.Array:
    """See api.paged_attention. Gathers the whole table, so its cost follows the table's width."""
    b, w = table.shape
    num_pages, page, g, h = keys.shape
    last = jnp.clip(positions, 0, w * page - 1)  # B T
    own = jnp.arange(w) <= last.max(axis=1)[:, None] // page  # B W
    pages = jnp.where(own, jnp.clip(table, 0, num_pages - 1), 0)
    k, v = (
        cache[pages].reshape(b, w * page, g, h).astype(jnp.float32) for cache in (keys, values)
    )  # B S G H
    seen = jnp.arange(w * page) <= last[:, :, None]  # B T S
    # Keys that nobody sees may be anything, NaN included.
    read = seen.any(axis=1)[:, :, None, None]
    k, v = jnp.where(read, k, 0.0), jnp.where(read, v, 0.0)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btgqh,bsgh->btgqs", q.astype(jnp.float32), k, precision=exact) * h**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, :, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("btgqs,bsgh->btgqh", weights, v, precision=exact).astype(q.dtype)
