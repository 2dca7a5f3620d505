"""An indexer's scores for Hopper (sm_90a) in Pallas Mosaic GPU.

One block a multiprocessor stays for the whole call. The live keys of all rows, in tiles, are one list that
is cut into equal shares, so that all blocks end together whatever the rows' lengths. In a block one warpgroup
feeds a ring of shared memory by TMA, page by page, across the borders between rows; the others take turns
with the tiles. Keys are the rows of the wgmmas and a token's heads their columns: scores are [keys, heads],
and what is left is a weighted sum over columns, which one warpgroup does while another one's wgmmas run.
Tokens of a row share its tiles. What lies behind a row's last key is filled with -inf.
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

from pallas_kernels.hopper import NUM_SMS, SMEM_BYTES, vary_like

TILE = 128  # keys of one
FILL = 1024  # positions that one copy of -inf covers
WIDTH = 128
HEADS = (32, 64)
PAGE_SIZES = (8, 16, 32, 64, 128)
SCALE_PAGES = 32  # TMA writes to multiples of 128 bytes
DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn)
MAX_COLUMNS = 256  # tokens * heads that share a tile
POSITIONS_AHEAD = 8  # read at once

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another
_PER_HEAD = plgpu.Layout.WGMMA.reduce(0)
_PER_KEY = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut; None: chosen from the shapes.

    Of the `blocks` each has `consumers` warpgroups that compute, and `stages` tiles in flight, a multiple of
    `consumers`.
    """

    stages: int | None = None
    consumers: int | None = None
    blocks: int = NUM_SMS


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
    """A block's part of the list of tiles, `first` to `end`, from `num_rows` rows.

    It begins in row `row`, whose own tiles begin at `start`.
    """

    first: jax.Array
    end: jax.Array
    row: jax.Array
    start: jax.Array
    num_rows: jax.Array

    def each_row(self, count: Callable[[jax.Array], jax.Array], visit: Callable[..., None]) -> None:
        """visit(i, row, first tile of the row, how many before the share's, how many in it) for its rows.

        `count` gives a row's tiles.
        """

        def step(i: jax.Array, start: jax.Array) -> jax.Array:
            row = self.row + i
            end = start + count(row)
            first = jnp.maximum(self.first, start)
            visit(i, row, first - start, first - self.first, jnp.minimum(self.end, end) - first)
            return end

        lax.fori_loop(0, self.num_rows, step, self.start)


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
    (b, w), t = table.shape, positions.shape[1]
    (_, heads, width), page = q.shape, keys.shape[1]
    length = w * page
    tokens = max(n for n in range(1, MAX_COLUMNS // heads + 1) if t % n == 0)
    rows, padded = b * t // tokens, -(-length // TILE) * TILE
    operands = (
        q.reshape(rows, tokens * heads, width),
        weights.reshape(rows, tokens * heads),
        keys,
        table.astype(jnp.int32),
        jnp.minimum(positions.astype(jnp.int32), length - 1).reshape(rows, tokens),
    )
    if scales is not None:
        if page < SCALE_PAGES:  # laid out by row
            scales = scales[jnp.clip(table, 0, len(keys) - 1)].reshape(b, length)
            scales = jnp.pad(scales, ((0, 0), (0, padded - length)))
        operands += (scales,)
    out_type = jax.ShapeDtypeStruct((rows, tokens, padded), jnp.float32)
    (out,) = vary_like(operands, _kernel(out_type, tuning or Tuning(), *operands)(*operands))
    out = out.reshape(b * t, padded)
    return out if padded == length else out[:, :length]


def _kernel(
    out_type: jax.ShapeDtypeStruct, tuning: Tuning, q: jax.Array, weights: jax.Array, keys: jax.Array, *rest
) -> Callable:
    """The kernel for these static sizes."""
    (_, tokens, _), (_, columns, width) = out_type.shape, q.shape
    page, item = keys.shape[1], jnp.dtype(keys.dtype).itemsize
    # Tiles of one token wait for memory, and more in flight are slower; of several, for what computes. With
    # small pages or bfloat16 three warpgroups would not have registers enough.
    consumers = tuning.consumers or (3 if tokens > 1 and page >= 32 and item == 1 else 2)
    tiles = (plgpu.TilingTransform((8, 128 // item)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    space = SMEM_BYTES - 4 * FILL - 8 * 1024 - 2 * consumers * tokens * TILE * 4
    query_bytes, stage_bytes = columns * width * item, TILE * (width * item + 4)
    rings = 2 if 2 * query_bytes < space // 3 else 1
    stages = tuning.stages or min(2 * consumers, (space - rings * query_bytes) // stage_bytes)
    stages -= stages % consumers
    scale_copies = 0 if len(rest) == 2 else TILE // page if page >= SCALE_PAGES else 1
    scratch = {
        "queries": plgpu.SMEM((rings, columns, width), keys.dtype, transforms=tiles),
        "weights": plgpu.SMEM((rings, columns), jnp.float32),
        "keys": plgpu.SMEM((stages, TILE, width), keys.dtype, transforms=tiles),
        "out": plgpu.SMEM((consumers, 2, tokens, TILE), jnp.float32),
        "nothing": plgpu.SMEM((FILL,), jnp.float32),
        "queries_full": plgpu.Barrier(num_arrivals=2, num_barriers=rings),
        "queries_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=rings),
        "keys_full": plgpu.Barrier(num_arrivals=TILE // page + scale_copies, num_barriers=stages),
        "keys_free": plgpu.Barrier(num_barriers=stages),
    }
    if scale_copies:
        scratch["scales"] = plgpu.SMEM((stages, TILE), jnp.float32)
    return plgpu.kernel(
        functools.partial(_score, consumers),
        out_type=out_type,
        scratch_types=scratch,
        grid=(tuning.blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name="indexer_logits",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def _score(consumers: int, q_g, weights_g, keys_g, table_g, positions_g, *rest: Ref, **scratch: Ref) -> None:
    """One block. The names with _g are in device memory."""
    *scales_g, out_g = rest
    shared, warpgroup = _Shared(**scratch), lax.axis_index("warpgroup")
    blocks, rows, most = lax.axis_size("block"), q_g.shape[0], out_g.shape[2] // TILE

    def live(row: jax.Array) -> jax.Array:
        """Tiles with keys that a token of the row sees."""
        longest = functools.reduce(jnp.maximum, (positions_g[row, i] for i in range(positions_g.shape[1])))
        return lax.div(jnp.maximum(longest, -1) + TILE, jnp.int32(TILE))

    def dead(row: jax.Array) -> jax.Array:
        return most - live(row)

    total = _scan(positions_g, live, jnp.int32(0), lambda total, _, tiles: total + tiles)
    share = _share(blocks, positions_g, total, live)
    feed = 48 if consumers > 2 else 56 if keys_g.shape[1] >= 32 else 88  # more for more pages of a tile
    threads = 128 * (consumers + 1)
    left = 65536 // threads // 8 * 8 * (consumers + 1) - feed

    @pl.when(warpgroup == consumers)
    def _() -> None:
        plgpu.set_max_registers(feed, action="decrease")
        _feed(shared, share, live, q_g, weights_g, (keys_g, *scales_g), table_g)
        pl.when(total < rows * most)(
            lambda: _fill(shared, _share(blocks, positions_g, rows * most - total, dead), live, dead, out_g)
        )
        _drain(shared, share)

    @pl.when(warpgroup < consumers)
    def _() -> None:
        plgpu.set_max_registers(left // consumers // 8 * 8, action="increase")
        _consume(consumers, shared, share, live, warpgroup, positions_g, out_g)


def _scan(positions_g, count: Callable[[jax.Array], jax.Array], start, visit: Callable):
    """carry = visit(carry, row, its tiles) over all rows; lengths are read some at a time."""

    rows, tokens = positions_g.shape
    ahead = max(POSITIONS_AHEAD // tokens, 1)

    def step(i: jax.Array, carry):
        several = [i * ahead + j for j in range(ahead)]
        tiles = [count(jnp.minimum(row, rows - 1)) for row in several]
        for row, own in zip(several, tiles, strict=True):
            carry = visit(carry, row, jnp.where(row < rows, own, 0))
        return carry

    return lax.fori_loop(0, -(-rows // ahead), step, start)


def _share(blocks: int, positions_g, total: jax.Array, count: Callable[[jax.Array], jax.Array]) -> _Share:
    """This block's share of a list of `total` tiles."""
    block, each = lax.axis_index("block"), lax.div(total, jnp.int32(blocks))
    more = total - each * blocks
    # Not block * total / blocks: that overflows where total is some millions.
    first = block * each + jnp.minimum(block, more)
    end = first + each + (block < more).astype(jnp.int32)

    def visit(carry, row: jax.Array, tiles: jax.Array):
        begin, start, first_row, end_row = carry
        passed, begun = begin + tiles <= first, (begin < end) & (row < positions_g.shape[0])
        begin = begin + tiles
        return (
            begin,
            jnp.where(passed, begin, start),
            first_row + passed.astype(jnp.int32),
            end_row + begun.astype(jnp.int32),
        )

    _, start, first_row, end_row = _scan(positions_g, count, (jnp.int32(0),) * 4, visit)
    return _Share(first, end, first_row, start, jnp.maximum(end_row - first_row, 0))


def _feed(
    shared: _Shared, share: _Share, live: Callable, q_g, weights_g, caches_g: tuple[Ref, ...], table_g
) -> None:
    """Sends for queries, weights and tiles of keys, in the order of the share."""
    rings, stages = shared.queries.shape[0], shared.keys.shape[0]
    rows_a_sequence = q_g.shape[0] // table_g.shape[0]
    num_pages, page = caches_g[0].shape[:2]
    pages = TILE // page

    def row(i: jax.Array, r: jax.Array, first: jax.Array, before: jax.Array, count: jax.Array) -> None:
        ring = lax.rem(i, jnp.int32(rings))
        pl.when(i >= rings)(lambda: plgpu.barrier_wait(shared.queries_free.at[ring]))
        plgpu.copy_gmem_to_smem(q_g.at[r], shared.queries.at[ring], shared.queries_full.at[ring])
        plgpu.copy_gmem_to_smem(weights_g.at[r], shared.weights.at[ring], shared.queries_full.at[ring])
        sequence = lax.div(r, jnp.int32(rows_a_sequence))
        # The tile that holds the row's last key may have pages behind it, and end behind the table.
        last_column = jnp.clip(live(r) * pages, 1, table_g.shape[1]) - 1

        def pages_of(turn: jax.Array) -> tuple[jax.Array, ...]:
            column = (first + turn) * pages
            return tuple(
                jnp.clip(table_g[sequence, jnp.minimum(column + j, last_column)], 0, num_pages - 1)
                for j in range(pages)
            )

        def step(turn: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ahead = pages_of(turn + 1)  # a trip to memory, made while this tile's place gets free
            n = before + turn
            stage = lax.rem(n, jnp.int32(stages))
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(shared.keys_free.at[stage]))
            full = shared.keys_full.at[stage]
            for cache_g, kept in zip(caches_g, (shared.keys, shared.scales), strict=False):
                if cache_g.ndim == 2 and cache_g.shape[1] != page:
                    place = pl.ds((first + turn) * TILE, TILE)
                    plgpu.copy_gmem_to_smem(cache_g.at[sequence, place], kept.at[stage], full)
                    continue
                for j, one in enumerate(own):
                    place = kept.at[stage, pl.ds(j * page, page)]
                    plgpu.copy_gmem_to_smem(cache_g.at[one], place, full)
            return ahead

        lax.fori_loop(0, count, step, pages_of(jnp.int32(0)))

    share.each_row(live, row)


def _drain(shared: _Shared, share: _Share) -> None:
    """Waits until all is computed."""
    for free, total in ((shared.keys_free, share.end - share.first), (shared.queries_free, share.num_rows)):
        count = free.shape[0]
        last = jnp.minimum(total, count)

        def wait(i: jax.Array, _: None, free=free, count=count, skipped=total - last) -> None:
            plgpu.barrier_wait(free.at[lax.rem(skipped + i, jnp.int32(count))])

        lax.fori_loop(0, last, wait, None)


def _fill(shared: _Shared, share: _Share, live: Callable, dead: Callable, out_g) -> None:
    """Writes -inf to the share's tiles of dead ones."""
    size = shared.nothing.shape[0]
    shared.nothing[...] = jnp.full((size,), -jnp.inf, jnp.float32)
    plgpu.commit_smem()

    def row(_, r: jax.Array, first: jax.Array, __, count: jax.Array) -> None:
        begin = (live(r) + first) * TILE
        wide = lax.div(count * TILE, jnp.int32(size))

        def write(at: jax.Array, width: int) -> None:
            for token in range(out_g.shape[1]):
                target = out_g.at[r, token, pl.ds(at, width)]
                plgpu.copy_smem_to_gmem(shared.nothing.at[pl.ds(0, width)], target)

        lax.fori_loop(0, wide, lambda i, _: write(begin + i * size, size), None)
        rest = begin + wide * size
        narrow = count - wide * (size // TILE)
        lax.fori_loop(0, narrow, lambda i, _: write(rest + i * TILE, TILE), None)

    share.each_row(dead, row)
    plgpu.wait_smem_to_gmem(0)


def _consume(
    consumers: int, shared: _Shared, share: _Share, live: Callable, warpgroup: jax.Array, positions_g, out_g
) -> None:
    """Every `consumers`-th tile of the share."""
    rings, stages, tokens = shared.queries.shape[0], shared.keys.shape[0], out_g.shape[1]
    heads = shared.queries.shape[1] // tokens
    key = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_PER_KEY)

    def row(i: jax.Array, r: jax.Array, first: jax.Array, before: jax.Array, count: jax.Array) -> None:
        ring = lax.rem(i, jnp.int32(rings))
        skip = lax.rem(warpgroup - lax.rem(before, jnp.int32(consumers)) + consumers, jnp.int32(consumers))
        turns = lax.div(jnp.maximum(count - skip + consumers - 1, 0), jnp.int32(consumers))
        limits = [positions_g[r, token] for token in range(tokens)]
        plgpu.barrier_wait(shared.queries_full.at[ring])

        def step(turn: jax.Array, _: None) -> None:
            n = skip + turn * consumers
            stage, at = lax.rem(before + n, jnp.int32(stages)), (first + n) * TILE
            place = shared.out.at[warpgroup, lax.rem(turn, jnp.int32(2))]
            plgpu.barrier_wait(shared.keys_full.at[stage])
            scale = None
            if shared.scales is not None:
                scale = plgpu.load(shared.scales.at[stage], layout=_PER_KEY, optimized=False)
            for token in range(tokens):
                columns = pl.ds(token * heads, heads)
                scores = _matmul(shared.keys.at[stage], shared.queries.at[ring, columns])
                if token == tokens - 1:
                    plgpu.barrier_arrive(shared.keys_free.at[stage])
                weight = plgpu.load(shared.weights.at[ring, columns], layout=_PER_HEAD, optimized=False)
                positive = jnp.maximum(scores, 0.0)
                sums = (positive * lax.broadcast_in_dim(weight, positive.shape, [1])).sum(axis=1)
                sums = sums if scale is None else sums * scale
                place.at[token][...] = jnp.where(key + at <= limits[token], sums, -jnp.inf)
            plgpu.commit_smem()
            for token in range(tokens):
                plgpu.copy_smem_to_gmem(place.at[token], out_g.at[r, token, pl.ds(at, TILE)])
            plgpu.wait_smem_to_gmem(tokens, wait_read_only=True)

        lax.fori_loop(0, turns, step, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.queries_free.at[ring])

    share.each_row(live, row)
    plgpu.wait_smem_to_gmem(0)


def _matmul(keys: Ref, queries: Ref) -> jax.Array:
    """[keys, heads]."""

    def run(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, keys, queries.T)
        return accumulator[...]

    shape = (keys.shape[0], queries.shape[0])
    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
