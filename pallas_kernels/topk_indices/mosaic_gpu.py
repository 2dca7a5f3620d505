"""The best positions of each row for Hopper (sm_90a): `selection` as one Pallas Mosaic GPU kernel.

One block a row, or a cluster of up to 8 that merge their histograms through each other's shared memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import NUM_SMS, vary_like
from pallas_kernels.topk_indices import selection, thread_code

MAX_BLOCKS = 8  # of a cluster that every Hopper GPU can place
ENOUGH_BLOCKS = 4  # 8 wait for one another: one row of 131072 positions took 28.3 us, with 4 23.9
SMALLEST_SHARE = 8192  # positions that are worth a block
LARGEST_SHARE = 1 << 19  # whose marks fit shared memory

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut, as selection.Plan; None: chosen from the shapes."""

    blocks: int | None = None
    threads: int = 1024
    ahead: int = 4


def why_not(scores: jax.Array) -> str | None:
    """Why these shapes cannot run here, or None."""
    if scores.shape[1] % 4:
        return f"it takes rows of whole fours, got {scores.shape[1]}"
    if scores.shape[1] > MAX_BLOCKS * LARGEST_SHARE:
        return f"it takes rows of at most {MAX_BLOCKS * LARGEST_SHARE}, got {scores.shape[1]}"
    return None


def topk_indices(scores: jax.Array, lengths: jax.Array, k: int, *, tuning: Tuning | None = None) -> jax.Array:
    """See api.topk_indices; shapes must have passed `why_not`."""
    plan = _plan(scores, k, tuning or Tuning())
    lengths = lengths.astype(jnp.int32)
    (out,) = vary_like((scores, lengths), _kernel(plan, scores.shape[0])(scores, lengths))
    return out


def _plan(scores: jax.Array, k: int, tuning: Tuning) -> selection.Plan:
    rows, length = scores.shape
    blocks = tuning.blocks or _choose_blocks(rows, length)
    return selection.Plan(length, k, blocks, tuning.threads, tuning.ahead)


def _choose_blocks(rows: int, length: int) -> int:
    """As many as the chip holds at once, none with too little to do."""
    blocks = 1
    while blocks * LARGEST_SHARE < length:
        blocks *= 2
    while 2 * blocks <= min(ENOUGH_BLOCKS, length // SMALLEST_SHARE) and 2 * blocks * rows <= NUM_SMS:
        blocks *= 2
    return blocks


def _kernel(plan: selection.Plan, rows: int):
    """The kernel for these static sizes: (scores [T, L], lengths [T]) -> [T, k]."""
    arrays = plan.arrays()

    def body(scores_g: Ref, lengths_g: Ref, out_g: Ref, **scratch: Ref) -> None:
        row = lax.axis_index("row")

        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in range(3 + len(arrays))))
        def run(_, scores, length, out, *shared) -> None:
            code = thread_code.Code(scores, length, out, dict(zip(arrays, shared, strict=True)), plan.blocks)
            selection.select(code, plan)

        own = (scores_g.at[row], lengths_g.at[row], out_g.at[row])
        run(*own, *(scratch[name] for name in arrays))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, plan.k), jnp.int32),
        scratch_types={name: plgpu.SMEM((words,), jnp.int32) for name, words in arrays.items()},
        grid=(rows,),
        grid_names=("row",),
        cluster=(plan.blocks,) if plan.blocks > 1 else (),
        cluster_names=("rank",) if plan.blocks > 1 else (),
        num_threads=plan.threads // 128,
        thread_name="warpgroup",
        kernel_name="topk_indices",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
