"""Paged decode attention for Hopper (sm_90a) in Pallas Mosaic GPU.

One warpgroup handles one sequence, one KV head and one share of its keys. It takes 64 keys at a time through
a ring of shared memory that TMA fills page by page, straight from the cache as it lies. Keys are the 64 rows
of its wgmmas and queries (all tokens of the sequence, all query heads of the KV head) their columns: scores
are [keys, queries], results [head width, queries]. So a few queries cost a few registers, and many such
warpgroups fit a multiprocessor and hide each other's softmax. With more than one share, XLA joins them.
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

MAX_QUERIES = 64
BLOCK_KEYS = 64  # rows of a wgmma
COLUMN_GROUP = 8  # a wgmma's columns come in whole ones
LATE_SUM_COLUMNS = 32
HEAD_WIDTHS = (64, 128)
PAGE_SIZES = (8, 16, 32, 64)
MASKED = -1e30  # finite, so that a query that sees nothing of a block has no NaN
LOG2_E = 1.4426950408889634

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another
_WGMMA = plgpu.Layout.WGMMA
_PER_QUERY = plgpu.Layout.WGMMA.reduce(0)
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut; None: chosen from the shapes.

    `splits` are shares of a sequence's keys, none of a full table smaller than `keys_a_split`; `stages` are
    blocks of keys and values in flight.
    """

    stages: int | None = None
    splits: int | None = None
    keys_a_split: int = 256


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory and barriers of one warpgroup."""

    queries: Ref
    keys: Ref
    values: Ref
    weights: Ref
    out: Ref
    queries_full: Ref
    keys_full: Ref
    values_full: Ref
    top: Ref = None  # these two with several shares only
    total: Ref = None


def why_not(q: jax.Array, keys: jax.Array) -> str | None:
    """Why these shapes and dtypes cannot run here, or None."""
    _, t, _, per_kv, width = q.shape
    page = keys.shape[1]
    if q.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
        return f"it takes bfloat16 queries and keys, got {q.dtype} and {keys.dtype}"
    if width not in HEAD_WIDTHS:
        return f"it takes heads of {HEAD_WIDTHS}, got {width}"
    if t * per_kv > MAX_QUERIES:
        return f"T * Q may be at most {MAX_QUERIES}, got {t} * {per_kv}"
    if page not in PAGE_SIZES:
        return f"it takes pages of {PAGE_SIZES} positions, got {page}"
    return None


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See api.paged_attention; shapes must have passed `why_not`."""
    tuning = tuning or Tuning()
    b, t, g, per_kv, width = q.shape
    page, rows = keys.shape[1], t * per_kv
    columns = -(-rows // COLUMN_GROUP) * COLUMN_GROUP
    table, limits, blocks = _plan(table, positions, keys.shape[0], page, per_kv)
    queries = q.swapaxes(1, 2).reshape(b, g, rows, width)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, columns - rows), (0, 0)))
    splits = tuning.splits or _choose_splits(b * g, table.shape[1] * page, tuning.keys_a_split)
    stages = tuning.stages or _choose_stages(b * g * splits, width)
    out_type = [jax.ShapeDtypeStruct((b, splits, t, g, per_kv, width), q.dtype)]
    if splits > 1:
        out_type += [jax.ShapeDtypeStruct((b, splits, g, columns), jnp.float32)] * 2
    operands = (queries, keys, values, table, limits, blocks)
    parts = vary_like(operands, *_kernel(out_type, page, stages, columns)(*operands))
    if splits == 1:
        return parts[0][:, 0]
    top, total = (x[..., :rows].reshape(b, splits, g, t, per_kv).swapaxes(2, 3)[..., None] for x in parts[1:])
    return _join(parts[0], top, total)


