"""Paged decode attention for Hopper (sm_90a) in Pallas Mosaic GPU.

One warpgroup handles one sequence, one KV head and one share of its keys. It takes 64 keys at a time through a
ring of shared memory that TMA fills page by page, straight from the cache as it lies; the sequence's queries
(all its positions and all query heads of that KV head) are the rows of a 64-row wgmma, so rows that do not
exist cost tensor time that nobody else wants, and no memory traffic. Several such blocks share a multiprocessor
and hide each other's softmax. With more than one share a second, small XLA step joins them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

QUERY_ROWS = 64  # rows of a wgmma
BLOCK_KEYS = 64
ROW_GROUP = 8  # rows of a shared-memory tile: queries and results travel in whole ones
HEAD_WIDTHS = (64, 128)
PAGE_SIZES = (8, 16, 32, 64)
NUM_SMS = 132
MASKED = -1e30  # finite, so that a row that sees nothing in a block has no NaN
LOG2_E = 1.4426950408889634

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut. `splits` are shares of a sequence's keys; None: chosen from the shapes."""

    stages: int | None = None
    splits: int | None = None
    keys_a_split: int = 512  # fewer are not worth a second step
    auto_barriers: bool = True
    weights_in_smem: bool = False  # slower; Pallas' interpreter multiplies from shared memory only


