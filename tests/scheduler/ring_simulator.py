"""The device's side of a dispatch in plain Python: what a plan means, tick by tick.

Nothing is computed. A KV entry is stood for by the hash of the token history up to its position, so a
stage that reads a page which somebody else has written, or which is not written yet, is caught at once;
an MTP entry by the hash that covers the next token as well. The next token of a history is a hash, too.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterable

from mtp_jax.config import EngineConfig
from mtp_jax.scheduler.plan import Chunk, DispatchPlan, RowResult

EMPTY_HISTORY = 17


def extend(history: int, token: int) -> int:
    """Hash of a history with one more token."""
    return hash((history, token))


def histories(tokens: Iterable[int]) -> list[int]:
    """Hash of every prefix of `tokens`; entry i covers tokens 0..i."""
    return list(itertools.accumulate(tokens, extend, initial=EMPTY_HISTORY))[1:]


def sample(history: int, seed: int, vocab: int) -> int:
    """The reference model: the token after a history."""
    return hash((history, seed, 1)) % vocab


def reference(prompt: tuple[int, ...], seed: int, vocab: int, count: int) -> list[int]:
    """`count` tokens of plain decoding."""
    history, tokens = histories(prompt)[-1], []
    for _ in range(count):
        tokens.append(sample(history, seed, vocab))
        history = extend(history, tokens[-1])
    return tokens


@dataclasses.dataclass
class DeviceSlot:
    """State of a slot on the device. `tokens` replaces length and last token."""

    generation: int
    tokens: list[int]
    finished: bool = False


@dataclasses.dataclass
class Flight:
    """A row in flight: the last token and drafts of its slot at the time of the rebuild."""

    slot: int
    generation: int
    tokens: list[int]  # history, last token included
    drafts: list[int]


@dataclasses.dataclass
class LaneChunk:
    chunk: Chunk
    tokens: list[int]  # prompt up to the chunk's end; the real device has only its cache entries


class RingSimulator:
    """Runs plans in order.

    Args:
      acceptance: probability that a draft is right.
      join_first: whether a chunk that leaves the last stage makes its slot live before or after the
        group that leaves at the same tick is rebuilt. A scheduler must not depend on it.
    """

    def __init__(
        self, config: EngineConfig, vocab: int, rng: random.Random, acceptance: float, join_first: bool
    ):
        self.config, self.vocab, self.rng = config, vocab, rng
        self.acceptance, self.join_first = acceptance, join_first
        stages, entries, replicas = config.stages, config.num_pages * config.page_size, range(config.data)
        self.slots = [DeviceSlot(0, []) for _ in range(config.max_num_seqs)]
        self.flights: list[list[Flight | None]] = [[] for _ in range(config.data * stages)]
        # Of each replica: chunks and caches by stage, and the MTP layer's cache.
        self.lanes: list[list[LaneChunk | None]] = [[None] * stages for _ in replicas]
        self.kv = [[[0] * entries for _ in range(stages)] for _ in replicas]
        self.mtp = [[0] * entries for _ in replicas]
        self.useful_ticks = self.ticks = self.pauses = 0

    def run(
        self, plan: DispatchPlan, prompts: dict[int, list[int]], shared_pages: set[tuple[int, int]]
    ) -> list[RowResult]:
        """One dispatch.

        Args:
          prompts: by generation, the tokens that its chunks must add up to.
          shared_pages: (replica, page) that the prefix cache answers with; nothing may write to them.
        """
        views = tuple(dataclasses.replace(view, pages=list(view.pages)) for view in plan.slots)
        self.plan = plan = dataclasses.replace(plan, slots=views)  # the scheduler changes its views later
        self.shared_pages = shared_pages
        self._check_plan()
        results: list[RowResult] = []
        stages = self.config.stages
        for group in self.flights:
            group += [None] * (plan.num_rows - len(group))
            assert not any(map(self._is_live, group[plan.num_rows :])), "a live row does not fit the bucket"
            del group[plan.num_rows :]
        ticks = plan.rounds * stages
        for tick, replica in itertools.product(range(ticks), range(self.config.data)):
            lane, first = self.lanes[replica], replica * stages  # the replica's first group
            if plan.has_lane:
                lane[0] = self._entering(replica, plan.chunks[replica * ticks + tick], prompts)
            for stage in range(stages):
                rows = self.flights[first + (tick - stage) % stages]
                self._run_stage(self.kv[replica][stage], rows, lane[stage])
            self._leave(first + (tick + 1) % stages, lane[-1], results)
            if plan.has_lane:
                self.lanes[replica] = [None, *lane[:-1]]
        return results

    def _check_plan(self) -> None:
        """The promises of plan.py."""
        plan, config = self.plan, self.config
        assert len(plan.rows) == config.data * config.stages
        assert all(len(group) == plan.num_rows for group in plan.rows)
        assert plan.rounds in (1, 2, 4, 8) and plan.rounds <= config.max_rounds
        placed = [slot for group in plan.rows for slot in group if slot >= 0]
        assert len(placed) == len(set(placed)), "a slot in two rows"
        assert all(plan.slots[slot].generation for slot in placed), "a free slot in a row"
        for index, group in enumerate(plan.rows):
            homes = {self._replica(slot) for slot in group if slot >= 0}
            assert homes <= {index // config.stages}, "a slot among another replica's rows"
        assert len(plan.slots) == config.max_num_seqs
        assert all(len(view.pages) <= plan.width for view in plan.slots if view.generation)
        lane = [flight for lane in self.lanes for flight in lane if flight]
        ticks = config.data * plan.rounds * config.stages
        assert len(plan.chunks) == (ticks if plan.has_lane else 0)
        if plan.has_lane:
            sizes = [len(flight.chunk.token_ids) for flight in lane]
            sizes += [len(chunk.token_ids) for chunk in plan.chunks if chunk]
            assert max(sizes) <= plan.chunk_size, "a chunk does not fit the bucket"
        else:
            assert not any(self._is_current(flight.chunk) for flight in lane), "a chunk is stuck in the lane"

    def _replica(self, slot: int) -> int:
        return slot // (self.config.max_num_seqs // self.config.data)

    def _is_current(self, work: Flight | Chunk) -> bool:
        return self.plan.slots[work.slot].generation == work.generation

    def _is_live(self, flight: Flight | None) -> bool:
        return flight is not None and self._is_current(flight)

    def _entry(self, slot: int, position: int) -> int | None:
        """Index of a position in the cache; None past the slot's pages."""
        pages, size = self.plan.slots[slot].pages, self.config.page_size
        index = position // size
        return pages[index] * size + position % size if index < len(pages) else None

    def _write(self, cache: list[int], slot: int, position: int, value: int) -> None:
        entry = self._entry(slot, position)
        if entry is None:
            return
        page = entry // self.config.page_size
        replica = self._replica(slot)
        views = [(s, view) for s, view in enumerate(self.plan.slots) if self._replica(s) == replica]
        holders = [s for s, view in views if view.generation and page in view.pages]
        assert holders == [slot], f"slot {slot} writes to page {page}, held by {holders}"
        assert (replica, page) not in self.shared_pages, f"slot {slot} rewrites page {page} of the cache"
        cache[entry] = value

    def _expect(self, cache: list[int], slot: int, values: list[int]) -> None:
        """The cache holds `values` at positions 0.. of a slot."""
        entries = [self._entry(slot, position) for position in range(len(values))]
        found = [None if entry is None else cache[entry] for entry in entries]
        assert found == values, f"slot {slot} reads foreign or missing entries"

    def _entering(self, replica: int, chunk: Chunk | None, prompts: dict[int, list[int]]) -> LaneChunk | None:
        if chunk is None:
            return None
        assert self._is_current(chunk) and chunk.token_ids and self._replica(chunk.slot) == replica
        end = chunk.start + len(chunk.token_ids)
        prompt = prompts[chunk.generation]
        assert tuple(prompt[chunk.start : end]) == chunk.token_ids
        assert chunk.next_token == (prompt[end] if end < len(prompt) else -1)
        return LaneChunk(chunk, prompt[:end])

    def _run_stage(self, kv: list[int], group: list[Flight | None], lane: LaneChunk | None) -> None:
        """One stage's layers: writes its KV, then attends to everything before."""
        rows = [flight for flight in group if self._is_live(flight)]
        work = [(flight.slot, flight.tokens + flight.drafts, len(flight.tokens) - 1) for flight in rows]
        if lane and self._is_current(lane.chunk):
            work.append((lane.chunk.slot, lane.tokens, lane.chunk.start))
        for slot, tokens, start in work:
            values = histories(tokens)
            for position in range(start, len(tokens)):
                self._write(kv, slot, position, values[position])
            self._expect(kv, slot, values[:start])
        self.ticks += 1
        self.useful_ticks += bool(work)

    def _leave(self, group: int, lane: LaneChunk | None, results: list[RowResult]) -> None:
        """The last stage: verify, draft, rebuild the group's rows, complete a prompt."""
        for flight in self.flights[group]:
            if self._is_live(flight):
                self._verify(flight, results)
        if self.join_first:
            self._complete(lane, results)
        self.flights[group] = [self._rebuild(slot) for slot in self.plan.rows[group]]
        if not self.join_first:
            self._complete(lane, results)

    def _verify(self, flight: Flight, results: list[RowResult]) -> None:
        view, state = self.plan.slots[flight.slot], self.slots[flight.slot]
        assert state.generation == flight.generation and not state.finished
        tokens: list[int] = []
        history = histories(flight.tokens)[-1]
        while True:
            tokens.append(sample(history, view.seed, self.vocab))
            history = extend(history, tokens[-1])
            accepted = len(tokens) - 1
            if accepted == view.num_drafts or flight.drafts[accepted] != tokens[-1]:
                break
        start = len(flight.tokens) - 1
        self._emit(flight.slot, tokens, start, view.num_drafts, accepted, results)

    def _complete(self, lane: LaneChunk | None, results: list[RowResult]) -> None:
        """A chunk leaves: the MTP layer's entries, and the first token if the prompt ends with it."""
        if lane is None or not self._is_current(lane.chunk):
            return
        chunk = lane.chunk
        if chunk.is_final:
            view = self.plan.slots[chunk.slot]
            token = sample(histories(lane.tokens)[-1], view.seed, self.vocab)
            self.slots[chunk.slot] = DeviceSlot(chunk.generation, list(lane.tokens))
            self._write_mtp(chunk.slot, lane.tokens, chunk.start)
            self._emit(chunk.slot, [token], len(lane.tokens) - 1, 0, 0, results)
        else:
            self._write_mtp(chunk.slot, [*lane.tokens, chunk.next_token], chunk.start)

    def _emit(
        self, slot: int, tokens: list[int], start: int, drafts: int, accepted: int, results: list[RowResult]
    ) -> None:
        """Cuts new tokens, writes the MTP layer's entries from position `start` on, adds a result."""
        view, state = self.plan.slots[slot], self.slots[slot]
        tokens = tokens[: view.max_total - len(state.tokens)]
        for count, token in enumerate(tokens, start=1):
            if token in view.stop_token_ids:
                tokens = tokens[:count]
                state.finished = True
                break
        state.tokens += tokens
        state.finished |= len(state.tokens) >= view.max_total
        if not state.finished:  # a finished row drafts nothing, so it need not write these
            self._write_mtp(slot, state.tokens, start)
        results.append(RowResult(slot, state.generation, tuple(tokens), drafts, accepted))

    def _write_mtp(self, slot: int, tokens: list[int], start: int) -> None:
        values = histories(tokens)
        for position in range(start, len(tokens) - 1):
            self._write(self.mtp[self._replica(slot)], slot, position, values[position + 1])
        self._expect(self.mtp[self._replica(slot)], slot, values[1:])

    def _rebuild(self, slot: int) -> Flight | None:
        if slot < 0:
            return None
        view, state = self.plan.slots[slot], self.slots[slot]
        if view.generation != state.generation or state.finished:
            return None
        drafts = self.config.num_speculative_tokens
        need = min(len(state.tokens) - 1 + 2 * drafts + 1, view.max_total)
        if need > len(view.pages) * self.config.page_size:
            self.pauses += 1
            return None
        for position in range(len(state.tokens) - 1, len(state.tokens) - 1 + drafts):
            # Of the drafts; the next round writes them again.
            self._write(self.mtp[self._replica(slot)], slot, position, -1)
        return Flight(slot, state.generation, list(state.tokens), self._draft(state.tokens, view.seed))

    def _draft(self, tokens: list[int], seed: int) -> list[int]:
        """K drafts; each is right with probability `acceptance`."""
        history, drafts = histories(tokens)[-1], []
        for _ in range(self.config.num_speculative_tokens):
            token = sample(history, seed, self.vocab)
            if self.rng.random() >= self.acceptance:
                token = (token + 1) % self.vocab
            drafts.append(token)
            history = extend(history, token)
        return drafts
