"""Paged KV: writing rows through block tables, and attending over them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from mtp_jax.config import BlocksConfig
from mtp_jax.engine import chosen, latent, recurrent
from mtp_jax.models.delta import DeltaInputs, DeltaWeights
from mtp_jax.models.delta_net import DeltaHeads
from mtp_jax.models.layers import Cache, split_qkv
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.device import NotHereError
from pallas_kernels.paged_attention import paged_attention

MASKED = -1e30  # score of a position that is not seen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """Queries that share a shape: all decode rows of a tick, or its prefill chunk.

    `table` [B, W] pages of each row, `positions` [B, T] of its tokens, `limit` [B]: positions at or
    past it are not written (rows that are dead have 0), so nothing ever lands past a slot's pages.
    For recurrent layers: `slot` [B] of each row, and `stood` [B], how many rows of its round before are
    to be replayed; None for a prompt chunk.
    """

    table: jax.Array
    positions: jax.Array
    limit: jax.Array
    slot: jax.Array | None = None
    stood: jax.Array | None = None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0] * self.positions.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """The `Attend` of the engine: decode rows alone take one kernel where there is one.

    Else there is one scatter for all rows' keys and values, then one attention a segment.
    """

    segments: tuple[Segment, ...]
    page_size: int = dataclasses.field(metadata={"static": True})

    @property
    def positions(self) -> jax.Array:
        """Positions of all token rows, [M]."""
        return jnp.concatenate([segment.positions.reshape(-1) for segment in self.segments])

    def write_index(self, total_pages: int) -> tuple[jax.Array, jax.Array]:
        """(page, offset) [M] of every token row. Rows not to be written go to the sink, each to a place."""
        pages, offsets = [], []
        for segment in self.segments:
            width = segment.table.shape[1]
            column = jnp.clip(segment.positions // self.page_size, 0, width - 1)
            page = jnp.take_along_axis(segment.table, column, axis=1)
            write = (segment.positions < segment.limit[:, None]) & (
                segment.positions < width * self.page_size
            )
            pages.append(jnp.where(write, page, -1).reshape(-1))
            offsets.append((segment.positions % self.page_size).reshape(-1))
        page, offset = jnp.concatenate(pages), jnp.concatenate(offsets)
        place = jnp.arange(page.size, dtype=jnp.int32)
        sink = total_pages - 1 - place // self.page_size
        return jnp.where(page < 0, sink, page), jnp.where(page < 0, place % self.page_size, offset)

    def grouped(self, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        if len(self.segments) == 1:
            with contextlib.suppress(NotHereError):
                rows = self.segments[0]
                keys, values = cache
                mixed, *new = decode_attention(qkv, keys, values, rows.table, rows.positions, rows.limit)
                return mixed, tuple(new)
        q, k, v = split_qkv(qkv)
        keys, values = self._written(cache, (k, v))
        mixed = [_attend_segment(rows, keys, values, segment) for segment, rows in self._split(q)]
        return jnp.concatenate(mixed), (keys, values)

    def grouped_chosen(
        self, qkv: jax.Array, cache: Cache, indices: jax.Array, reused: bool
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        if not reused and not any(self._chooses(segment, indices) for segment in self.segments):
            return self.grouped(qkv, cache)
        q, k, v = split_qkv(qkv)
        keys, values = self._written(cache, (k, v))
        mixed = []
        for segment, rows, places in self._split(q, indices):
            if reused or self._chooses(segment, indices):
                mixed.append(chosen.attend_chosen(rows, (keys, values), segment.table, places))
            else:
                mixed.append(_attend_segment(rows, keys, values, segment))
        return jnp.concatenate(mixed), (keys, values)

    def _chooses(self, segment: Segment, indices: jax.Array) -> bool:
        """Where no context is longer than what a token chooses, it has chosen all of it."""
        return segment.table.shape[1] * self.page_size > indices.shape[1]

    def latent(
        self,
        q: jax.Array,
        row: jax.Array,
        cache: jax.Array,
        scale: float,
        width: int,
        indices: jax.Array | None,
        reused: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        (cache,) = self._written((cache,), (row,))
        mixed = []
        for segment, rows, *places in self._split(q, *(() if indices is None else (indices,))):
            table, positions = segment.table, segment.positions
            if places and (reused or self._chooses(segment, places[0])):
                mixed.append(latent.attend_chosen(rows, cache, table, places[0], scale, width))
            else:
                mixed.append(latent.attend_all(rows, cache, table, positions, scale, width))
        return jnp.concatenate(mixed), cache

    def select(
        self, q: jax.Array, weights: jax.Array, key: jax.Array, cache: jax.Array, topk: int
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        (cache,) = self._written((cache,), (key,))
        places = [
            latent.select(rows, heads, cache, segment.table, segment.positions, topk)
            for segment, rows, heads in self._split(q, weights)
        ]
        return jnp.concatenate(places), cache

    def select_blocks(
        self,
        q: jax.Array,
        key: jax.Array,
        cache: jax.Array,
        blocks: BlocksConfig,
        block_keys: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        (cache,) = self._written((cache,), (key,))
        places = [
            chosen.select_blocks(rows, cache, segment.table, segment.positions, blocks, block_keys)
            for segment, rows in self._split(q)
        ]
        return jnp.concatenate(places), cache

    def convolve(
        self, x: jax.Array, weight: jax.Array, dilation: int, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        outputs = []
        for segment, rows in self._split(x):
            rows, slot = rows.reshape(*segment.positions.shape, -1), self._slots(segment, cache)
            if segment.stood is not None:
                out, cache = recurrent.convolve_rows(rows, weight, dilation, cache, slot, segment.stood)
            else:
                place = self._chunk_place(segment)
                out, cache = recurrent.convolve_chunk(rows, weight, dilation, cache, slot, *place)
            outputs.append(out.reshape(-1, out.shape[2]))
        return jnp.concatenate(outputs), cache

    def recurrent(
        self,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        heads: DeltaHeads,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        outputs = []
        for segment, *rows in self._split(inputs.channels, inputs.b, inputs.a):
            here = DeltaInputs(*(row.reshape(*segment.positions.shape, -1) for row in rows))
            slot = self._slots(segment, cache)
            if segment.stood is not None:
                out, cache = recurrent.run_rows(here, weights, heads, cache, slot, segment.stood)
            else:
                place = self._chunk_place(segment)
                out, cache = recurrent.run_chunk(here, weights, heads, cache, slot, *place)
            outputs.append(out.reshape(-1, *out.shape[2:]))
        return jnp.concatenate(outputs), cache

    @staticmethod
    def _slots(segment: Segment, cache: Cache) -> jax.Array:
        """Where each row's state is, [B]: its slot, or the sink."""
        assert segment.slot is not None
        return jnp.where(segment.limit > 0, segment.slot, cache[0].shape[0] - 1)

    @staticmethod
    def _chunk_place(segment: Segment) -> tuple[jax.Array, jax.Array]:
        """Tokens that a prompt chunk has, and whether it begins its prompt; [1] each."""
        first = segment.positions[:, 0]
        return jnp.clip(segment.limit - first, 0, segment.positions.shape[1]), first == 0

    def _written(self, cache: Cache, new: tuple[jax.Array, ...]) -> Cache:
        """The caches with a row for each token."""
        page, offset = self.write_index(cache[0].shape[0])
        written = tuple(
            _write_rows(old, _finite(rows.astype(old.dtype)), page, offset)
            for old, rows in zip(cache, new, strict=True)
        )
        # Without the barrier XLA fuses the write into the reads once more, and must then keep the old cache.
        return jax.lax.optimization_barrier(written)

    def _split(self, *arrays: jax.Array) -> Iterator[tuple[Segment, *tuple[jax.Array, ...]]]:
        """Each segment with its token rows of arrays [M, ...]."""
        first = 0
        for segment in self.segments:
            last = first + segment.num_tokens
            yield segment, *(array[first:last] for array in arrays)
            first = last


