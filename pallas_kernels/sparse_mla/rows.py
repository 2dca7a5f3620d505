"""Rows of a cache, gathered by index into swizzled shared memory, on Hopper.

Pallas has no gather there (TMA's is Blackwell's), so a warpgroup sends 16 bytes a thread by cp.async, and
sees to the 128-byte swizzle that wgmma reads. Arrivals are asynchronous: cp.async counts a barrier of its own
down when the rows are there, and the warpgroup that sends never waits for them. Such a barrier lies in plain
shared memory, because inline code takes no barrier of Pallas.

`PLAIN` stands in where the GPU interpreter runs the kernel, which knows no inline code.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another

Keys = tuple[Any, Any, int]  # token, the first of its indices, their number
Part = tuple[Ref, int]  # tiled shared memory [keys, columns], the first of its columns in a row

TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
TILE = 64  # columns of bfloat16 that a swizzled line has
UNIT = 8  # of bfloat16 that a thread sends at once
THREADS = 128
LANES = TILE // UNIT  # threads that send one line
_SPINS = 10_000_000  # of a wait in hardware before it looks again
_SCALAR = plgpu.Layout.WG_SPLAT
_PLAIN, _TILED = plgpu.RefType(), plgpu.RefType(TILES)


@dataclasses.dataclass(frozen=True)
class Async:
    """cp.async, for the chip."""

    def prepare(self, cache: jax.Array, indices: jax.Array) -> jax.Array:
        """The cache [rows, width] as the kernel wants it."""
        return cache

    def barriers(self, count: int) -> Ref:
        """Scratch for `count` barriers."""
        return plgpu.SMEM((2 * count,), jnp.int32)

    def start(self, barriers: Ref) -> None:
        """Makes the barriers. One warpgroup calls it, and tells the others by a barrier of Pallas."""

        @_inline(arg_types=(_PLAIN,))
        def run(_, barriers):
            first = arith.cmpi(arith.CmpIPredicate.eq, _thread(), _int(0))
            base = mgpu.utils.memref_ptr(barriers)
            for i in range(ir.MemRefType(barriers.type).shape[0] // 2):
                place = mgpu.utils.getelementptr(base, [i], _i64())
                nvvm.mbarrier_init(place, _int(THREADS), predicate=first)
            nvvm.fence_mbarrier_init()
            mgpu.utils.warpgroup_barrier()

        run(barriers)

    def wait(self, barriers: Ref, which: jax.Array, turn: jax.Array | int) -> None:
        """Until barrier `which` has completed round `turn` (0, 1, ...); then wgmma may read the rows."""

        @_inline(arg_types=(_PLAIN, _SCALAR))
        def run(_, barrier, parity):
            place = mgpu.utils.memref_ptr(barrier)
            nvvm.mbarrier_try_wait_parity(place, parity.registers.item(), _int(_SPINS))
            _asm("fence.proxy.async.shared::cta;")

        run(barriers.at[pl.ds(2 * which, 2)], lax.rem(jnp.int32(turn), jnp.int32(2)))

    def fetch(self, cache_g: Ref, index_g: Ref, keys: Keys, parts: list[Part], barriers: Ref, which) -> None:
        """Sends columns of the rows that index_g names; zeros where an index is negative.

        Args:
          cache_g: [rows, width] bfloat16.
          index_g: [tokens, J] int32.
          keys: which of the indices.
          parts: tiled shared memory [keys, columns], and the first of its columns in a row.
          barriers: counted down when all is there.
          which: of the barriers.
        """
        first_columns = [first for _, first in parts]

        @_inline(arg_types=(_PLAIN, _PLAIN, _PLAIN, *(_TILED for _ in parts)))
        def run(_, cache, index, barrier, *places):
            width = ir.MemRefType(cache.type).shape[1]
            keys = ir.MemRefType(index.type).shape[0]
            own = arith.divui(_thread(), _int(LANES))
            unit = arith.remui(_thread(), _int(LANES))
            rows = [arith.addi(own, _int(i)) for i in range(0, keys, THREADS // LANES)]
            chosen = [llvm.load(_i32(), _at(_global(index), row, _i32())) for row in rows]
            for row, at in zip(rows, chosen, strict=True):
                there = arith.cmpi(arith.CmpIPredicate.sge, at, _int(0))
                count = arith.select(there, _int(2 * UNIT), _int(0))
                source = _row(cache, at, width, arith.muli(unit, _int(UNIT)))
                low = arith.remui(row, _int(8))
                inner = arith.addi(arith.muli(low, _int(TILE)), arith.muli(arith.xori(unit, low), _int(UNIT)))
                for place, first in zip(places, first_columns, strict=True):
                    tiles = ir.MemRefType(place.type).shape[1]  # [keys / 8, tiles, 8, 64]
                    strides = ir.MemRefType(place.type).get_strides_and_offset()[0]
                    eight = arith.muli(arith.divui(row, _int(8)), _int(strides[0]))
                    line = _at(mgpu.utils.memref_ptr(place), arith.addi(eight, inner), _bf16())
                    for tile in range(tiles):
                        nvvm.cp_async_shared_global(
                            _at(line, tile * strides[1], _bf16()),
                            _at(source, first + tile * TILE, _bf16()),
                            2 * UNIT,
                            nvvm.LoadCacheModifierKind.CG,
                            cp_size=count,
                        )
            nvvm.cp_async_mbarrier_arrive(mgpu.utils.memref_ptr(barrier), noinc=True)

        run(
            cache_g, index_of(index_g, keys), barriers.at[pl.ds(2 * which, 2)], *(place for place, _ in parts)
        )

    def sync(self) -> None:
        """Until all threads of the warpgroup are here."""
        _inline()(lambda _: mgpu.utils.warpgroup_barrier())()

    def hidden_zero(self, value: jax.Array) -> jax.Array:
        """0, which no compiler knows, and which varies with a small `value`."""

        scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

        @_inline(arg_types=(_SCALAR,), return_type=scalar)
        def run(_, value):
            text = "{ .reg .u32 a; mov.u32 a, %dynamic_smem_size; add.u32 a, a, $1; shr.u32 $0, a, 24; }"
            zero = llvm.inline_asm(_i32(), [value.registers.item()], text, "=r,r", has_side_effects=True)
            return mgpu.FragmentedArray.splat(zero, (), is_signed=True)

        return run(jnp.int32(value))

    def shrink(self, acc, by: jax.Array) -> jax.Array:
        """acc [heads, columns] times by [heads], where a warp has a head whose factor is not 1."""
        acc_layout, by_layout = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
        out = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=acc_layout)

        @_inline(arg_types=(acc_layout, by_layout), return_type=out)
        def run(_, acc, by):
            one = arith.constant(ir.F32Type.get(), 1.0)
            differs = [arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in _elements(by)]
            any_here = functools.reduce(arith.ori, differs)
            votes = nvvm.vote_sync(_int(-1), any_here, nvvm.VoteSyncKind.any, results=[_bool()])
            types = [x.type for x in acc.registers.flat]
            branch = scf.IfOp(votes, types, has_else=True)  # pyright: ignore[reportCallIssue]
            assert branch.then_block is not None and branch.else_block is not None
            with ir.InsertionPoint(branch.then_block):
                shrunk = acc * by.broadcast_in_dim(acc.shape, (0,), acc.layout)
                scf.yield_(list(shrunk.registers.flat))
            with ir.InsertionPoint(branch.else_block):
                scf.yield_(list(acc.registers.flat))
            registers = np.array(list(branch.results), dtype=object).reshape(acc.registers.shape)
            return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=acc.is_signed)

        return run(acc, by)

    def prefetch(self, cache_g: Ref, index_g: Ref, keys: Keys) -> None:
        """Asks for those rows in the L2 cache: one instruction a row."""

        @_inline(arg_types=(_PLAIN, _PLAIN))
        def run(_, cache, index):
            width = ir.MemRefType(cache.type).shape[1]
            keys = ir.MemRefType(index.type).shape[0]
            row = _thread()
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, _int(keys))):
                at = llvm.load(_i32(), _at(_global(index), row, _i32()))
                place = _row(cache, at, width, _int(0))
                _asm(f"cp.async.bulk.prefetch.L2.global [$0], {2 * width};", "l", place)

        run(cache_g, index_of(index_g, keys))

    def prefetch_whole(self, array_g: Ref) -> None:
        """Asks for a contiguous piece of device memory in the L2 cache."""

        @_inline(arg_types=(_PLAIN,))
        def run(_, array):
            size = 2 * math.prod(ir.MemRefType(array.type).shape)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, _thread(), _int(0))):
                _asm(f"cp.async.bulk.prefetch.L2.global [$0], {size};", "l", _global(array))

        run(array_g)


@dataclasses.dataclass(frozen=True)
class Plain:
    """What `Async` does, for the interpreter: the rows are gathered beforehand, and a block is one copy."""

    def prepare(self, cache: jax.Array, indices: jax.Array) -> jax.Array:
        rows = cache[jnp.maximum(indices, 0).reshape(-1)]
        return jnp.where((indices >= 0).reshape(-1, 1), rows, jnp.zeros_like(rows))

    def barriers(self, count: int) -> Ref:
        return plgpu.Barrier(num_barriers=count)

    def start(self, barriers: Ref) -> None:
        pass

    def wait(self, barriers: Ref, which: jax.Array, turn: jax.Array | int) -> None:
        plgpu.barrier_wait(barriers.at[which])

    def fetch(self, cache_g: Ref, index_g: Ref, keys: Keys, parts: list[Part], barriers: Ref, which) -> None:
        token, first, count = keys
        own = pl.ds(token * index_g.shape[1] + first, count)
        for place, column in parts:
            place[...] = cache_g[own, pl.ds(column, place.shape[1])]
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.at[which])

    def sync(self) -> None:
        pass

    def hidden_zero(self, value: jax.Array) -> jax.Array:
        return jnp.int32(0)

    def shrink(self, acc, by: jax.Array) -> jax.Array:
        return acc * lax.broadcast_in_dim(by, acc.shape, [0])

    def prefetch(self, cache_g: Ref, index_g: Ref, keys: Keys) -> None:
        pass

    def prefetch_whole(self, array_g: Ref) -> None:
        pass


ASYNC, PLAIN = Async(), Plain()
Rows = Async | Plain


def _inline(**types: Any) -> Callable[[Callable[..., object]], Callable[..., Any]]:
    """plgpu.inline_mgpu, whose own annotations lose the arguments."""
    return plgpu.inline_mgpu(**types)


def index_of(index_g: Ref, keys: Keys) -> Ref:
    token, first, count = keys
    return index_g.at[token, pl.ds(first, count)]


def _thread() -> ir.Value:
    """Of the warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), _int(THREADS))


