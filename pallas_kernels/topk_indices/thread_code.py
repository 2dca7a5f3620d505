"""`selection.Code` as instructions of a Mosaic GPU kernel, every thread on its own.

This is MLIR and PTX: Pallas has no histograms in shared memory, no ballots, and reads no other block's own.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm

_EVERYONE = 0xFFFFFFFF
Operand = Any


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> ir.Value:
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), signed))


class Word:
    """An unsigned 32-bit value of each thread, or a truth value."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    def __add__(self, other: Operand) -> "Word":
        return Word(arith.addi(self.value, _value(other)))

    __radd__ = __add__

    def __sub__(self, other: Operand) -> "Word":
        return Word(arith.subi(self.value, _value(other)))

    def __rsub__(self, other: Operand) -> "Word":
        return Word(arith.subi(_value(other), self.value))

    def __mul__(self, other: Operand) -> "Word":
        return Word(arith.muli(self.value, _value(other)))

    def __floordiv__(self, other: Operand) -> "Word":
        return Word(arith.divui(self.value, _value(other)))

    def __and__(self, other: Operand) -> "Word":
        return Word(arith.andi(self.value, _value(other)))

    def __or__(self, other: Operand) -> "Word":
        return Word(arith.ori(self.value, _value(other)))

    def __xor__(self, other: Operand) -> "Word":
        return Word(arith.xori(self.value, _value(other)))

    def __lshift__(self, other: Operand) -> "Word":
        return Word(arith.shli(self.value, _value(other)))

    def __rshift__(self, other: Operand) -> "Word":
        return Word(arith.shrui(self.value, _value(other)))

    def __eq__(self, other: Operand) -> "Word":  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._compare(arith.CmpIPredicate.eq, other)

    def __lt__(self, other: Operand) -> "Word":
        return self._compare(arith.CmpIPredicate.ult, other)

    def __gt__(self, other: Operand) -> "Word":
        return self._compare(arith.CmpIPredicate.ugt, other)

    def __ge__(self, other: Operand) -> "Word":
        return self._compare(arith.CmpIPredicate.uge, other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _compare(self, how: Any, other: Operand) -> "Word":
        return Word(arith.cmpi(how, self.value, _value(other)))


def _value(word: Operand) -> ir.Value:
    return _constant(word) if isinstance(word, int) else word.value


class Code:
    """See selection.Code. References are those of an inlined Mosaic GPU function."""

    def __init__(
        self, scores: ir.Value, length: ir.Value, out: ir.Value, arrays: dict[str, ir.Value], blocks: int
    ) -> None:
        self._scores, self._length, self._out = (_global(ref) for ref in (scores, length, out))
        self._arrays = {
            name: llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(ref)) for name, ref in arrays.items()
        }
        self.thread = Word(mgpu.utils.thread_idx())
        self.rank = Word(_constant(0))
        if blocks > 1:
            self.rank = Word(self._ptx("mov.u32 $0, %cluster_ctarank;"))

    def _ptx(self, code: str, *operands: ir.Value, effects: bool = False) -> ir.Value:
        return mgpu.utils.inline_ptx(code, *operands, result_types=_i32(), has_side_effects=effects)

    def _at(self, array: str, index: Operand) -> ir.Value:
        return arith.addi(self._arrays[array], arith.muli(_value(index), _constant(4)))

    def select(self, condition: Word, yes: Operand, no: Operand) -> Word:
        return Word(arith.select(condition.value, _value(yes), _value(no)))

    def key(self, bits: Word) -> Word:
        """A float's bits -> a word of the same order, the same for both zeros."""
        number = arith.bitcast(ir.F32Type.get(), bits.value)
        zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
        bits_value = arith.bitcast(_i32(), arith.addf(number, zero))  # -0.0 + 0.0 = 0.0
        flip = arith.ori(arith.shrsi(bits_value, _constant(31)), _constant(1 << 31))
        return Word(arith.xori(bits_value, flip))

    def popcount(self, word: Word) -> Word:
        return Word(math.ctpop(word.value))

    def ballot(self, condition: Word) -> Word:
        return Word(nvvm.vote_sync(_constant(_EVERYONE), condition.value, nvvm.VoteSyncKind.ballot))

    def from_lane(self, word: Word, lane: Operand) -> Word:
        everyone, last = _constant(_EVERYONE), _constant(31)
        return Word(nvvm.shfl_sync(everyone, word.value, _value(lane), last, nvvm.ShflKind.idx))

    def read(self, array: str, index: Operand) -> Word:
        return Word(self._ptx("ld.shared.u32 $0, [$1];", self._at(array, index), effects=True))

    def write(self, array: str, index: Operand, value: Operand, when: Word) -> None:
        at = self._at(array, index)
        mgpu.utils.inline_ptx("st.shared.u32 [$0], $1;", at, _value(value), predicate=when.value)

    def increment(self, array: str, index: Word, when: Word) -> None:
        mgpu.utils.inline_ptx("red.shared.add.u32 [$0], 1;", self._at(array, index), predicate=when.value)

    def write_four(self, array: str, index: Word, values: list[Word], when: Word) -> None:
        code = "st.shared.v4.u32 [$0], {$1, $2, $3, $4};"
        words = [word.value for word in values]
        mgpu.utils.inline_ptx(code, self._at(array, index), *words, predicate=when.value)

    def of_block(self, array: str, index: Operand, rank: Operand) -> Word:
        code = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.u32 $0, [a]; }"
        return Word(self._ptx(code, self._at(array, index), _value(rank), effects=True))

    def scores(self, index: Word) -> tuple[Word, ...]:
        at = mgpu.utils.getelementptr(self._scores, [index.value], _i32())
        four = llvm.load(ir.VectorType.get((4,), _i32()), at, alignment=16)
        return tuple(Word(llvm.extractelement(four, _constant(i))) for i in range(4))

    def length(self) -> Word:
        return Word(llvm.load(_i32(), self._length))

    def emit(self, index: Word, value: Operand, when: Word) -> None:
        at = mgpu.utils.getelementptr(self._out, [index.value], _i32())
        mgpu.utils.inline_ptx("st.global.u32 [$0], $1;", at, _value(value), predicate=when.value)

    def meet(self) -> None:
        mgpu.utils.inline_ptx("bar.sync 0;", convergent=True, has_side_effects=True)

    def meet_all(self) -> None:
        code = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        mgpu.utils.inline_ptx(code, convergent=True, has_side_effects=True)

    def repeat(
        self,
        count: Operand,
        body: Callable[[Word, tuple[Word, ...]], tuple[Word, ...]],
        carry: tuple[Word, ...],
    ) -> tuple[Word, ...]:
        @mgpu.utils.fori(_value(count), [word.value for word in carry])
        def loop(i: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
            return [word.value for word in body(Word(i), tuple(map(Word, values)))]

        return tuple(map(Word, loop.results))


def _global(ref: ir.Value) -> ir.Value:
    return llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(ref))
