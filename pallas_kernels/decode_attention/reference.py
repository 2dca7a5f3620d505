"""Decode attention that writes its own tokens in plain JAX: what every implementation must compute."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import reference


def decode_attention(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    limit: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.decode_attention."""
    num_pages, page = keys.shape[:2]
    width = table.shape[1] * page
    column = jnp.clip(positions // page, 0, table.shape[1] - 1)
    own = jnp.take_along_axis(table, column, axis=1)
    written = (positions >= 0) & (positions < jnp.minimum(limit, width)[:, None])
    own = jnp.where(written, own, num_pages).reshape(-1)  # past the end: dropped
    offset = (positions % page).reshape(-1)
    new = jnp.nan_to_num(qkv[:, :, -2:])
    keys = keys.at[own, offset].set(new[:, :, 0], mode="drop")
    values = values.at[own, offset].set(new[:, :, 1], mode="drop")
    q = qkv[:, :, :-2]
    rows = q.reshape(*positions.shape, *q.shape[1:])
    mixed = reference.paged_attention(rows, keys, values, table, positions)
    return mixed.reshape(q.shape), keys, values
