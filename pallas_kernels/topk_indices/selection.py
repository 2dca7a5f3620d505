"""Radix selection of a row's best scores, as one program for all threads of the blocks that share the row.

Scores become 32-bit keys of the same order. Three histograms, of bits 31-21, 20-10 and 9-0, each over the
keys that agree with what is known, find the k-th best key. A last pass marks the keys above it and the first
of those equal to it; marks are counted in order of position, so results come out ascending, the same each
time.

The program is written against `Code`, as in thread_code.py: a word is one unsigned 32-bit value of every
thread.
"""

import dataclasses
from typing import Any, Protocol

LANES = 32
CHUNK = 128  # positions a warp reads at once, four a lane
BINS = 2048
SHIFTS = (21, 10, 0)
LOWEST = 0x007FFFFF  # the key of -inf; keys up to it are not there
MARKS = 8  # words of marks a chunk: four of keys above, four of keys equal
RESULTS = 4  # words for the result of a histogram

Word = Any  # a value of every thread: unsigned, or a truth value


class Code(Protocol):
    """What threads can do.

    Arrays are the block's own, of words; counts of `repeat` are the same in all threads.
    """

    thread: Word
    rank: Word  # of the block among those that share the row

    def select(self, condition: Word, yes: Word | int, no: Word | int) -> Word: ...
    def popcount(self, word: Word) -> Word: ...
    def ballot(self, condition: Word) -> Word: ...
    def from_lane(self, word: Word, lane: Word | int) -> Word: ...
    def read(self, array: str, index: Word | int) -> Word: ...
    def write(self, array: str, index: Word | int, value: Word | int, when: Word) -> None: ...
    def increment(self, array: str, index: Word, when: Word) -> None: ...
    def of_block(self, array: str, index: Word | int, rank: int) -> Word: ...
    def scores(self, index: Word) -> tuple[Word, ...]: ...
    def length(self) -> Word: ...
    def emit(self, index: Word, value: Word | int, when: Word) -> None: ...
    def meet(self) -> None: ...
    def meet_all(self) -> None: ...
    def repeat(self, count: Word | int, body: Any, carry: tuple[Word, ...]) -> tuple[Word, ...]: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes.

    `blocks` of `threads` share a row of `length`; neighbouring lanes count in `copies` of a histogram;
    `ahead` chunks are read at once.
    """

    length: int
    k: int
    blocks: int
    threads: int
    copies: int
    ahead: int

    @property
    def warps(self) -> int:
        return self.threads // LANES

    @property
    def most_chunks(self) -> int:
        """Of a warp."""
        return -(-self.length // (CHUNK * self.blocks * self.warps))

    def arrays(self) -> dict[str, int]:
        """Words of a block's arrays."""
        return {
            "histogram": BINS * self.copies,
            "merged": len(SHIFTS) * BINS,
            "sums": (len(SHIFTS) + 2) * LANES,
            "found": len(SHIFTS) * RESULTS,
            "marks": self.warps * self.most_chunks * MARKS,
        }


@dataclasses.dataclass(frozen=True)
class _Warp:
    """A warp's own chunks of a row: `each` from chunk `first`, up to the row's `length`."""

    lane: Word
    index: Word
    first: Word
    each: Word
    length: Word


