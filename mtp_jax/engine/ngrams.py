"""The table of hashed n-grams, its rows spread over the head's devices as the embedding's are."""

import dataclasses

import jax
import jax.numpy as jnp

from mtp_jax.config import NgramConfig
from mtp_jax.models.ngram import ngram_rows
from mtp_jax.models.scaled import Weight, take
from sharding.placement import HEAD_AXES


@dataclasses.dataclass(frozen=True)
class NgramTable:
    """One device's share, inside shard_map."""

    table: Weight  # parts / devices, rows a part, width of a head
    dtype: jnp.dtype  # of embeddings
    config: NgramConfig
    whole: bool  # every device has all of it

    def embed(self, tokens: jax.Array, context: jax.Array) -> jax.Array:
        """N-gram embeddings [B, T, X] of tokens [B, T] behind those of `context` [B, order - 1].

        Tokens below 0 (absent) embed as zeros.
        """
        b, t = tokens.shape
        text = jnp.concatenate([context, tokens], axis=1)
        windows = jnp.stack([text[:, first : first + t] for first in range(self.config.order)], axis=2)
        rows = ngram_rows(windows.reshape(b * t, -1), self.config)
        count = self.table.shape[0] * self.table.shape[1]
        local = rows if self.whole else rows - jax.lax.axis_index(HEAD_AXES) * count
        mine = (local >= 0) & (local < count) & (tokens.reshape(-1, 1) >= 0)
        found = take(self.table, jnp.clip(local, 0, count - 1), self.dtype)  # B * T, heads, width
        found = jnp.where(mine[:, :, None], found, jnp.zeros((), found.dtype))
        found = found if self.whole else jax.lax.psum(found, HEAD_AXES)
        return found.reshape(b, t, -1)

    def empty_context(self) -> jax.Array:
        """The context of a text's first token, [order - 1]."""
        return jnp.full((self.config.context,), self.config.eos, jnp.int32)


def advance_context(context: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """The context [B, order - 1] behind `context` and the first count [B] of tokens [B, T]."""
    text = jnp.concatenate([context, tokens], axis=1)
    places = count[:, None] + jnp.arange(context.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(text, places, axis=1)
