"""An indexer's scores for Hopper (sm_90a) in Pallas Mosaic GPU.

As many blocks as fit the chip stay for the whole call. The live keys of all rows, in tiles of 128, are one
list that is cut into equal shares, so that all blocks end together whatever the rows' lengths. In a block one
warpgroup feeds a ring of shared memory by TMA, page by page, across the borders between rows; the others take
turns with the tiles. Keys are the 128 rows of the wgmmas and one token's heads their columns: scores are
[keys, heads], and what is left is a weighted sum over columns, which one warpgroup does while another one's
wgmmas run. Tokens of a row share its tiles. What lies behind a row's last key is filled with -inf.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu import NUM_SMS, SMEM_BYTES, _vary_like

TILE_KEYS = 128
FILL_TILES = 8  # that one copy of -inf covers
WIDTH = 128
HEADS = (32, 64)
PAGE_SIZES = (8, 16, 32, 64, 128)
DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn)
MAX_COLUMNS = 256  # tokens * heads that share a tile

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another
_WGMMA = plgpu.Layout.WGMMA
_PER_HEAD = plgpu.Layout.WGMMA.reduce(0)
_PER_KEY = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut; None: chosen from the shapes.

    Of the `blocks` each has `consumers` warpgroups that compute, and `stages` tiles of keys in flight, a
    multiple of `consumers`.
    """

    consumers: int = 2
    blocks: int = NUM_SMS
    stages: int | None = None
    absolute: bool = True  # relu as (s + |s|) / 2


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory and barriers of one block."""

    queries: Ref
    weights: Ref
    keys: Ref
    out: Ref
    nothing: Ref
    queries_full: Ref
    queries_free: Ref
    keys_full: Ref
    keys_free: Ref
    scales: Ref = None


@dataclasses.dataclass(frozen=True)
class _Share:
    """A block's part of a list of tiles: `first` to `end`, of rows `row` to `end_row`.

    Those of row r begin at starts[r].
    """

    first: jax.Array
    end: jax.Array
    row: jax.Array
    end_row: jax.Array
    starts: Ref

    def of(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(first, end) of the share's tiles in a row, counted in the list."""
        return jnp.maximum(self.first, self.starts[row]), jnp.minimum(self.end, self.starts[row + 1])


def why_not(q: jax.Array, keys: jax.Array) -> str | None:
    """Why these shapes and dtypes cannot run here, or None."""
    if keys.dtype not in DTYPES:
        return f"it takes bfloat16 or float8_e4m3fn keys, got {keys.dtype}"
    if q.shape[1] not in HEADS or q.shape[2] != WIDTH:
        return f"it takes {HEADS} heads of {WIDTH}, got {q.shape[1]} of {q.shape[2]}"
    if keys.shape[1] not in PAGE_SIZES:
        return f"it takes pages of {PAGE_SIZES} positions, got {keys.shape[1]}"
    return None


