"""Sparse latent attention for Hopper in Pallas Mosaic GPU: shares of keys, the launch, and joining shares."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import NUM_SMS, vary_like
from pallas_kernels.sparse_mla import rows, seesaw
from pallas_kernels.sparse_mla.seesaw import HALF, HEADS, KEYS, ROPE, SLOTS, VALUE, WIDTH

MAX_TOKENS = 65535  # the grid's third dimension
HEAD_COUNTS = (8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed only.

    splits: shares of the keys of a token, each a block of its own; None: as many as fill the chip.
    """

    splits: int | None = None


def why_not(q: jax.Array, cache: jax.Array, value_width: int) -> str | None:
    """Why these shapes and dtypes cannot run here, or None."""
    if q.dtype != jnp.bfloat16 or cache.dtype != jnp.bfloat16:
        return f"it takes bfloat16 queries and cache, got {q.dtype} and {cache.dtype}"
    if q.shape[2] != WIDTH or value_width != VALUE:
        return f"it takes rows of {WIDTH} with values of {VALUE}, got {q.shape[2]} and {value_width}"
    if q.shape[1] > HEAD_COUNTS[-1]:
        return f"it takes at most {HEAD_COUNTS[-1]} heads, got {q.shape[1]}"
    if q.shape[0] > MAX_TOKENS:
        return f"it takes at most {MAX_TOKENS} tokens, got {q.shape[0]}"
    return None


def sparse_mla(
    q: jax.Array,
    cache: jax.Array,
    indices: jax.Array,
    scale: float,
    *,
    tuning: Tuning | None = None,
    gather: rows.Rows = rows.ASYNC,
) -> tuple[jax.Array, jax.Array]:
    """See api.sparse_mla; shapes must have passed `why_not`. `gather`: rows.PLAIN in the interpreter."""
    tuning, wanted = tuning or Tuning(), q.shape[1]
    n = next(count for count in HEAD_COUNTS if count >= wanted)
    q = jnp.pad(q, ((0, 0), (0, n - wanted), (0, 0)))  # rows of the matrix unit that are idle anyway
    t = q.shape[0]
    blocks = -(-indices.shape[1] // KEYS)
    splits = tuning.splits or choose_splits(t, n, indices.shape[1])
    share = -(-blocks // splits)
    splits = -(-blocks // share)
    padding = splits * share * KEYS - indices.shape[1]
    indices = jnp.pad(indices.astype(jnp.int32), ((0, 0), (0, padding)), constant_values=-1)
    program = seesaw.Program(share, scale, gather, stride=NUM_SMS // (splits * -(-n // HEADS)))
    operands = (q, gather.prepare(cache.reshape(-1, WIDTH), indices), indices)
    out, lse = vary_like(operands, *_kernel(program, t, splits, n)(*operands))
    out, lse = out[:, :, :wanted], lse[:, :, :wanted]
    return (out[:, 0], lse[:, 0]) if splits == 1 else _join(out, lse)


def choose_splits(tokens: int, heads: int, chosen: int) -> int:
    """Shares of the keys of a token that fill the chip once."""
    return max(1, min(NUM_SMS // (tokens * -(-heads // HEADS)), -(-chosen // KEYS)))


def _kernel(program: seesaw.Program, tokens: int, splits: int, heads: int) -> Callable:
    """The kernel for these static sizes."""
    tiled = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=rows.TILES)
    scratch = {
        "queries": tiled((2, HEADS, HALF)),
        "queries_rope": tiled((HEADS, ROPE)),
        "latent": tiled((SLOTS, 2, KEYS, HALF)),
        "rope": tiled((SLOTS, KEYS, ROPE)),
        "top": plgpu.SMEM((SLOTS, HEADS), jnp.float32),
        "total": plgpu.SMEM((3, HEADS), jnp.float32),
        "arrived": program.rows.barriers(2 * SLOTS),
        "ready": plgpu.Barrier(),
        "queries_full": plgpu.Barrier(num_arrivals=3),
        "weights_full": plgpu.Barrier(num_barriers=SLOTS),
        "free_left": plgpu.Barrier(num_barriers=SLOTS),
        "free_right": plgpu.Barrier(num_barriers=SLOTS),
        "totals_full": plgpu.Barrier(num_barriers=2),
    }
    return plgpu.kernel(
        functools.partial(seesaw.run, program),
        out_type=[
            jax.ShapeDtypeStruct((tokens, splits, heads, VALUE), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens, splits, heads), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(
            tokens,
            splits,
            -(-heads // HEADS),
        ),  # heads of a token run side by side: they read the same rows
        grid_names=("token", "share", "heads"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="sparse_mla",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,  # the program says where its threads wait for one another
        ),
    )


def _join(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shares [T, X, N, 512] and their log-sum-exp [T, X, N] -> [T, N, 512], [T, N]."""
    top = jnp.maximum(lse.max(axis=1, keepdims=True), seesaw.LOWEST)  # of a row without keys: finite
    weight = jnp.exp(lse - top)
    total = weight.sum(axis=1, keepdims=True)
    weight = weight / jnp.where(total == 0.0, 1.0, total)
    joined = (out.astype(jnp.float32) * weight[..., None]).sum(axis=1).astype(out.dtype)
    return joined, (top + jnp.log(total))[:, 0]
