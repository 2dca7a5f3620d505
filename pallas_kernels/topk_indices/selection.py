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
MOST_HELD = 8  # chunks whose keys a warp keeps in registers
RESULTS = 4  # words for the result of a histogram

Word = Any  # a value of every thread: unsigned, or a truth value


class Code(Protocol):
    """What threads can do.

    Arrays are the block's own, of words; counts of `repeat` are the same in all threads.
    """

    thread: Word
    rank: Word  # of the block among those that share the row

    def select(self, condition: Word, yes: Word | int, no: Word | int) -> Word: ...
    def key(self, bits: Word) -> Word: ...
    def popcount(self, word: Word) -> Word: ...
    def ballot(self, condition: Word) -> Word: ...
    def from_lane(self, word: Word, lane: Word | int) -> Word: ...
    def read(self, array: str, index: Word | int) -> Word: ...
    def write(self, array: str, index: Word | int, value: Word | int, when: Word) -> None: ...
    def write_four(self, array: str, index: Word, values: list[Word], when: Word) -> None: ...
    def increment(self, array: str, index: Word, when: Word) -> None: ...
    def of_block(self, array: str, index: Word | int, rank: Word | int) -> Word: ...
    def scores(self, index: Word) -> tuple[Word, ...]: ...
    def length(self) -> Word: ...
    def emit(self, index: Word, value: Word | int, when: Word) -> None: ...
    def meet(self) -> None: ...
    def meet_all(self) -> None: ...
    def repeat(self, count: Word | int, body: Any, carry: tuple[Word, ...]) -> tuple[Word, ...]: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes.

    `blocks` of `threads` share a row of `length`. `ahead` chunks are read at once, where a warp has more than
    it can hold.
    """

    length: int
    k: int
    blocks: int
    threads: int
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
            "histogram": BINS,
            "merged": len(SHIFTS) * BINS if self.blocks > 1 else 1,
            "sums": (len(SHIFTS) + 2) * LANES,
            "totals": 2,
            "found": len(SHIFTS) * RESULTS,
            "marks": self.warps * self.most_chunks * MARKS,
        }


@dataclasses.dataclass(frozen=True)
class _Warp:
    """A warp's own chunks of a row: `each` from chunk `first`, up to the row's `length`.

    `held`: their numbers and keys, where it holds them all.
    """

    lane: Word
    index: Word
    first: Word
    each: Word
    length: Word
    held: list[tuple[int, list[Word]]] = dataclasses.field(default_factory=list)


def select(code: Code, plan: Plan) -> None:
    """Emits the ascending positions of the row's k best scores, then -1."""
    lane, warp = code.thread & (LANES - 1), code.thread >> 5
    length = code.length()
    length = code.select(length >= 1 << 31, 0, code.select(length > plan.length, plan.length, length))
    warps = plan.blocks * plan.warps
    each = ((length + (CHUNK - 1)) // CHUNK + (warps - 1)) // warps
    own = _Warp(lane, warp, (code.rank * plan.warps + warp) * each, each, length)
    if plan.most_chunks <= MOST_HELD:
        own.held.extend(_load(code, plan, own, list(range(plan.most_chunks))))
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
    """carry = visit(chunk of the warp, keys of the lane's four positions, carry) for all chunks."""
    for chunk, keys in own.held:
        carry = visit(chunk, keys, carry)
    if own.held:
        return carry

    def step(i: Word, carry: tuple[Word, ...]) -> tuple[Word, ...]:
        for chunk, keys in _load(code, plan, own, [i * plan.ahead + j for j in range(plan.ahead)]):
            carry = visit(chunk, keys, carry)
        return carry

    return code.repeat((own.each + (plan.ahead - 1)) // plan.ahead, step, carry)


def _load(code: Code, plan: Plan, own: _Warp, chunks: list) -> list[tuple[Any, list[Word]]]:
    """Chunks of the warp with the keys of the lane's four positions, 0 behind the row's end."""
    # A chunk behind the warp's last is another warp's: there all positions are behind the end.
    places = [(own.first + chunk) * CHUNK + own.lane * 4 for chunk in chunks]
    ends = [code.select(own.each > chunk, own.length, 0) for chunk in chunks]
    # All are asked for before the first is used.
    loaded = [code.scores(code.select(at < end, at, 0)) for at, end in zip(places, ends, strict=True)]
    result = []
    for chunk, at, end, words in zip(chunks, places, ends, loaded, strict=True):
        left = code.select(end > at, end - at, 0)
        result.append((chunk, [code.select(left > j, code.key(word), 0) for j, word in enumerate(words)]))
    return result


def _count(code: Code, plan: Plan, own: _Warp, step: int, known: Word) -> None:
    """The histogram of a step's bits, over keys whose higher bits are `known`."""
    shift = SHIFTS[step]
    width = SHIFTS[step - 1] if step else 32
    lowest = known << width if step else known

    def visit(_: Word, keys: list[Word], carry: tuple[Word, ...]) -> tuple[Word, ...]:
        for key in keys:
            above = key - lowest
            code.increment("histogram", above >> shift, above < 1 << width if step else key > LOWEST)
        return carry

    _keys(code, plan, own, visit, ())


def _find(code: Code, plan: Plan, own: _Warp, step: int, need: Word) -> Word:
    """Finds the bin of the `need`-th best key, and how many of its keys are needed; clears the histogram.

    Returns:
      The number of all keys that were counted.
    """
    always, per_thread = code.thread == code.thread, BINS // plan.threads
    bins = [(BINS - 1 - i) - code.thread * per_thread for i in range(per_thread)]
    counts = [code.read("histogram", place) for place in bins]
    for place in bins:
        code.write("histogram", place, 0, always)
    if plan.blocks > 1:
        for place, count in zip(bins, counts, strict=True):
            code.write("merged", place + step * BINS, count, always)
        code.meet_all()
        several = [
            [code.of_block("merged", place + step * BINS, rank) for rank in range(plan.blocks)]
            for place in bins
        ]
        counts = [_sum(words) for words in several]
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

    def mark(chunk: Word, keys: list[Word], carry: tuple[Word, ...]) -> tuple[Word, ...]:
        sure, equal = carry
        above, same = [key > threshold for key in keys], [(key == threshold) & (key > LOWEST) for key in keys]
        for i, several in enumerate((above, same)):
            words = [code.ballot(one) for one in several]
            place = marks + (zero + chunk) * MARKS + i * 4
            code.write_four("marks", place, words, (own.lane == 0) & (own.each > chunk))
        return sure + _sum([code.select(one, 1, 0) for one in above]), equal + _sum(
            [code.select(one, 1, 0) for one in same]
        )

    counts = _keys(code, plan, own, mark, (zero, zero))
    (sure, sure_total), (equal, equal_total) = _before_warps(code, plan, own, counts)
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


def _before_warps(code: Code, plan: Plan, own: _Warp, counts: tuple[Word, ...]) -> list[tuple[Word, Word]]:
    """Two numbers of each thread -> of each (sum over all warps before, in all blocks; sum over all)."""
    results = [_prefix(code, plan, own, len(SHIFTS) + i, count) for i, count in enumerate(counts)]
    results = [(code.from_lane(before, 0), total) for before, total in results]
    if plan.blocks == 1:
        return results
    for i, (_, total) in enumerate(results):
        code.write("totals", i, total, code.thread == 0)
    code.meet_all()
    inside = own.lane < plan.blocks
    rank = code.select(inside, own.lane, 0)
    sums = [code.select(inside, code.of_block("totals", i, rank), 0) for i in range(2)]
    everywhere = []
    for (before, _), word in zip(results, sums, strict=True):
        running = _scan(code, own, word)
        others = code.from_lane(running - word, code.rank)
        everywhere.append((before + others, code.from_lane(running, LANES - 1)))
    return everywhere


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