def indexer_logits(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    scales: jax.Array | None = None,
    *,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See api.indexer_logits; shapes must have passed `why_not`."""
    tuning = tuning or Tuning()
    (b, w), t = table.shape, positions.shape[1]
    _, heads, width = q.shape
    length = w * keys.shape[1]
    tokens = max(n for n in range(1, MAX_COLUMNS // heads + 1) if t % n == 0)
    rows, tiles = b * t // tokens, -(-length // TILE_KEYS)
    limits = jnp.clip(positions.astype(jnp.int32), -1, length - 1).reshape(rows, tokens)
    live = (limits.max(axis=1) + TILE_KEYS) // TILE_KEYS
    operands = (
        q.reshape(rows, tokens * heads, width),
        (weights * 0.5 if tuning.absolute else weights).reshape(rows, tokens * heads),
        keys,
        table.astype(jnp.int32),
        limits,
        *_cut(live, tuning.blocks),
        *_cut(tiles - live, tuning.blocks),
    )
    operands += () if scales is None else (scales,)
    out_type = jax.ShapeDtypeStruct((rows, tokens, tiles * TILE_KEYS), jnp.float32)
    kernel = _kernel(out_type, operands[0], keys, scales is not None, tuning)
    (out,) = _vary_like(operands, [kernel(*operands)])
    out = out.reshape(b * t, tiles * TILE_KEYS)
    return out if tiles * TILE_KEYS == length else out[:, :length]


def _cut(tiles: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """Tiles of each row -> (where each row begins in the list of all [rows + 1], shares [blocks, 4])."""
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles, dtype=jnp.int32)])
    edges = jnp.arange(blocks + 1, dtype=jnp.int32)
    # Not edges * total // blocks: that overflows where total is some millions.
    each, more = starts[-1] // blocks, starts[-1] % blocks
    edges = edges * each + jnp.minimum(edges, more)
    first, end = edges[:-1], edges[1:]
    row = (starts[1:] <= first[:, None]).sum(axis=1, dtype=jnp.int32)
    end_row = (starts[:-1] < end[:, None]).sum(axis=1, dtype=jnp.int32)
    return starts, jnp.stack([first, end, row, jnp.where(end > first, end_row, row)], axis=1)


def _kernel(
    out_type: jax.ShapeDtypeStruct, q: jax.Array, keys: jax.Array, scaled: bool, tuning: Tuning
) -> Callable:
    """The kernel for these static sizes."""
    (_, tokens, _), (_, columns, width) = out_type.shape, q.shape
    item, pages = jnp.dtype(keys.dtype).itemsize, max(1, TILE_KEYS // keys.shape[1])
    tiles = (plgpu.TilingTransform((8, 128 // item)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    space = SMEM_BYTES - 12 * 1024 - 2 * tuning.consumers * tokens * TILE_KEYS * 4
    query_bytes, stage_bytes = columns * width * item, TILE_KEYS * (width * item + 4)
    rings = 2 if 2 * query_bytes < space // 3 else 1
    stages = tuning.stages or min(12, (space - rings * query_bytes) // stage_bytes)
    stages -= stages % tuning.consumers
    scratch = {
        "queries": plgpu.SMEM((rings, columns, width), keys.dtype, transforms=tiles),
        "weights": plgpu.SMEM((rings, columns), jnp.float32),
        "keys": plgpu.SMEM((stages, TILE_KEYS, width), keys.dtype, transforms=tiles),
        "out": plgpu.SMEM((tuning.consumers, 2, tokens, TILE_KEYS), jnp.float32),
        "nothing": plgpu.SMEM((FILL_TILES * TILE_KEYS,), jnp.float32),
        "queries_full": plgpu.Barrier(num_arrivals=2, num_barriers=rings),
        "queries_free": plgpu.Barrier(num_arrivals=tuning.consumers, num_barriers=rings),
        "keys_full": plgpu.Barrier(num_arrivals=pages * (2 if scaled else 1), num_barriers=stages),
        "keys_free": plgpu.Barrier(num_barriers=stages),
    }
    if scaled:
        scratch["scales"] = plgpu.SMEM((stages, TILE_KEYS), jnp.float32)
    return plgpu.kernel(
        functools.partial(_score, tuning),
        out_type=out_type,
        scratch_types=scratch,
        grid=(tuning.blocks,),
        grid_names=("block",),
        num_threads=tuning.consumers + 1,
        thread_name="warpgroup",
        kernel_name="indexer_logits",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def _score(tuning: Tuning, q_g, weights_g, keys_g, table_g, limits_g, *rest: Ref, **scratch: Ref) -> None:
    """One block. The names with _g are in device memory."""
    starts_g, shares_g, dead_starts_g, dead_shares_g, *scales_g, out_g = rest
    shared, block = _Shared(**scratch), lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    share = _share(shares_g, block, starts_g)

    @pl.when(warpgroup == tuning.consumers)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _feed(shared, share, q_g, weights_g, (keys_g, *scales_g), table_g)
        dead = _share(dead_shares_g, block, dead_starts_g)
        _fill(shared, dead, starts_g, out_g)
        _drain(shared, share)

    @pl.when(warpgroup < tuning.consumers)
    def _() -> None:
        plgpu.set_max_registers(232 if tuning.consumers < 3 else 152, action="increase")
        _consume(tuning, shared, share, warpgroup, limits_g, out_g)


def _share(shares_g: Ref, block: jax.Array, starts_g: Ref) -> _Share:
    first, end, row, end_row = (shares_g[block, i] for i in range(4))
    return _Share(first, end, row, end_row, starts_g)


def _feed(shared: _Shared, share: _Share, q_g, weights_g, caches_g: tuple[Ref, ...], table_g) -> None:
    """Sends for queries, weights and tiles of keys, in the order of the share."""
    rings, stages = shared.queries.shape[0], shared.keys.shape[0]
    rows_a_sequence = q_g.shape[0] // table_g.shape[0]
    num_pages, page = caches_g[0].shape[:2]
    pages = TILE_KEYS // page

    def row(r: jax.Array) -> None:
        ring = lax.rem(r - share.row, jnp.int32(rings))
        pl.when(r - share.row >= rings)(lambda: plgpu.barrier_wait(shared.queries_free.at[ring]))
        plgpu.copy_gmem_to_smem(q_g.at[r], shared.queries.at[ring], shared.queries_full.at[ring])
        plgpu.copy_gmem_to_smem(weights_g.at[r], shared.weights.at[ring], shared.queries_full.at[ring])
        first, end = share.of(r)
        begin, sequence = share.starts[r], lax.div(r, jnp.int32(rows_a_sequence))
        # The tile that holds the row's last key may have pages behind it: they repeat an earlier one.
        last_column = jnp.clip((share.starts[r + 1] - begin) * pages, 1, table_g.shape[1]) - 1

        def pages_of(tile: jax.Array) -> tuple[jax.Array, ...]:
            column = (tile - begin) * pages
            return tuple(
                jnp.clip(table_g[sequence, jnp.minimum(column + i, last_column)], 0, num_pages - 1)
                for i in range(pages)
            )

        def step(i: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            tile = first + i
            ahead = pages_of(tile + 1)  # a trip to memory, made while this tile's place gets free
            stage = lax.rem(tile - share.first, jnp.int32(stages))
            pl.when(tile - share.first >= stages)(lambda: plgpu.barrier_wait(shared.keys_free.at[stage]))
            for cache_g, kept in zip(caches_g, (shared.keys, shared.scales), strict=False):
                for i, one in enumerate(own):
                    place = kept.at[stage, pl.ds(i * page, page)]
                    plgpu.copy_gmem_to_smem(cache_g.at[one], place, shared.keys_full.at[stage])
            return ahead

        lax.fori_loop(0, end - first, step, pages_of(first))

    _each(share.row, share.end_row, row)


def _drain(shared: _Shared, share: _Share) -> None:
    """Waits until all is computed."""
    for free, begin, end in (
        (shared.keys_free, share.first, share.end),
        (shared.queries_free, share.row, share.end_row),
    ):
        count = free.shape[0]
        most = end - begin
        _each(
            jnp.maximum(most - count, 0),
            most,
            lambda i, free=free, count=count: plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(count))]),
        )


def _each(begin: jax.Array | int, end: jax.Array, body: Callable[[jax.Array], None]) -> None:
    """body(i) for begin <= i < end, counted from 0: a start that varies over a mesh axis does not trace."""
    lax.fori_loop(0, end - begin, lambda i, _: body(begin + i), None)


def _fill(shared: _Shared, share: _Share, live_starts_g, out_g) -> None:
    """Writes -inf to the share's dead tiles."""
    size = shared.nothing.shape[0]

    def row(r: jax.Array) -> None:
        first, end = share.of(r)
        shift = live_starts_g[r + 1] - live_starts_g[r] - share.starts[r]
        wide = lax.div(end - first, jnp.int32(FILL_TILES))

        def write(at: jax.Array, width: int) -> None:
            for token in range(out_g.shape[1]):
                target = out_g.at[r, token, pl.ds((at + shift) * TILE_KEYS, width)]
                plgpu.copy_smem_to_gmem(shared.nothing.at[pl.ds(0, width)], target)

        _each(0, wide, lambda i: write(first + i * FILL_TILES, size))
        _each(first + wide * FILL_TILES, end, lambda i: write(i, TILE_KEYS))

    @pl.when(share.end > share.first)
    def _() -> None:
        shared.nothing[...] = jnp.full((size,), -jnp.inf, jnp.float32)
        plgpu.commit_smem()
        _each(share.row, share.end_row, row)
        plgpu.wait_smem_to_gmem(0)


def _consume(tuning: Tuning, shared: _Shared, share: _Share, warpgroup: jax.Array, limits_g, out_g) -> None:
    """Every `consumers`-th tile of the share."""
    rings, stages = shared.queries.shape[0], shared.keys.shape[0]
    tokens, consumers = out_g.shape[1], tuning.consumers
    heads = shared.queries.shape[1] // tokens
    key = plgpu.broadcasted_iota(jnp.int32, (TILE_KEYS,), 0, layout=_PER_KEY)

    def row(r: jax.Array) -> None:
        ring = lax.rem(r - share.row, jnp.int32(rings))
        first, end = share.of(r)
        own = first - share.first
        own += lax.rem(warpgroup - lax.rem(own, jnp.int32(consumers)) + consumers, jnp.int32(consumers))
        count = lax.div(jnp.maximum(end - share.first - own + consumers - 1, 0), jnp.int32(consumers))
        shift = share.first - share.starts[r]
        limits = [limits_g[r, token] for token in range(tokens)]
        plgpu.barrier_wait(shared.queries_full.at[ring])

        def step(i: jax.Array, _: None) -> None:
            n = own + i * consumers
            stage, at = lax.rem(n, jnp.int32(stages)), (n + shift) * TILE_KEYS
            plgpu.barrier_wait(shared.keys_full.at[stage])
            scale = 1.0
            if shared.scales is not None:
                scale = plgpu.load(shared.scales.at[stage], layout=_PER_KEY, optimized=False)
            place = shared.out.at[warpgroup, lax.rem(i, jnp.int32(2))]
            for token in range(tokens):
                columns = pl.ds(token * heads, heads)
                scores = _matmul(shared.keys.at[stage], shared.queries.at[ring, columns])
                if token == tokens - 1:
                    plgpu.barrier_arrive(shared.keys_free.at[stage])
                weight = plgpu.load(shared.weights.at[ring, columns], layout=_PER_HEAD, optimized=False)
                positive = scores + jnp.abs(scores) if tuning.absolute else jnp.maximum(scores, 0.0)
                total = (positive * lax.broadcast_in_dim(weight, scores.shape, [1])).sum(axis=1) * scale
                place.at[token][...] = jnp.where(key + at <= limits[token], total, -jnp.inf)
            plgpu.commit_smem()
            for token in range(tokens):
                plgpu.copy_smem_to_gmem(place.at[token], out_g.at[r, token, pl.ds(at, TILE_KEYS)])
            plgpu.wait_smem_to_gmem(tokens, wait_read_only=True)

        lax.fori_loop(0, count, step, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.queries_free.at[ring])

    _each(share.row, share.end_row, row)
    plgpu.wait_smem_to_gmem(0)


def _matmul(keys: Ref, queries: Ref) -> jax.Array:
    """[keys, heads]."""

    def run(acc):
        plgpu.wgmma(acc, keys, queries.T)
        return acc[...]

    shape = (keys.shape[0], queries.shape[0])
    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