def _plan(
    table: jax.Array, positions: jax.Array, num_pages: int, page: int, per_kv: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the kernel reads of a batch, the same for all layers: (table, last key of each row, key blocks).

    Columns behind a sequence's last page repeat that page, so the kernel may fetch whole blocks and never
    touches a page that is not the sequence's own.
    """
    width = table.shape[1]
    last = jnp.clip(positions, 0, width * page - 1).astype(jnp.int32)  # B T
    longest = last.max(axis=1)
    padded = -(-width * page // BLOCK_KEYS) * BLOCK_KEYS // page
    column = jnp.minimum(jnp.arange(padded, dtype=jnp.int32), longest[:, None] // page)
    table = jnp.clip(jnp.take_along_axis(table.astype(jnp.int32), column, axis=1), 0, num_pages - 1)
    limits = jnp.repeat(last, per_kv, axis=1)
    limits = jnp.pad(limits, ((0, 0), (0, -limits.shape[1] % COLUMN_GROUP)))
    return table, limits, longest // BLOCK_KEYS + 1


def _choose_splits(sequences: int, most_keys: int, keys_a_split: int) -> int:
    """Shares a sequence: enough for two a multiprocessor, none smaller than is worth joining."""
    return max(1, min(2 * NUM_SMS // sequences, most_keys // keys_a_split))


def _choose_stages(warpgroups: int, width: int) -> int:
    """Deep where a warpgroup is alone on its multiprocessor; else so few that all are on the chip at once."""
    together = -(-warpgroups // NUM_SMS)
    stage_bytes = 2 * BLOCK_KEYS * width * 2
    if together == 1:
        return 4 if width == 64 else 3
    return max(1, min(2, SMEM_BYTES // together // stage_bytes))


def _join(out: jax.Array, top: jax.Array, total: jax.Array) -> jax.Array:
    """Shares [B, X, ..., H] with their maxima (base 2) and sums [B, X, ..., 1] -> [B, ..., H]."""
    weight = total * jnp.exp2(top - top.max(axis=1, keepdims=True))
    weight = weight / weight.sum(axis=1, keepdims=True)
    return (out.astype(jnp.float32) * weight).sum(axis=1).astype(out.dtype)


def _kernel(out_type: list[jax.ShapeDtypeStruct], page: int, stages: int, columns: int) -> Callable:
    """The kernel for these static sizes."""
    b, splits, _, g, _, width = out_type[0].shape
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    bf16, pages = jnp.bfloat16, BLOCK_KEYS // page
    scratch = {
        "queries": plgpu.SMEM((columns, width), bf16, transforms=tiles),
        "keys": plgpu.SMEM((stages, BLOCK_KEYS, width), bf16, transforms=tiles),
        "values": plgpu.SMEM((stages, BLOCK_KEYS, width), bf16, transforms=tiles),
        "weights": plgpu.SMEM((columns, BLOCK_KEYS), bf16, transforms=tiles),
        "out": plgpu.SMEM((columns, width), bf16),
        "queries_full": plgpu.Barrier(),
        "keys_full": plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
        "values_full": plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
    }
    if splits > 1:
        scratch |= {name: plgpu.SMEM((columns,), jnp.float32) for name in ("top", "total")}
    return plgpu.kernel(
        _attend,
        out_type=out_type,
        scratch_types=scratch,
        grid=(splits, g, b),
        grid_names=("split", "kv_head", "sequence"),
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def _attend(q_g, k_g, v_g, table_g, limits_g, blocks_g, out_g, *sums_g, **scratch: Ref) -> None:
    """One sequence, one KV head, one share of the keys. The names with _g are in device memory."""
    shared = _Shared(**scratch)
    split, head, sequence = (lax.axis_index(name) for name in ("split", "kv_head", "sequence"))
    stages, _, width = shared.keys.shape
    columns = shared.queries.shape[0]
    pages = BLOCK_KEYS // k_g.shape[1]
    plgpu.copy_gmem_to_smem(q_g.at[sequence, head], shared.queries, shared.queries_full)

    splits = out_g.shape[1]
    share = lax.div(blocks_g[sequence] + (splits - 1), jnp.int32(splits))
    first = split * share
    count = jnp.clip(blocks_g[sequence] - first, 0, share)

    def pages_of(block: jax.Array) -> tuple[jax.Array, ...]:
        column = (first + block) * pages
        return tuple(table_g[sequence, jnp.minimum(column + i, table_g.shape[1] - 1)] for i in range(pages))

    fetch_keys = functools.partial(_fetch, k_g, head, shared.keys, shared.keys_full)
    fetch_values = functools.partial(_fetch, v_g, head, shared.values, shared.values_full)
    # A table entry is a trip to memory: all that the first blocks need are asked for at once, and the loop
    # holds the entries of the block that it will fetch next.
    ahead = [pages_of(jnp.int32(i)) for i in range(stages + 1)]
    for i in range(stages):
        pl.when(i < count)(functools.partial(fetch_keys, ahead[i], jnp.int32(i)))
        pl.when(i < count)(functools.partial(fetch_values, ahead[i], jnp.int32(i)))
    limits = plgpu.load(limits_g.at[sequence], layout=_PER_QUERY, optimized=False)
    plgpu.barrier_wait(shared.queries_full)
    # A sum over keys crosses warps: once at the end, where there are registers to keep all terms until then.
    late_sum = columns <= LATE_SUM_COLUMNS

    def step(block: jax.Array, carry: tuple):
        acc, top, total, own = carry
        stage = lax.rem(block, jnp.int32(stages))
        plgpu.barrier_wait(shared.keys_full.at[stage])
        scores = _scores(shared.keys.at[stage], shared.queries, limits - (first + block) * BLOCK_KEYS)
        new_top = jnp.maximum(top, scores.max(axis=0))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - _down(new_top, BLOCK_KEYS))
        if late_sum:
            total = total * _down(shrink, BLOCK_KEYS) + weights
        else:
            total = total * shrink + weights.sum(axis=0)
        shared.weights.T[...] = plgpu.layout_cast(weights.astype(jnp.bfloat16), _TRANSPOSED)
        plgpu.commit_smem()  # the weights are there for all, and all four warps are done with the keys
        more = block + stages < count
        pl.when(more)(functools.partial(fetch_keys, own, stage))
        plgpu.barrier_wait(shared.values_full.at[stage])
        mixed = _matmul(shared.values.at[stage].T, shared.weights.T, (width, columns))
        acc = acc * _down(shrink, width) + mixed
        plgpu.commit_smem()  # and now with the values
        pl.when(more)(functools.partial(fetch_values, own, stage))
        return acc, new_top, total, pages_of(block + stages + 1)

    terms = ((BLOCK_KEYS, columns), _WGMMA) if late_sum else ((columns,), _PER_QUERY)
    start = (_full(0.0, (width, columns), _WGMMA), _full(MASKED, (columns,), _PER_QUERY), _full(0.0, *terms))
    acc, top, total, _ = lax.fori_loop(0, count, step, (*start, ahead[stages]))
    total = total.sum(axis=0) if late_sum else total
    # A share without keys has total 0 and will weigh 0; its zeros must not become NaN.
    acc = acc / _down(jnp.where(total == 0.0, 1.0, total), width)
    _write(shared, acc, top, total, out_g.at[sequence, split], head, [x.at[sequence, split] for x in sums_g])


def _fetch(cache_g, head, ring, full, own: tuple[jax.Array, ...], stage: jax.Array) -> None:
    """Sends for one block, a copy a page, from the cache [P, page, G, H]."""
    page = cache_g.shape[1]
    for i, one in enumerate(own):
        place = ring.at[stage, pl.ds(i * page, page)]
        plgpu.copy_gmem_to_smem(cache_g.at[one, :, head], place, full.at[stage])


def _scores(keys, queries, limits: jax.Array) -> jax.Array:
    """[keys, queries] in base 2, keys past a query's limit (counted from this block's first) masked."""
    columns, width = queries.shape
    scores = _matmul(keys, queries.T, (BLOCK_KEYS, columns)) * (width**-0.5 * LOG2_E)
    key = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KEYS, columns), 0, layout=_WGMMA)
    return jnp.where(key <= _down(limits, BLOCK_KEYS), scores, MASKED)


def _write(shared: _Shared, acc, top, total, out_g, head, sums_g) -> None:
    """Results [H, queries] to [T, G, Q, H] through shared memory, and of several shares what joins them."""
    tokens, _, per_kv, _ = out_g.shape
    shared.out.T[...] = plgpu.layout_cast(acc.astype(jnp.bfloat16), _TRANSPOSED)
    if sums_g:
        shared.top[...], shared.total[...] = top, total
    plgpu.commit_smem()
    for token in range(tokens):
        plgpu.copy_smem_to_gmem(shared.out.at[pl.ds(token * per_kv, per_kv)], out_g.at[token, head])
    for kept, kept_g in zip((shared.top, shared.total), sums_g, strict=False):
        plgpu.copy_smem_to_gmem(kept, kept_g.at[head])
    plgpu.wait_smem_to_gmem(0)


def _matmul(left, right, shape: tuple[int, int]) -> jax.Array:
    def run(acc):
        plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _full(value: float, shape: tuple[int, ...], layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _down(per_query: jax.Array, rows: int) -> jax.Array:
    return lax.broadcast_in_dim(per_query, (rows, *per_query.shape), [1])