def select(code: Code, plan: Plan) -> None:
    """Emits the ascending positions of the row's k best scores, then -1."""
    lane, warp = code.thread & (LANES - 1), code.thread >> 5
    length = code.length()
    warps = plan.blocks * plan.warps
    each = ((length + (CHUNK - 1)) // CHUNK + (warps - 1)) // warps
    own = _Warp(lane, warp, (code.rank * plan.warps + warp) * each, each, length)
    always = code.thread == code.thread
    for i in range(0, plan.arrays()["histogram"], plan.threads):
        code.write("histogram", code.thread + i, 0, always)
    code.write("found", code.thread, 0, code.thread < len(SHIFTS) * RESULTS)
    code.meet()

    known, need = code.thread & 0, (code.thread & 0) + plan.k
    enough = always
    for step, shift in enumerate(SHIFTS):
        _count(code, plan, own, step, known)
        code.meet()
        total = _find(code, plan, own, step, need)
        code.meet()
        known = (known << (SHIFTS[step - 1] - shift if step else 0)) | code.read("found", step * RESULTS)
        need = code.read("found", step * RESULTS + 1)
        if step == 0:
            enough = total > plan.k
    threshold, ties = code.select(enough, known, LOWEST), code.select(enough, need, 0)
    _emit(code, plan, own, threshold, ties)


def _keys(code: Code, plan: Plan, own: _Warp, visit: Any, carry: tuple[Word, ...]) -> tuple[Word, ...]:
    """visit(chunk of the warp, keys of the lane's four positions, whether it is there, carry) for all."""

    def step(i: Word, carry: tuple[Word, ...]) -> tuple[Word, ...]:
        chunks = [i * plan.ahead + j for j in range(plan.ahead)]
        places = [(own.first + chunk) * CHUNK + own.lane * 4 for chunk in chunks]
        inside = [(chunk < own.each) & (at < own.length) for chunk, at in zip(chunks, places, strict=True)]
        loaded = [
            code.scores(code.select(here, at, 0)) for here, at in zip(inside, places, strict=True)
        ]  # all asked for before the first is used
        for chunk, at, words in zip(chunks, places, loaded, strict=True):
            mine = chunk < own.each
            keys = [
                code.select(mine & (at + j < own.length), _key(code, word), 0) for j, word in enumerate(words)
            ]
            carry = visit(chunk, keys, mine, carry)
        return carry

    return code.repeat((own.each + (plan.ahead - 1)) // plan.ahead, step, carry)


def _key(code: Code, bits: Word) -> Word:
    """A float's bits -> a word of the same order, the same for both zeros."""
    flip = code.select(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000)
    return code.select(bits == 0x80000000, 0x80000000, bits ^ flip)


def _count(code: Code, plan: Plan, own: _Warp, step: int, known: Word) -> None:
    """The histogram of a step's bits, over keys whose higher bits are `known`."""
    shift = SHIFTS[step]
    width = SHIFTS[step - 1] - shift if step else 32 - shift
    copy = own.lane & (plan.copies - 1)

    def visit(_: Word, keys: list[Word], mine: Word, carry: tuple[Word, ...]) -> tuple[Word, ...]:
        del mine
        for key in keys:
            bits = key >> shift
            counts = (bits >> width) == known if step else key > LOWEST
            code.increment("histogram", (bits & ((1 << width) - 1)) * plan.copies + copy, counts)
        return carry

    _keys(code, plan, own, visit, ())


def _find(code: Code, plan: Plan, own: _Warp, step: int, need: Word) -> Word:
    """Finds the bin of the `need`-th best key, and how many of its keys are needed; clears the histogram.

    Returns:
      The number of all keys that were counted.
    """
    always, per_thread = code.thread == code.thread, BINS // plan.threads
    bins = [(BINS - 1 - i) - code.thread * per_thread for i in range(per_thread)]
    counts = []
    for place in bins:
        copies = [code.read("histogram", place * plan.copies + i) for i in range(plan.copies)]
        counts.append(_sum(copies))
        for i in range(plan.copies):
            code.write("histogram", place * plan.copies + i, 0, always)
    if plan.blocks > 1:
        for place, count in zip(bins, counts, strict=True):
            code.write("merged", place + step * BINS, count, always)
        code.meet_all()
        counts = [
            _sum([code.of_block("merged", place + step * BINS, rank) for rank in range(plan.blocks)])
            for place in bins
        ]
    before, total = _prefix(code, plan, own, step, _sum(counts))
    for place, count in zip(bins, counts, strict=True):
        here = (before < need) & (before + count >= need)
        code.write("found", step * RESULTS, place, here)
        code.write("found", step * RESULTS + 1, need - before, here)
        before = before + count
    return total


def _emit(code: Code, plan: Plan, own: _Warp, threshold: Word, ties: Word) -> None:
    """Emits positions of keys above the threshold, and of the first `ties` equal to it."""
    marks, zero = own.index * (plan.most_chunks * MARKS), code.thread & 0

    def mark(chunk: Word, keys: list[Word], mine: Word, carry: tuple[Word, ...]) -> tuple[Word, ...]:
        above = [code.ballot(key > threshold) for key in keys]
        equal = [code.ballot((key == threshold) & (key > LOWEST)) for key in keys]
        for i, word in enumerate((*above, *equal)):
            code.write("marks", marks + chunk * MARKS + i, word, mine & (own.lane == 0))
        return (
            carry[0] + _sum([code.popcount(word) for word in above]),
            carry[1] + _sum([code.popcount(word) for word in equal]),
        )

    counts = _keys(code, plan, own, mark, (zero, zero))
    sure, sure_total = _before_warp(code, plan, own, 0, counts[0])
    equal, equal_total = _before_warp(code, plan, own, 1, counts[1])
    below = (zero + 1 << own.lane) - 1

    def chunk_out(chunk: Word, carry: tuple[Word, ...]) -> tuple[Word, ...]:
        words = [code.read("marks", marks + chunk * MARKS + i) for i in range(MARKS)]
        at = (own.first + chunk) * CHUNK + own.lane * 4
        sure = carry[0] + _sum([code.popcount(word & below) for word in words[:4]])
        equal = carry[1] + _sum([code.popcount(word & below) for word in words[4:]])
        for j in range(4):
            is_sure, is_equal = (words[j] >> own.lane) & 1, (words[4 + j] >> own.lane) & 1
            taken = code.select(equal < ties, equal, ties)
            chosen = (is_sure == 1) | ((is_equal == 1) & (equal < ties))
            code.emit(sure + taken, at + j, chosen)
            sure, equal = sure + is_sure, equal + is_equal
        return (
            carry[0] + _sum([code.popcount(word) for word in words[:4]]),
            carry[1] + _sum([code.popcount(word) for word in words[4:]]),
        )

    code.repeat(own.each, chunk_out, (sure, equal))
    total = sure_total + code.select(equal_total < ties, equal_total, ties)
    first = code.rank * plan.threads + code.thread
    for i in range(0, plan.k, plan.threads * plan.blocks):
        at = first + i
        code.emit(at, 0xFFFFFFFF, (at >= total) & (at < plan.k))
    if plan.blocks > 1:
        code.meet_all()  # until then others may read this block's arrays


def _before_warp(code: Code, plan: Plan, own: _Warp, which: int, count: Word) -> tuple[Word, Word]:
    """A number of each warp -> (sum over all warps before, in all blocks; sum over all)."""
    base = (len(SHIFTS) + which) * LANES
    code.write("sums", base + own.index, count, own.lane == 0)
    if plan.blocks > 1:
        code.meet_all()
    else:
        code.meet()
    before, total = code.thread & 0, code.thread & 0
    inside = own.lane < plan.warps
    for rank in range(plan.blocks):
        index = base + code.select(inside, own.lane, 0)
        sums = code.of_block("sums", index, rank) if plan.blocks > 1 else code.read("sums", index)
        running = _scan(code, own, code.select(inside, sums, 0))
        all_of_it = code.from_lane(running, LANES - 1)
        ahead = code.select(
            own.index > 0, code.from_lane(running, code.select(own.index > 0, own.index - 1, 0)), 0
        )
        before = before + code.select(code.rank > rank, all_of_it, code.select(code.rank == rank, ahead, 0))
        total = total + all_of_it
    return before, total


def _prefix(code: Code, plan: Plan, own: _Warp, which: int, count: Word) -> tuple[Word, Word]:
    """A number of each thread -> (sum over the block's threads before, sum over all)."""
    base = which * LANES
    running = _scan(code, own, count)
    code.write("sums", base + own.index, running, own.lane == LANES - 1)
    code.meet()
    inside = own.lane < plan.warps
    sums = code.select(inside, code.read("sums", base + code.select(inside, own.lane, 0)), 0)
    sums = _scan(code, own, sums)
    ahead = code.from_lane(sums, code.select(own.index > 0, own.index - 1, 0))
    before = running - count + code.select(own.index > 0, ahead, 0)
    return before, code.from_lane(sums, LANES - 1)


def _scan(code: Code, own: _Warp, word: Word) -> Word:
    """Inclusive sums over a warp."""
    for distance in (1, 2, 4, 8, 16):
        has = own.lane >= distance
        other = code.from_lane(word, code.select(has, own.lane - distance, 0))
        word = word + code.select(has, other, 0)
    return word


def _sum(words: list[Word]) -> Word:
    total = words[0]
    for word in words[1:]:
        total = total + word
    return total