def _elements(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """A thread's own numbers."""
    found = []
    for register in array.registers.flat:
        if not isinstance(register.type, ir.VectorType):
            found.append(register)
            continue
        size = ir.VectorType(register.type).shape[0]
        found += [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(size)]
    return found


def _bool() -> ir.Type:
    return ir.IntegerType.get_signless(1)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _bf16() -> ir.Type:
    return ir.BF16Type.get()


def _int(value: int) -> ir.Value:
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value))


def _at(base: ir.Value, offset: ir.Value | int, element: ir.Type) -> ir.Value:
    return mgpu.utils.getelementptr(base, [offset], element)


def _global(ref: ir.Value) -> ir.Value:
    """Address in device memory."""
    return llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(ref))


def _row(cache: ir.Value, at: ir.Value, width: int, column: ir.Value) -> ir.Value:
    """Address of a column of row `at`, or of row 0 where that is negative; rows may lie beyond 4 GiB."""
    row = arith.extui(_i64(), arith.maxsi(at, _int(0)))
    wide = arith.constant(_i64(), ir.IntegerAttr.get(_i64(), width))
    offset = arith.addi(arith.muli(row, wide), arith.extui(_i64(), column))
    return _at(_global(cache), offset, _bf16())


def _asm(text: str, constraints: str = "", *operands: ir.Value) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(operands), text, constraints, has_side_effects=True)
