"""Sparse latent attention for TPUs in Pallas: one token at a time, its rows fetched one by one by DMA.

A token's keys come in blocks of 128. While a block is worked on the next one's rows are on their way. The
cache lies in words (`packed`), halves of which are multiplied apart: no feature changes its lane.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla import packed

KEYS = 128  # of a block: scores' lanes
SLOTS = 2
UNROLL = 8  # row copies asked for between two branches
SUBLANES = 8
LOWEST = -1e30  # a running maximum before there is one: finite, so that differences are

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another


def why_not(q: jax.Array, cache: jax.Array, value_width: int) -> str | None:
    """Why these shapes and dtypes cannot run here, or None."""
    if q.dtype != jnp.bfloat16 or cache.dtype != jnp.int32:
        return f"it takes bfloat16 queries and rows in words (pack_rows), got {q.dtype} and {cache.dtype}"
    if value_width % (2 * packed.LANES) or q.shape[2] % 2:
        return f"it takes values of whole {2 * packed.LANES}, got {value_width} of {q.shape[2]}"
    return None


def sparse_mla(
    q: jax.Array, cache: jax.Array, indices: jax.Array, scale: float, value_width: int
) -> tuple[jax.Array, jax.Array]:
    """See api.sparse_mla; shapes must have passed `why_not`."""
    wanted, j = q.shape[1], indices.shape[1]
    q = jnp.pad(q, ((0, 0), (0, -wanted % SUBLANES), (0, 0)))
    t, n, _ = q.shape
    blocks = -(-j // KEYS)
    indices = jnp.pad(indices.astype(jnp.int32), ((0, 0), (0, blocks * KEYS - j)), constant_values=-1)
    indices = indices.reshape(t, blocks, KEYS)
    words = packed.num_words(q.shape[2])
    lower, upper = packed.halves(q, value_width)
    operands = (indices.reshape(t, 1, blocks * KEYS), indices, lower, upper, cache.reshape(-1, words))
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    kind = jax.sharding.ManualAxisType(varying=varying)

    def of_token(*shape: int, space: Any = pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i: (i, 0, 0), memory_space=space)

    out, lse = pl.pallas_call(
        functools.partial(_token, scale=scale),
        grid=(t,),
        in_specs=[
            of_token(1, blocks * KEYS, space=pltpu.SMEM),
            of_token(blocks, KEYS),
            of_token(n, words),
            of_token(n, words),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=[of_token(n, value_width), of_token(1, n)],
        out_shape=[
            jax.ShapeDtypeStruct((t, n, value_width), q.dtype, manual_axis_type=kind),
            jax.ShapeDtypeStruct((t, 1, n), jnp.float32, manual_axis_type=kind),
        ],
        scratch_shapes=[
            pltpu.VMEM((SLOTS, KEYS, words), jnp.int32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
            pltpu.VMEM((n, value_width), jnp.float32),
            pltpu.VMEM((n, packed.LANES), jnp.float32),
            pltpu.VMEM((n, packed.LANES), jnp.float32),
        ],
        # Rows that do not exist must not be named, so that each copy need not be checked: 7 bundles, not 18.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="sparse_mla",
    )(*operands)
    return out[:, :wanted], lse[:, 0, :wanted]


def _token(
    named: Ref,
    named_lanes: Ref,
    lower: Ref,
    upper: Ref,
    cache: Ref,
    out: Ref,
    lse: Ref,
    rows: Ref,
    arrived: Ref,
    total: Ref,
    top: Ref,
    weight: Ref,
    *,
    scale: float,
) -> None:
    """One token: `named` [1, J] in scalar memory and `named_lanes` [J / 128, 128] are its indices."""
    blocks = named_lanes.shape[0]
    total[...] = jnp.zeros_like(total)
    top[...] = jnp.full_like(top, LOWEST)
    weight[...] = jnp.zeros_like(weight)
    _fetch(named, cache, rows, arrived, 0)

    @pl.loop(0, blocks)
    def _(block: jax.Array) -> None:
        slot = lax.rem(block, SLOTS)

        @pl.when(block + 1 < blocks)
        def _() -> None:
            _fetch(named, cache, rows, arrived, block + 1)

        # One wait for the bytes of all of a block's copies.
        pltpu.make_async_copy(rows.at[slot], rows.at[slot], arrived.at[slot]).wait()
        own = named_lanes[pl.ds(block, 1), :]
        _attend(own >= 0, rows[slot], (lower[...], upper[...]), total, top, weight, scale)

    sums = weight[...]
    there = sums > 0.0
    inverse = jnp.where(there, 1.0 / jnp.where(there, sums, 1.0), 0.0)
    out[...] = (total[...] * inverse[:, :1]).astype(out.dtype)
    log = jnp.where(there, top[...] + jnp.log(jnp.where(there, sums, 1.0)), -jnp.inf)
    lse[...] = jnp.transpose(log)[:1]


def _fetch(named: Ref, cache: Ref, rows: Ref, arrived: Ref, block: jax.Array | int) -> None:
    """Asks for a block's rows; where none is named for row 0, so that a block has the same bytes always."""
    slot = lax.rem(block, SLOTS)

    @pl.loop(0, KEYS // UNROLL)
    def _(group: jax.Array) -> None:
        for one in range(UNROLL):
            key = group * UNROLL + one
            row = jnp.maximum(named[0, block * KEYS + key], 0)
            pltpu.make_async_copy(
                cache.at[pl.ds(row, 1)], rows.at[slot, pl.ds(key, 1)], arrived.at[slot]
            ).start()


def _attend(
    there: jax.Array,
    words: jax.Array,
    queries: tuple[jax.Array, jax.Array],
    total: Ref,
    top: Ref,
    weight: Ref,
    scale: float,
) -> None:
    """Adds a block's `words` [128, words] to the running softmax; `there` [1, 128]: which are keys."""
    of_rows = jnp.transpose(jnp.broadcast_to(there.astype(jnp.int32), (KEYS, KEYS)))[:, :1]
    words = jnp.where(of_rows > 0, words, 0)  # row 0 may hold anything, NaN included
    keys = [lax.bitcast_convert_type(x, jnp.float32) for x in (words << 16, words & jnp.int32(-65536))]
    keys = [x.astype(jnp.bfloat16) for x in keys]
    across = (((1,), (1,)), ((), ()))
    parts = [
        lax.dot_general(one, key, across, preferred_element_type=jnp.float32)
        for one, key in zip(queries, keys, strict=True)
    ]
    scores = jnp.where(there, (parts[0] + parts[1]) * scale, -jnp.inf)
    old = top[...]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    grown = jnp.exp(old - new)
    weights = jnp.exp(scores - new[:, :1])
    top[...] = new
    weight[...] = weight[...] * grown + jnp.sum(weights, axis=1, keepdims=True)
    half = total.shape[1] // 2
    values = [key[:, :half] for key in keys]
    for start, value in zip((0, half), values, strict=True):
        part = jnp.dot(weights.astype(jnp.bfloat16), value, preferred_element_type=jnp.float32)
        total[:, pl.ds(start, half)] = total[:, pl.ds(start, half)] * grown[:, :1] + part
