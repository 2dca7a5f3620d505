"""Products of a few rows with a weight matrix for Hopper (sm_90a) in Pallas Mosaic GPU.

One block makes a few output features of all rows, over the whole contraction: nothing is left to join. The
rows are the 64 rows of its wgmmas (those behind the last one hold anything: no row of a product reads
another), the features their columns. The contraction is dealt out in chunks to the warpgroups of a
block, each with rings of its own in shared memory that TMA fills; their sums meet in shared memory, and the
first warpgroup finishes: norm's factor, bias, rotation, activation, residual.

RMS norm needs no pass of its own: rows are scaled by the norm's weight on their way to the wgmma, and what
makes their root mean square 1 is a factor of the finished sums.

Time at these sizes is latency, so small blocks fill the chip.
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

from pallas_kernels.few_rows.plan import COLUMN_GROUP, LINE, MAX_ROWS, ROW_GROUP, Plan, Tuning, make_plan
from pallas_kernels.hopper import vary_like

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another
_WGMMA = plgpu.Layout.WGMMA
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def why_not(x: jax.Array, weight_dtype: jax.typing.DTypeLike, width: int) -> str | None:
    """Why rows [M, in] and weights with parts of `width` outputs cannot run here, or None."""
    if x.dtype != jnp.bfloat16 or weight_dtype != jnp.bfloat16:
        return f"it takes bfloat16 rows and weights, got {x.dtype} and {weight_dtype}"
    if x.shape[0] > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows, got {x.shape[0]}"
    if x.shape[1] % LINE or width % COLUMN_GROUP:
        return f"it takes inputs in multiples of {LINE} and outputs in eights, got {x.shape[1]} and {width}"
    return None


def norm_qkv_rope(
    x: jax.Array,
    norm: jax.Array,
    qkv: jax.Array,
    bias: jax.Array | None,
    rope: tuple[jax.Array, jax.Array],
    eps: float,
    *,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See api.norm_qkv_rope; shapes must have passed `why_not`. Returns [M, G, Q + 2, H]."""
    g, per_group, h, d = qkv.shape
    m, (x, cos, sin) = len(x), _whole_tiles(x, *rope)
    weight = qkv.reshape(g * per_group, 2, h // 2, d)  # rotation pairs feature i with i + H/2
    plan = make_plan("rope", x, weight, tuning or Tuning())
    plan = dataclasses.replace(plan, eps=eps, rotated=(per_group - 1, per_group), has_bias=bias is not None)
    extras = [norm, cos, sin] + ([] if bias is None else [bias.reshape(weight.shape[:-1])])
    out = (x.shape[0], g * per_group, 2, h // 2)
    return _run(plan, out, x, weight, *extras).reshape(-1, g, per_group, h)[:m]


def norm_swiglu(
    x: jax.Array, norm: jax.Array, gate_up: jax.Array, eps: float, *, tuning: Tuning | None = None
) -> jax.Array:
    """See api.norm_swiglu."""
    m, (x,) = len(x), _whole_tiles(x)
    plan = make_plan("swiglu", x, gate_up[None], tuning or Tuning())
    out = (x.shape[0], 1, 1, gate_up.shape[1])
    plan = dataclasses.replace(plan, eps=eps)
    return _run(plan, out, x, gate_up[None], norm).reshape(x.shape[0], -1)[:m]


def project_add(
    x: jax.Array, weight: jax.Array, residual: jax.Array, *, tuning: Tuning | None = None
) -> jax.Array:
    """See api.project_add."""
    m, (x, residual) = len(x), _whole_tiles(x, residual)
    plan = make_plan("add", x, weight[None, None], tuning or Tuning())
    out = (x.shape[0], 1, 1, weight.shape[0])
    return _run(plan, out, x, weight[None, None], residual).reshape(residual.shape)[:m]


def _whole_tiles(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Rows behind the last where TMA would have to cut a tile: it takes less than one, or whole ones."""
    more = -len(arrays[0]) % ROW_GROUP if len(arrays[0]) > ROW_GROUP else 0
    return tuple(jnp.pad(x, ((0, more), (0, 0))) for x in arrays) if more else arrays


def _run(plan: Plan, out_shape: tuple[int, ...], *operands: jax.Array) -> jax.Array:
    """The kernel on x, weights and what the kind needs besides. Its result varies as its operands do."""
    (out,) = vary_like(operands, _kernel(plan, jax.ShapeDtypeStruct(out_shape, jnp.bfloat16))(*operands))
    return out


def _kernel(plan: Plan, out_type: jax.ShapeDtypeStruct) -> Callable:
    tiles = (plgpu.TilingTransform((ROW_GROUP, LINE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    wgs, parts, n = plan.warpgroups, plan.parts, plan.columns
    bf16, f32 = jnp.bfloat16, jnp.float32
    scratch = {
        "rows": plgpu.SMEM((wgs, plan.row_stages, MAX_ROWS, plan.chunk), bf16, transforms=tiles),
        "weights": plgpu.SMEM((wgs, plan.weight_stages, parts, n, plan.chunk), bf16, transforms=tiles),
        "out": plgpu.SMEM((out_type.shape[2], MAX_ROWS, n), bf16),
        "rows_full": plgpu.Barrier(num_barriers=wgs * plan.row_stages),
        "weights_full": plgpu.Barrier(
            num_arrivals=parts + (plan.kind != "add"), num_barriers=wgs * plan.weight_stages
        ),
    }
    if wgs > 1:
        scratch["sums"] = plgpu.SMEM((wgs - 1, parts, MAX_ROWS, n), f32)
        scratch["sums_there"] = plgpu.Barrier(num_arrivals=wgs)
    if plan.kind != "add":
        scratch["norm"] = plgpu.SMEM((wgs, plan.weight_stages, plan.chunk), bf16)
        if wgs > 1:
            scratch["squares"] = plgpu.SMEM((wgs - 1, MAX_ROWS), f32)
    if plan.kind == "add":
        scratch["residual"] = plgpu.SMEM((MAX_ROWS, n), bf16)
    if plan.kind == "rope":
        scratch["tables"] = plgpu.SMEM((2, MAX_ROWS, n), f32)
    if plan.kind != "swiglu":
        scratch["extras_full"] = plgpu.Barrier(num_arrivals=2 if plan.kind == "rope" else 1)
    return plgpu.kernel(
        functools.partial(_body, plan),
        out_type=out_type,
        scratch_types=scratch,
        grid=plan.grid,
        grid_names=("tile", "head"),
        num_threads=wgs,
        thread_name="warpgroup",
        kernel_name=f"few_rows_{plan.kind}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory and barriers of one block; what its kind does not need is None."""

    rows: Ref
    weights: Ref
    out: Ref
    rows_full: Ref
    weights_full: Ref
    sums: Ref = None
    sums_there: Ref = None
    norm: Ref = None
    squares: Ref = None
    residual: Ref = None
    tables: Ref = None
    extras_full: Ref = None


def _body(plan: Plan, x_g, weight_g, *rest: Ref, **scratch: Ref) -> None:
    """One block: `columns` features of each part of one head. The names with _g are in device memory."""
    shared = _Shared(**scratch)
    *extras_g, out_g = rest
    warpgroup, head = lax.axis_index("warpgroup"), lax.axis_index("head")
    first = lax.axis_index("tile") * plan.columns
    columns, rows = pl.ds(first, plan.columns), pl.ds(head * 0, plan.padded_rows)
    start = warpgroup * plan.chunks  # this warpgroup's first chunk

    def fetch_weights(i: jax.Array) -> None:
        stage = lax.rem(i, jnp.int32(plan.weight_stages))
        full = shared.weights_full.at[warpgroup * plan.weight_stages + stage]
        chunk = pl.ds((start + i) * plan.chunk, plan.chunk)
        for part in range(plan.parts):
            source = weight_g.at[head, part, columns, chunk]
            plgpu.copy_gmem_to_smem(source, shared.weights.at[warpgroup, stage, part], full)
        if plan.kind != "add":
            plgpu.copy_gmem_to_smem(extras_g[0].at[chunk], shared.norm.at[warpgroup, stage], full)

    def fetch_rows(i: jax.Array) -> None:
        stage = lax.rem(i, jnp.int32(plan.row_stages))
        full = shared.rows_full.at[warpgroup * plan.row_stages + stage]
        source = x_g.at[rows, pl.ds((start + i) * plan.chunk, plan.chunk)]
        plgpu.copy_gmem_to_smem(source, shared.rows.at[warpgroup, stage, pl.ds(0, plan.padded_rows)], full)

    for i in range(plan.weight_stages):
        fetch_weights(jnp.int32(i))
    for i in range(plan.row_stages):
        fetch_rows(jnp.int32(i))
    pl.when(warpgroup == 0)(lambda: _fetch_extras(plan, shared, extras_g, rows, columns))

    def accumulate(*accumulators: Ref) -> tuple[jax.Array, ...]:
        def step(i: jax.Array, squares: jax.Array | None):
            stage = lax.rem(i, jnp.int32(plan.row_stages))
            weight_stage = lax.rem(i, jnp.int32(plan.weight_stages))
            x = shared.rows.at[warpgroup, stage]
            plgpu.barrier_wait(shared.weights_full.at[warpgroup * plan.weight_stages + weight_stage])
            plgpu.barrier_wait(shared.rows_full.at[warpgroup * plan.row_stages + stage])
            if squares is not None:
                squares += _scale_rows(x, shared.norm.at[warpgroup, weight_stage])
            for part, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, x, shared.weights.at[warpgroup, weight_stage, part].T)
            if min(plan.row_stages, plan.weight_stages) < plan.chunks:
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # all four warps are done with this chunk
            for stages, fetch in ((plan.row_stages, fetch_rows), (plan.weight_stages, fetch_weights)):
                if stages < plan.chunks:
                    pl.when(i + stages < plan.chunks)(functools.partial(fetch, i + stages))
            return squares

        squares = None
        if plan.kind != "add":
            squares = plgpu.layout_cast(jnp.zeros((MAX_ROWS,), jnp.float32), _PER_ROW)
        squares = lax.fori_loop(0, plan.chunks, step, squares)
        sums = [accumulator[...] for accumulator in accumulators]
        return tuple(sums) if squares is None else (squares, *sums)

    shape = plgpu.WGMMAAccumulatorRef((MAX_ROWS, plan.columns), jnp.float32)
    sums = pl.run_scoped(accumulate, *(shape,) * plan.parts)
    if plan.warpgroups > 1:
        pl.when(warpgroup > 0)(lambda: _hand_over(shared, warpgroup - 1, sums, plan.parts))
        plgpu.barrier_arrive(shared.sums_there)

    @pl.when(warpgroup == 0)
    def _() -> None:
        results = _finish(plan, shared, extras_g, *_take_over(plan, shared, sums), head, columns)
        for part, result in enumerate(results):
            shared.out.at[part][...] = result.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for part in range(len(results)):
            source = shared.out.at[part, pl.ds(0, plan.padded_rows)]
            plgpu.copy_smem_to_gmem(source, out_g.at[rows, head, part, columns])
        plgpu.wait_smem_to_gmem(0)


def _fetch_extras(plan: Plan, shared: _Shared, extras_g: list[Ref], rows: Ref, columns: Ref) -> None:
    """Sends for what the first warpgroup needs at the end."""
    own = pl.ds(0, plan.padded_rows)
    if plan.kind == "add":
        plgpu.copy_gmem_to_smem(extras_g[0].at[rows, columns], shared.residual.at[own], shared.extras_full)
    elif plan.kind == "rope":
        for i in range(2):
            source = extras_g[1 + i].at[rows, columns]
            plgpu.copy_gmem_to_smem(source, shared.tables.at[i, own], shared.extras_full)


def _scale_rows(x: Ref, norm: Ref) -> jax.Array:
    """Multiplies a chunk of rows [64, chunk] by the norm's weight [chunk] where it lies.

    Returns the sums of the squares of what it was, [64].
    """
    wide = plgpu.load(x, layout=_WGMMA).astype(jnp.float32)
    scale = plgpu.load(norm, layout=_PER_COLUMN, optimized=False)
    scaled = wide * lax.broadcast_in_dim(scale.astype(jnp.float32), wide.shape, [1])
    x[...] = scaled.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return (wide * wide).sum(axis=1)


def _hand_over(shared: _Shared, place: jax.Array, sums: tuple[jax.Array, ...], parts: int) -> None:
    """A warpgroup's sums to shared memory, for the first one."""
    if len(sums) > parts:
        shared.squares.at[place][...] = sums[0]
    for part, own in enumerate(sums[-parts:]):
        shared.sums.at[place, part][...] = own


def _take_over(
    plan: Plan, shared: _Shared, sums: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, list[jax.Array]]:
    """Everybody's sums: (squares of the rows [64], products [64, columns] of each part)."""
    squares = sums[0] if len(sums) > plan.parts else None
    products = list(sums[-plan.parts :])
    if plan.warpgroups > 1:
        plgpu.barrier_wait(shared.sums_there)
    for place in range(plan.warpgroups - 1):
        if squares is not None:
            squares += plgpu.load(shared.squares.at[place], layout=_PER_ROW)
        for part in range(plan.parts):
            products[part] += plgpu.load(shared.sums.at[place, part], layout=_WGMMA)
    return squares, products


def _finish(
    plan: Plan, shared: _Shared, extras_g: list[Ref], squares, products: list[jax.Array], head, columns
) -> list[jax.Array]:
    """From sums to results, fp32 [64, columns] each."""
    shape = (MAX_ROWS, plan.columns)
    if squares is not None:
        factor = lax.rsqrt(squares / plan.contraction + plan.eps)
        factor = lax.broadcast_in_dim(factor, shape, [0])
        products = [product * factor for product in products]
    if plan.kind == "swiglu":
        gate, up = products
        return [gate / (1.0 + jnp.exp(-gate)) * up]
    if plan.kind == "add":
        plgpu.barrier_wait(shared.extras_full)
        return [products[0] + plgpu.load(shared.residual, layout=_WGMMA).astype(jnp.float32)]
    if plan.has_bias:
        for part in range(2):
            bias = plgpu.load(extras_g[3].at[head, part, columns], layout=_PER_COLUMN, optimized=False)
            products[part] += lax.broadcast_in_dim(bias.astype(jnp.float32), shape, [1])
    plgpu.barrier_wait(shared.extras_full)
    cos, sin = (plgpu.load(shared.tables.at[i], layout=_WGMMA) for i in range(2))
    rotated, group = plan.rotated
    turns = (lax.rem(head, jnp.int32(group)) < rotated).astype(jnp.float32)
    cos, sin = 1.0 + (cos - 1.0) * turns, sin * turns
    low, high = products
    return [low * cos - high * sin, high * cos + low * sin]
