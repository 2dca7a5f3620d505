"""The block program of sparse latent attention: 64 heads of a token over a share of its keys.

A third warpgroup gathers blocks of 64 cache rows into two slots. Two warpgroups take turns: warpgroup w does
scores and softmax of the blocks w, w + 2, ..., and owns columns [256 w, 256 w + 256) of the output for all
blocks. Weights go to the other warpgroup through shared memory, over the block's rope columns, which nobody
needs any more; with them go the running maximum and the factor by which it shrinks what came before. While
one warpgroup is at its softmax, the matrix unit works for the other, and for its own product of the block
before.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla.rows import PLAIN, Keys, Rows, index_of

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another

HEADS = 64  # of a block: the rows of wgmma
KEYS = 64  # of a block
HALF = 256  # columns of the output that a warpgroup owns: the most that wgmma takes
VALUE = 2 * HALF
ROPE = 64
WIDTH = VALUE + ROPE
SLOTS = 2
AHEAD = 2  # blocks that the L2 cache is asked for before they are gathered
LAG = 8.0  # by how many powers of two a running maximum may lag behind
LOWEST = -1e30  # the running maximum before any key
LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
GATHER = 2  # the warpgroup that gathers

_WGMMA = plgpu.Layout.WGMMA
_PER_HEAD = plgpu.Layout.WGMMA.reduce(1)
_PER_KEY = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is static. `blocks`: of a share; `scale`: of scores; `stride`: from this token to the one that is
    likely to come next on this multiprocessor, 0: none."""

    blocks: int
    scale: float
    rows: Rows
    stride: int


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory and barriers of a block."""

    queries: Ref  # [2, HEADS, HALF]; at the end the results
    queries_rope: Ref  # [HEADS, ROPE]
    latent: Ref  # [SLOTS, 2, KEYS, HALF]
    rope: Ref  # [SLOTS, KEYS, ROPE]; after the scores the weights [HEADS, KEYS]
    top: Ref  # [SLOTS, HEADS]
    total: Ref  # [3, HEADS]: of each warpgroup; log-sum-exp
    arrived: Ref  # by slot and half
    ready: Ref
    queries_full: Ref
    weights_full: Ref  # by slot
    free: tuple[Ref, Ref]  # by half, then slot
    totals_full: Ref  # by warpgroup


def run(
    program: Program, q_g, cache_g, index_g, out_g, lse_g, *, free_left, free_right, **scratch: Ref
) -> None:
    """The names with _g are in device memory: q [T, N, 576], cache [rows, 576], index [T, J], out
    [T, X, N, 512], lse [T, X, N], of X shares."""
    shared = Shared(free=(free_left, free_right), **scratch)
    token, share, group = (lax.axis_index(name) for name in ("token", "share", "heads"))
    warpgroup = lax.axis_index("warpgroup")
    heads = min(HEADS, q_g.shape[1])
    own = pl.ds(group * HEADS, heads)
    first = share * (program.blocks * KEYS)

    def keys_of(block) -> Keys:
        return token, first + block * KEYS, KEYS

    @pl.when(warpgroup == GATHER)
    def _():
        plgpu.set_max_registers(72, action="decrease")
        _gather(program, shared, q_g.at[token, own], cache_g, index_g, keys_of)
        if program.stride:
            later = token + program.stride
            pl.when(later < q_g.shape[0])(
                lambda: _prepare(program, q_g.at[later, own], cache_g, index_g, later, first)
            )
        _drain(program, shared)

    for one in range(2):

        @pl.when(warpgroup == one)
        def _(one=one):
            plgpu.set_max_registers(216, action="increase")
            _attend(
                program,
                shared,
                one,
                lambda block: index_of(index_g, keys_of(block)),
                heads,
                out_g.at[token, share, own],
                lse_g.at[token, share, own],
            )


def _gather(program: Program, shared: Shared, q_g, cache_g, index_g, keys_of) -> None:
    """Queries, and all blocks of keys."""
    rows, heads = program.rows, q_g.shape[0]
    rows.start(shared.arrived)
    plgpu.barrier_arrive(shared.ready)
    for half in range(2):
        place = shared.queries.at[half, pl.ds(0, heads)]
        plgpu.copy_gmem_to_smem(q_g.at[:, pl.ds(half * HALF, HALF)], place, shared.queries_full)
    place = shared.queries_rope.at[pl.ds(0, heads)]
    plgpu.copy_gmem_to_smem(q_g.at[:, pl.ds(VALUE, ROPE)], place, shared.queries_full)
    for block in range(SLOTS, min(SLOTS + AHEAD, program.blocks)):
        rows.prefetch(cache_g, index_g, keys_of(block))

    def fetch(block, carry):
        slot = lax.rem(block, SLOTS)
        latent, rope = shared.latent.at[slot], shared.rope.at[slot]
        again = block >= SLOTS
        pl.when(again)(lambda: plgpu.barrier_wait(shared.free[0].at[slot]))
        rows.fetch(cache_g, index_g, keys_of(block), [(latent.at[0], 0)], shared.arrived, 2 * slot)
        pl.when(again)(lambda: plgpu.barrier_wait(shared.free[1].at[slot]))
        right = [(latent.at[1], HALF), (rope, VALUE)]
        rows.fetch(cache_g, index_g, keys_of(block), right, shared.arrived, 2 * slot + 1)
        later = block + SLOTS + AHEAD
        pl.when(later < program.blocks)(lambda: rows.prefetch(cache_g, index_g, keys_of(later)))
        return carry

    lax.fori_loop(0, program.blocks, fetch, None)


def _prepare(program: Program, q_g, cache_g, index_g, token, first) -> None:
    """Asks the L2 cache for what another block of threads will begin with."""
    for block in range(min(SLOTS, program.blocks)):
        program.rows.prefetch(cache_g, index_g, (token, first + block * KEYS, KEYS))
    program.rows.prefetch_whole(q_g)


def _drain(program: Program, shared: Shared) -> None:
    for slot in range(min(SLOTS, program.blocks)):  # nobody leaves before all have read
        for half in range(2):
            plgpu.barrier_wait(shared.free[half].at[slot])


def _attend(program: Program, shared: Shared, me: int, chosen_of, heads: int, out_g, lse_g) -> None:
    """Warpgroup `me`: its half of the output, and every other block's softmax."""
    blocks = program.blocks
    plgpu.barrier_wait(shared.ready)
    plgpu.barrier_wait(shared.queries_full)
    per_head = functools.partial(_full, shape=(HEADS,), layout=_PER_HEAD)
    state = (_full(0.0, (HEADS, HALF), _WGMMA), per_head(LOWEST), per_head(0.0))
    if me == 0:
        state = _own_block(program, shared, me, chosen_of, 0, state, with_last=False)

    def turn(i, state):
        block = 2 * i + (2 - me)
        return _own_block(program, shared, me, chosen_of, block, state, with_last=True)

    acc, top, total = lax.fori_loop(0, (blocks - 1 + me) // 2, turn, state)
    if (last := (blocks - 1) % SLOTS) != me:  # the last block was the other's
        top, shrink = _top_of_last(shared, last, top)
        acc = _product(program, shared, me, last, program.rows.shrink(acc, shrink))
        total = total * shrink
    _finish(shared, me, heads, acc, top, total, out_g, lse_g)


def _own_block(program: Program, shared: Shared, me: int, chosen_of, block, state, *, with_last: bool):
    """Scores and softmax of block `block` (slot `me`), products of the block before and of this one.

    Slots are values of the loop: were they constants, the compiler would keep the matrix descriptors of all
    tiles in registers, and there are none left.
    """
    rows, zero = program.rows, program.rows.hidden_zero(block)
    mine, other = zero + me, zero + (1 - me)
    acc, top, total = state
    chosen = plgpu.load(chosen_of(block), layout=_PER_KEY, optimized=False)
    turn = block // SLOTS if isinstance(block, int) else lax.div(block, SLOTS)

    def left(scores_ref) -> None:
        rows.wait(shared.arrived, 2 * mine, turn)
        plgpu.wgmma(scores_ref, shared.queries.at[zero], shared.latent.at[mine, 0].T)

    def right(scores_ref) -> None:
        rows.wait(shared.arrived, 2 * mine + 1, turn)
        plgpu.wgmma(scores_ref, shared.queries.at[zero + 1], shared.latent.at[mine, 1].T)
        plgpu.wgmma(scores_ref, shared.queries_rope, shared.rope.at[mine].T)

    def both(scores_ref) -> None:
        left(scores_ref)
        right(scores_ref)

    if not with_last:
        raw = _scoped(both, (HEADS, KEYS))
    elif program.rows is PLAIN:
        top, last = _top_of_last(shared, other, top)
        total = total * last
        acc = _product(program, shared, me, other, program.rows.shrink(acc, last))
        raw = _scoped(both, (HEADS, KEYS))
    else:
        acc, top, total, raw = _after_last(program, shared, me, other, (acc, top, total), left, right)
    raw = jnp.where(_along_heads(chosen) >= 0, raw * (program.scale * LOG2_E), -jnp.inf)
    new_top = raw.max(axis=1)
    # The maximum may lag: weights up to 2 ** LAG lose nothing, and what came before is rarely rescaled.
    new_top = jnp.where(new_top > top + LAG, new_top, top)
    weights = jnp.exp2(raw - _along(new_top, KEYS))
    rows.sync()  # all four warps have read the rope columns, over which the weights go
    shared.rope[mine], shared.top[mine] = weights.astype(jnp.bfloat16), new_top
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.weights_full.at[mine])
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + weights.sum(axis=1)
    return _product(program, shared, me, mine, program.rows.shrink(acc, shrink)), new_top, total


