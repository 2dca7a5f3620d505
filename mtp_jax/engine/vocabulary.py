"""Embedding and LM head, their vocabulary rows spread over the head's devices."""

import dataclasses

import jax
import jax.numpy as jnp

from mtp_jax.engine.sampling import RowSampling, add_noise
from mtp_jax.models.layers import linear
from sharding.placement import HEAD_AXES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftHead:
    """The rows of the LM head that drafts choose from, where that is not all of them."""

    rows: jax.Array  # Vd D, spread over the head's devices
    ids: jax.Array  # Vd int32: vocabulary id of each, ascending; of rows that only pad, past the vocabulary


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """One device's share, inside shard_map. `devices` of them; V counts padded rows, `size` real ones.

    Collectives go over `HEAD_AXES`, and their results are alike on all of them.
    """

    embedding: jax.Array  # V / devices, D
    lm_head: jax.Array  # V / devices, D; the embedding itself where the model ties them
    size: int
    devices: int
    head_ids: jax.Array | None = None  # ids of this device's LM-head rows; None: those of the embedding's

    def reduced_to(self, head: DraftHead) -> "Vocabulary":
        """The same embedding with fewer rows in the LM head."""
        return dataclasses.replace(self, lm_head=head.rows, head_ids=head.ids)

    @property
    def ids(self) -> jax.Array:
        """Vocabulary ids of this device's LM-head rows."""
        if self.head_ids is not None:
            return self.head_ids
        return self._first_row + jnp.arange(self.embedding.shape[0], dtype=jnp.int32)

    @property
    def _first_row(self) -> jax.Array:
        return jax.lax.axis_index(HEAD_AXES) * self.embedding.shape[0]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [M, D] of tokens [M]; those below 0 (absent) embed as zeros."""
        local = tokens - self._first_row
        rows = self.embedding.shape[0]
        mine = (local >= 0) & (local < rows) & (tokens >= 0)
        found = self.embedding[jnp.clip(local, 0, rows - 1)]
        return jax.lax.psum(jnp.where(mine[:, None], found, jnp.zeros((), found.dtype)), HEAD_AXES)

    def local_index(self, tokens: jax.Array) -> jax.Array:
        """Where tokens are among this device's rows; past the end for those that are elsewhere, or absent."""
        rows = self.embedding.shape[0]
        local = tokens - self._first_row
        return jnp.where((tokens >= 0) & (local >= 0) & (local < rows), local, rows)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """This device's logits [M, V / devices], fp32, of post-norm hidden [M, D]; padding ids are -inf."""
        logits = linear(hidden, self.lm_head, jnp.dtype(jnp.float32))
        if self.head_ids is None and self.devices * self.embedding.shape[0] == self.size:
            return logits
        return jnp.where(self.ids < self.size, logits, -jnp.inf)

    def argmax(self, scores: jax.Array) -> jax.Array:
        """Best id [M] int32 of spread scores [M, V / devices]; the lowest of equals."""
        best = jnp.max(scores, axis=-1)
        local = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        at = self._first_row + local if self.head_ids is None else self.head_ids[local]
        # One collective for both: ids travel as the bits of floats.
        pair = jnp.stack([best, jax.lax.bitcast_convert_type(at, jnp.float32)])
        bests, ats = jnp.moveaxis(jax.lax.all_gather(pair, HEAD_AXES, to="invarying"), 1, 0)
        winner = jnp.argmax(bests, axis=0)
        winning = jnp.take_along_axis(ats, winner[None], axis=0)[0]
        return jax.lax.bitcast_convert_type(winning, jnp.int32)

    def add_noise(self, scaled: jax.Array, rows: RowSampling, stream: int) -> jax.Array:
        """Gumbel noise for this device's ids, where the temperature is above 0. [..., V / devices]."""
        return add_noise(scaled, rows, self.ids, stream)

    def over_all_ids(self, x: jax.Array) -> jax.Array:
        """Whole rows [B, ..., Vd] over a reduced head's ids -> [B, ..., V], -inf elsewhere."""
        if self.head_ids is None:
            return x
        every = jax.lax.all_gather(self.head_ids, HEAD_AXES, tiled=True, to="invarying")
        whole = jnp.full((*x.shape[:-1], self.devices * self.embedding.shape[0]), -jnp.inf, x.dtype)
        return whole.at[..., every].set(x, mode="drop")

    def padded(self, rows: int) -> int:
        """`rows` rounded up to a multiple of the devices, for `to_whole_rows`."""
        return -(-rows // self.devices) * self.devices

    def to_whole_rows(self, x: jax.Array) -> jax.Array:
        """x [B, ..., V / devices] -> whole rows of this device's slots [B' / devices, ..., V]: all-to-all."""
        x = jnp.pad(x, ((0, self.padded(x.shape[0]) - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
        return jax.lax.all_to_all(x, HEAD_AXES, split_axis=0, concat_axis=x.ndim - 1, tiled=True)

    def my_rows(self, x: jax.Array) -> jax.Array:
        """The same rows of an array [B, ...] that every device holds."""
        padded = self.padded(x.shape[0])
        x = jnp.pad(x, ((0, padded - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
        mine = padded // self.devices
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(HEAD_AXES) * mine, mine)

    def gather_rows(self, x: jax.Array, rows: int) -> jax.Array:
        """Back from this device's rows to all of them, [rows, ...], alike everywhere."""
        return jax.lax.all_gather(x, HEAD_AXES, axis=0, tiled=True, to="invarying")[:rows]