def _finite(rows: jax.Array) -> jax.Array:
    """Rows without inf and NaN: a masked position weighs 0, and 0 times inf would spoil a page's next use."""
    return jnp.nan_to_num(rows)


def sink_pages(most_rows: int, page_size: int) -> int:
    """Pages behind a pool where rows that must not be written go instead: `most_rows` distinct places.

    A write that is always made needs no select, and a select over a cache makes XLA copy the cache.
    """
    return -(-most_rows // page_size)


def _write_rows(cache: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
    """Rows [M, ...] at (page, offset) [M]."""
    if rows.shape[0] > 1:
        return cache.at[page, offset].set(rows, mode="promise_in_bounds", unique_indices=True)
    # XLA expands a scatter of one row into a select, and copies the cache for it; this is in place.
    zeros = (jnp.int32(0),) * (rows.ndim - 1)
    return jax.lax.dynamic_update_slice(cache, rows[None], (page[0], offset[0], *zeros))


def _attend_segment(q: jax.Array, keys: jax.Array, values: jax.Array, segment: Segment) -> jax.Array:
    """q [B * T, G, Q, H] over the pages of each row: by the kernel where there is one, else by XLA."""
    rows = q.reshape(*segment.positions.shape, *q.shape[1:])
    try:
        return paged_attention(rows, keys, values, segment.table, segment.positions).reshape(q.shape)
    except NotHereError:
        return _attend(q, keys, values, segment)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, segment: Segment) -> jax.Array:
    """q [B * T, G, Q, H] over the pages of each row, causal by position, softmax in fp32."""
    b, w = segment.table.shape
    t = segment.positions.shape[1]
    _, page_size, g, h = keys.shape
    q = q.reshape(b, t, *q.shape[1:])
    k, v = (cache[segment.table].reshape(b, w * page_size, g, h) for cache in (keys, values))  # B S G H
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum("btgqh,bsgh->bgqts", q, k, precision=precision, preferred_element_type=jnp.float32)
    seen = jnp.arange(w * page_size) <= segment.positions[:, :, None]  # B T S
    scores = jnp.where(seen[:, None, None], scores * h**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bgqts,bsgh->btgqh", weights, v, precision=precision)
    return out.reshape(b * t, *out.shape[2:])