def why_not(q: jax.Array, keys: jax.Array) -> str | None:
    """Why these shapes and dtypes cannot run here, or None."""
    _, t, _, per_kv, width = q.shape
    page = keys.shape[1]
    if q.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
        return f"it takes bfloat16 queries and keys, got {q.dtype} and {keys.dtype}"
    if width not in HEAD_WIDTHS:
        return f"it takes heads of {HEAD_WIDTHS}, got {width}"
    if t * per_kv > QUERY_ROWS:
        return f"T * Q may be at most {QUERY_ROWS}, got {t} * {per_kv}"
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
    padded_rows = -(-rows // ROW_GROUP) * ROW_GROUP
    table, limits, blocks = _plan(table, positions, keys.shape[0], page, per_kv)
    queries = jnp.pad(
        q.swapaxes(1, 2).reshape(b, g, rows, width), ((0, 0), (0, 0), (0, padded_rows - rows), (0, 0))
    )
    splits = tuning.splits or _choose_splits(b * g, table.shape[1] * page, tuning.keys_a_split)
    operands = (queries, keys, values, table, limits, blocks)
    out_type = [jax.ShapeDtypeStruct((b, g, splits, padded_rows, width), q.dtype)]
    if splits > 1:
        out_type += [jax.ShapeDtypeStruct((b, g, splits, padded_rows), jnp.float32)] * 2
    parts = _vary_like(operands, _call(out_type, page, splits, padded_rows, width, tuning)(*operands))
    out = parts[0][:, :, 0] if splits == 1 else _join(*parts)
    return out[:, :, :rows].reshape(b, g, t, per_kv, width).swapaxes(1, 2)


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
    limits = jnp.pad(limits, ((0, 0), (0, QUERY_ROWS - limits.shape[1])))
    return table, limits, longest // BLOCK_KEYS + 1


def _choose_splits(sequences: int, most_keys: int, keys_a_split: int) -> int:
    """Shares a sequence: enough for two blocks a multiprocessor, none smaller than is worth joining."""
    return max(1, min(2 * NUM_SMS // sequences, most_keys // keys_a_split))


def _vary_like(operands: tuple[jax.Array, ...], results: list[jax.Array]) -> list[jax.Array]:
    """The results, marked to vary over every manual mesh axis that an operand varies over.

    plgpu.kernel switches check_vma off around itself, so its results come out as if all devices had the same.
    """
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    return [
        lax.pcast(x, tuple(varying - jax.typeof(x).manual_axis_type.varying), to="varying") for x in results
    ]


def _join(out: jax.Array, top: jax.Array, total: jax.Array) -> jax.Array:
    """Shares [B, G, X, R, H] with their maxima (base 2) and sums [B, G, X, R] -> [B, G, R, H]."""
    weight = total * jnp.exp2(top - top.max(axis=2, keepdims=True))
    weight = weight / weight.sum(axis=2, keepdims=True)
    return (out.astype(jnp.float32) * weight[..., None]).sum(axis=2).astype(out.dtype)


def _call(out_type, page: int, splits: int, padded_rows: int, width: int, tuning: Tuning):
    """The kernel for these static sizes."""
    b, g = out_type[0].shape[:2]
    stages = tuning.stages or (4 if width == 64 else 3)
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    bf16 = jnp.bfloat16
    scratch = {
        "q_s": plgpu.SMEM((QUERY_ROWS, width), bf16, transforms=tiles),
        "k_s": plgpu.SMEM((stages, BLOCK_KEYS, width), bf16, transforms=tiles),
        "v_s": plgpu.SMEM((stages, BLOCK_KEYS, width), bf16, transforms=tiles),
        "q_full": plgpu.Barrier(),
        "k_full": plgpu.Barrier(num_arrivals=BLOCK_KEYS // page, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=BLOCK_KEYS // page, num_barriers=stages),
    }
    if tuning.weights_in_smem:
        scratch["weights_s"] = plgpu.SMEM((QUERY_ROWS, BLOCK_KEYS), bf16, transforms=tiles)
    if splits > 1:
        scratch["top_s"] = plgpu.SMEM((QUERY_ROWS,), jnp.float32)
        scratch["total_s"] = plgpu.SMEM((QUERY_ROWS,), jnp.float32)
    body = _one_share if splits == 1 else _several_shares
    return plgpu.kernel(
        functools.partial(body, page=page, splits=splits, padded_rows=padded_rows),
        out_type=out_type,
        scratch_types=scratch,
        grid=(splits, g, b),
        grid_names=("split", "kv_head", "sequence"),
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=not tuning.auto_barriers,
        ),
    )


def _one_share(q_g, k_g, v_g, table_g, limits_g, blocks_g, out_g, **refs) -> None:
    _attend(q_g, k_g, v_g, table_g, limits_g, blocks_g, out_g, None, None, **refs)


def _several_shares(q_g, k_g, v_g, table_g, limits_g, blocks_g, out_g, top_g, total_g, **refs) -> None:
    _attend(q_g, k_g, v_g, table_g, limits_g, blocks_g, out_g, top_g, total_g, **refs)


def _attend(
    q_g,
    k_g,
    v_g,
    table_g,
    limits_g,
    blocks_g,
    out_g,
    top_g,
    total_g,
    *,
    page: int,
    splits: int,
    padded_rows: int,
    q_s,
    k_s,
    v_s,
    q_full,
    k_full,
    v_full,
    weights_s=None,
    top_s=None,
    total_s=None,
) -> None:
    """One sequence, one KV head, one share of the keys."""
    split, head, sequence = (lax.axis_index(name) for name in ("split", "kv_head", "sequence"))
    stages, width = k_s.shape[0], k_s.shape[2]
    rows = pl.ds(0, padded_rows)
    plgpu.copy_gmem_to_smem(q_g.at[sequence, head], q_s.at[rows], q_full)

    share = lax.div(blocks_g[sequence] + (splits - 1), jnp.int32(splits))
    first = split * share
    count = jnp.clip(blocks_g[sequence] - first, 0, share)

    def pages(block: jax.Array) -> tuple[jax.Array, ...]:
        column = (first + block) * (BLOCK_KEYS // page)
        last = table_g.shape[1] - 1
        return tuple(table_g[sequence, jnp.minimum(column + i, last)] for i in range(BLOCK_KEYS // page))

    def fetch(own: tuple[jax.Array, ...], stage: jax.Array) -> None:
        for i, one in enumerate(own):
            place = pl.ds(i * page, page)
            plgpu.copy_gmem_to_smem(k_g.at[one, :, head], k_s.at[stage, place], k_full.at[stage])
            plgpu.copy_gmem_to_smem(v_g.at[one, :, head], v_s.at[stage, place], v_full.at[stage])

    # A table entry is a trip to memory: all that the first blocks need are asked for at once, and the loop
    # holds the entries of the block that it will fetch next.
    ahead = [pages(jnp.int32(i)) for i in range(stages + 1)]
    for i in range(stages):
        pl.when(i < count)(functools.partial(fetch, ahead[i], jnp.int32(i)))
    limits = plgpu.load(limits_g.at[sequence], layout=_ROW, optimized=False)
    plgpu.barrier_wait(q_full)

    def step(block: jax.Array, carry: tuple):
        acc, top, total, own = carry
        stage = lax.rem(block, jnp.int32(stages))
        plgpu.barrier_wait(k_full.at[stage])
        scores = _matmul(q_s, k_s.at[stage].T, BLOCK_KEYS)
        key = plgpu.broadcasted_iota(jnp.int32, (QUERY_ROWS, BLOCK_KEYS), 1, layout=_WGMMA)
        seen = key + (first + block) * BLOCK_KEYS <= _across(limits, BLOCK_KEYS)
        scores = jnp.where(seen, scores * (width**-0.5 * LOG2_E), MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - _across(new_top, BLOCK_KEYS))
        total = total * shrink + weights.sum(axis=1)
        plgpu.barrier_wait(v_full.at[stage])
        left = weights.astype(jnp.bfloat16)
        if weights_s is not None:
            weights_s[...] = left
            plgpu.commit_smem()
            left = weights_s
        mixed = _matmul(left, v_s.at[stage], width)
        acc = acc * _across(shrink, width) + mixed
        plgpu.commit_smem()  # all four warps are done with this stage
        pl.when(block + stages < count)(functools.partial(fetch, own, stage))
        return acc, new_top, total, pages(block + stages + 1)

    acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, width), jnp.float32), _WGMMA)
    top = plgpu.layout_cast(jnp.full((QUERY_ROWS,), MASKED, jnp.float32), _ROW)
    total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), _ROW)
    acc, top, total, _ = lax.fori_loop(0, count, step, (acc, top, total, ahead[stages]))

    # A share without keys has total 0 and gets weight 0; its zeros must not become NaN.
    acc = acc / _across(jnp.where(total == 0.0, 1.0, total), width)
    plgpu.commit_smem()  # and with the queries, whose place the result takes
    q_s[...] = acc.astype(jnp.bfloat16)
    if top_s is not None:
        top_s[...], total_s[...] = top, total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_s.at[rows], out_g.at[sequence, head, split])
    if top_s is not None:
        plgpu.copy_smem_to_gmem(top_s.at[rows], top_g.at[sequence, head, split])
        plgpu.copy_smem_to_gmem(total_s.at[rows], total_g.at[sequence, head, split])
    plgpu.wait_smem_to_gmem(0)


def _matmul(left, right, columns: int) -> jax.Array:
    def run(acc):
        plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((QUERY_ROWS, columns), jnp.float32))


def _across(row: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(row, (QUERY_ROWS, columns), [0])