def _after_last(program: Program, shared: Shared, me: int, other, state, left, right):
    """The product of the block before and the scores of this one, one behind the other on the matrix unit."""
    acc, top, total = state

    def run(refs) -> None:
        acc_ref, top_ref, total_ref, raw_ref = refs

        def product() -> None:
            top_ref[...], last = _top_of_last(shared, other, top_ref[...])
            total_ref[...] = total_ref[...] * last
            acc_ref[...] = program.rows.shrink(plgpu.wgmma_accumulator_load(acc_ref, wait_n=None), last)
            plgpu.wgmma(acc_ref, shared.rope.at[other], shared.latent.at[other, me])

        def with_scores(scores_ref) -> None:
            product()
            left(scores_ref)
            plgpu.wgmma_wait(1)  # all but `left`
            plgpu.barrier_arrive(shared.free[me].at[other])
            right(scores_ref)
            raw_ref[...] = plgpu.wgmma_accumulator_load(scores_ref, wait_n=0)

        pl.run_scoped(with_scores, plgpu.WGMMAAccumulatorRef((HEADS, KEYS), jnp.float32))

    unset = _full(0.0, (HEADS, KEYS), _WGMMA)
    return pl.run_state(run)((plgpu.WGMMAAccumulatorRef.init(acc), top, total, unset))


def _top_of_last(shared: Shared, slot, top) -> tuple[jax.Array, jax.Array]:
    """The running maximum after the other warpgroup's block, and by what it shrinks all before it."""
    plgpu.barrier_wait(shared.weights_full.at[slot])
    new_top = plgpu.load(shared.top.at[slot], layout=_PER_HEAD, optimized=False)
    return new_top, jnp.exp2(top - new_top)


def _product(program: Program, shared: Shared, me: int, slot, acc):
    """Adds a block's weights times its values, and gives the slot's half back."""

    def multiply(acc_ref) -> None:
        plgpu.wgmma(acc_ref, shared.rope.at[slot], shared.latent.at[slot, me])

    def run(acc_ref) -> None:
        multiply(acc_ref)
        plgpu.wgmma_wait(0)

    if program.rows is PLAIN:  # the interpreter continues no accumulator
        acc = acc + _scoped(multiply, (HEADS, HALF))
    else:
        acc = pl.run_state(run)(plgpu.WGMMAAccumulatorRef.init(acc))
    plgpu.barrier_arrive(shared.free[me].at[slot])
    return acc


def _finish(shared: Shared, me: int, heads: int, acc, top, total, out_g, lse_g) -> None:
    """Divides by the sum of both warpgroups' weights and writes results."""
    shared.total[me] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.totals_full.at[me])
    plgpu.barrier_wait(shared.totals_full.at[1 - me])
    total = total + plgpu.load(shared.total.at[1 - me], layout=_PER_HEAD, optimized=False)
    acc = acc / _along(jnp.where(total == 0.0, 1.0, total), HALF)
    shared.queries[me] = acc.astype(jnp.bfloat16)
    if me == 0:
        shared.total[2] = jnp.where(total == 0.0, -jnp.inf, top * LN_2 + jnp.log(total))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.queries.at[me, pl.ds(0, heads)], out_g.at[:, pl.ds(me * HALF, HALF)])
    if me == 0:
        plgpu.copy_smem_to_gmem(shared.total.at[2, pl.ds(0, heads)], lse_g)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scoped(run, shape: tuple[int, int]) -> jax.Array:
    def whole(ref):
        run(ref)
        return ref[...]

    return pl.run_scoped(whole, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _full(value: float, shape: tuple[int, ...], layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _along(per_head: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(per_head, (*per_head.shape, columns), [0])


def _along_heads(per_key: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(per_key, (HEADS, *per_key.shape), [1])
