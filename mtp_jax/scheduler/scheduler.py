"""The host scheduler: which requests run, where, on which pages, and what each dispatch does."""

import bisect
import collections
from collections.abc import Iterable

from mtp_jax.config import EngineConfig, bucket_for
from mtp_jax.errors import InvalidRequestError
from mtp_jax.request import EngineRequest
from mtp_jax.scheduler.outstanding import ChunkExit, OutstandingPlan, OutstandingPlans
from mtp_jax.scheduler.pages import ROOT
from mtp_jax.scheduler.plan import Chunk, DispatchPlan, RowResult, SlotView, TokenUpdate
from mtp_jax.scheduler.replicas import Replicas
from mtp_jax.scheduler.rows import RowTable
from mtp_jax.scheduler.sequence import Sequence, make_sequence

LAST_GENERATION = 2**31 - 1


class Scheduler:
    """Decides every dispatch of the ring and digests what it produced.

    The engine may ask for the next plan before it hands back the results of the last, so all decisions
    here hold for every number of tokens that outstanding plans may still produce. All calls come from
    one thread.

    Args:
      config: the engine's; `stages`, `max_num_seqs`, `page_size`, ... shape the plans.
      eos_token_ids: the model's, which end a request unless it ignores them.
      row_buckets: sizes of `DispatchPlan.num_rows`, ascending.
      width_buckets: sizes of `DispatchPlan.width` in pages, ascending.
      chunk_buckets: sizes of `DispatchPlan.chunk_size` in tokens, ascending; the last is the longest chunk.

    Attributes:
      prefix_queries: prompt tokens that were looked up in the prefix cache so far.
      prefix_hits: prompt tokens that it had.
      num_preemptions: requests that had to give up their pages and be computed again.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...],
        row_buckets: tuple[int, ...],
        width_buckets: tuple[int, ...],
        chunk_buckets: tuple[int, ...],
    ):
        self.config = config
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0
        self._eos_token_ids = eos_token_ids
        self._row_buckets, self._width_buckets = row_buckets, width_buckets
        self._chunk_buckets = chunk_buckets
        self._replicas = Replicas(config)
        self._rows = RowTable(config.stages, config.rows_per_group, config.data)
        self._last_height = 0  # rows of the last plan, whose flights arrive in the next one
        self._slots = [SlotView() for _ in range(config.max_num_seqs)]
        self._sequences: dict[str, Sequence] = {}
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: dict[int, Sequence] = {}  # by slot, in order of arrival
        self._outstanding = OutstandingPlans()
        self._in_flight: tuple[ChunkExit, ...] = ()  # entered in the last plan, exit in the next
        self._next_index = 0
        self._last_generation = 0
        self._admitted: list[str] = []
        self._arrivals = 0
        self._cached_of_finished: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        """Requests that have a slot, those in prefill included."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def pages_used(self) -> int:
        """Pages held by requests; cached pages that no request holds count as free."""
        return self._replicas.num_held

    @property
    def pages_total(self) -> int:
        return self._replicas.num_pages

    def num_cached_tokens(self, request_id: str) -> int:
        """Prompt tokens that the prefix cache had, for a live request or one that the last `update` ended."""
        sequence = self._sequences.get(request_id)
        return sequence.num_cached_tokens if sequence else self._cached_of_finished[request_id]

    def check(self, request: EngineRequest) -> None:
        """Raises what `add` would raise."""
        if request.request_id in self._sequences:
            raise InvalidRequestError(
                "request_id", request.request_id, "an id that no unfinished request has"
            )
        make_sequence(request, self.config, self._eos_token_ids, self._arrivals)

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
          InvalidRequestError: it can never run: an empty or too long prompt, more tokens than the context
            or the page pool holds, more drafts than the server makes, or an id that is in use.
        """
        self.check(request)
        sequence = make_sequence(request, self.config, self._eos_token_ids, self._arrivals)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def request_in(self, slot: int, generation: int) -> str | None:
        """The request that holds a slot under this generation, if it still does."""
        sequence = self._running.get(slot)
        return sequence.request_id if sequence is not None and sequence.generation == generation else None

    def finish(self, request_id: str) -> bool:
        """Ends a request whatever it is doing; its slot and pages are free for the next plan.

        Returns:
          False where no such request is alive, which is harmless.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.slot < 0:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence)
        return True

    def take_admitted(self) -> list[str]:
        """Requests that got their first slot since the last call."""
        taken, self._admitted = self._admitted, []
        return taken

    def schedule(self) -> DispatchPlan | None:
        """The next dispatch, or None where none is useful before more results are read back."""
        if any(map(self._outstanding.hides_text_of, self._running.values())):
            return None
        rounds = self._reserve(self._choose_rounds())
        if rounds is None:
            return None
        if rounds == 1:
            self._admit()
        # No outstanding plan finishes a request whose prompt is still in the ring or on its way into it.
        if all(map(self._outstanding.surely_finish, self._running.values())):
            return None
        chunks, entered = self._enter_chunks()
        arriving = self._in_flight
        ticks, delay = rounds * self.config.stages, self.config.stages - 1
        exits = (*arriving, *(flight for tick, flight in entered if tick + delay < ticks))
        self._in_flight = tuple(flight for tick, flight in entered if tick + delay >= ticks)
        plan = self._build(rounds, chunks, (*arriving, *(flight for _, flight in entered)))
        self._outstanding.push(OutstandingPlan(plan.index, rounds, exits))
        self._next_index += 1
        return plan

    def update(self, plan: DispatchPlan, results: Iterable[RowResult]) -> list[TokenUpdate]:
        """Digests what a plan produced; plans come back in the order in which they were handed out.

        Args:
          results: what its rows and final chunks gave, in tick order. Those of requests that ended or
            were preempted meanwhile are ignored.
        """
        outstanding = self._outstanding.pop(plan.index)
        self._cached_of_finished.clear()
        for flight in outstanding.exits:
            if flight.is_live:
                flight.sequence.num_computed = flight.end
                self._register(flight.sequence)
        updates = []
        for result in results:
            sequence = self._running.get(result.slot)
            if sequence is not None and sequence.generation == result.generation:
                updates.append(self._digest(sequence, result))
        return updates

    # -- results -------------------------------------------------------------------------------------

    def _digest(self, sequence: Sequence, result: RowResult) -> TokenUpdate:
        """Takes the tokens of one row, and frees the request if they end it."""
        assert result.token_ids, "a row without tokens is not a result"
        token_ids, reason = sequence.cut(result.token_ids)
        is_first = not sequence.has_new_token
        sequence.has_new_token = True
        sequence.tokens.extend(token_ids)
        if reason is None:
            sequence.num_computed = len(sequence.tokens) - 1
            self._register(sequence)
        else:
            # A row that ends its request need not write the MTP layer's last entries, so nothing of
            # this round is offered to the prefix cache.
            self._cached_of_finished[sequence.request_id] = sequence.num_cached_tokens
            self.finish(sequence.request_id)
        return TokenUpdate(
            request_id=sequence.request_id,
            token_ids=token_ids,
            num_drafts=result.num_drafts,
            num_accepted=result.num_accepted,
            is_first=is_first,
            finish_reason=reason,
            stop_token=token_ids[-1] if reason == "stop" else None,
            logprobs=result.logprobs[: len(token_ids)],
            proposals=result.proposals,
        )

    def _register(self, sequence: Sequence) -> None:
        """Offers the pages to the prefix cache that are computed whole and whose next token is known."""
        if not self.config.enable_prefix_caching:
            return
        size, tokens = self.config.page_size, sequence.tokens
        while (end := (sequence.num_registered + 1) * size) <= min(sequence.num_computed, len(tokens) - 1):
            page = sequence.pages[sequence.num_registered]
            content = tuple(tokens[end - size : end])
            pool = self._replicas.pool(sequence)
            sequence.parent = pool.register(sequence.parent, content, tokens[end], page)
            sequence.num_registered += 1

    # -- slots and pages -----------------------------------------------------------------------------

    def _vacate(self, sequence: Sequence) -> None:
        """Takes a request out of its slot. The device drops its flights as of the next plan."""
        del self._running[sequence.slot]
        self._slots[sequence.slot] = SlotView()
        self._rows.remove(sequence.slot)
        self._replicas.pool(sequence).release(sequence.pages)
        self._replicas.give_back(sequence.slot)
        sequence.leave_slot()

    def _preempt_latest(self, among: list[Sequence]) -> None:
        """Sends the request that arrived last back to the queue, before all that arrived after it."""
        sequence = max(among, key=lambda other: other.arrival)
        self._vacate(sequence)
        bisect.insort(self._waiting, sequence, key=lambda other: other.arrival)
        self.num_preemptions += 1

    def _reserve(self, rounds: int) -> int | None:
        """Gives every decoding request the pages for whatever `rounds` rounds and outstanding plans may make.

        Where pages are short it does with fewer rounds, then waits for requests that are about to end,
        and only then preempts.

        Returns:
          The rounds that the pages suffice for, or None to wait for results.
        """
        growing = [
            sequence
            for sequence in self._running.values()
            if sequence.is_decoding and not self._outstanding.surely_finish(sequence)
        ]
        while rounds > 1 and not self._have_pages(growing, rounds):
            rounds //= 2
        for sequence in growing:
            while sequence.slot >= 0:  # else it was preempted, here or for an earlier one
                pool, missing = self._replicas.pool(sequence), self._missing(sequence, rounds)
                if missing <= pool.num_available:
                    sequence.pages.extend(pool.allocate(missing))
                    break
                neighbours = [s for s in self._running.values() if self._replicas.pool(s) is pool]
                if any(map(self._outstanding.surely_finish, neighbours)):
                    return None
                self._preempt_latest(neighbours)
        return rounds

    def _have_pages(self, growing: list[Sequence], rounds: int) -> bool:
        """Whether every replica has the pages that its requests lack for a plan of `rounds` rounds."""
        left = [pool.num_available for pool in self._replicas.pools]
        for sequence in growing:
            left[self._replicas.of(sequence.slot)] -= self._missing(sequence, rounds)
        return min(left) >= 0

    def _missing(self, sequence: Sequence, rounds: int) -> int:
        """Pages that a decoding request lacks for a plan of `rounds` rounds.

        The device runs a row only where the pages cover one more round and the drafts after it,
        2K + 1 tokens past the last KV entry.
        """
        widest = self.config.num_speculative_tokens + 1
        coming = OutstandingPlan(self._next_index, rounds, ())
        total = len(sequence.tokens) + 2 * widest - 1
        total += self._outstanding.most_tokens(sequence, widest) + coming.most_tokens(sequence, widest)
        needed = self._replicas.pool(sequence).pages_for(min(total, sequence.max_total))
        return max(0, needed - len(sequence.pages))

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests, strictly in order."""
        while self._waiting and self._admit_one(self._waiting[0]):
            self._waiting.popleft()

    def _admit_one(self, sequence: Sequence) -> bool:
        """Starts a request if its pages are there; False leaves everything as it was."""
        if self._awaits_shared_prompt(sequence):
            return False
        tokens = sequence.tokens
        # The first token, and one round with the drafts after it.
        total = min(len(tokens) + 2 * self.config.num_speculative_tokens + 2, sequence.max_total)
        # Log-probabilities of a prompt come from computing it.
        match = sequence.request.params.prompt_logprobs is None
        place = self._replicas.choose(tokens, total, match=match)
        if place is None:
            return False
        pool, matched = self._replicas.pools[place.replica], place.matched
        pool.share(matched)
        self._last_generation = self._last_generation % LAST_GENERATION + 1
        sequence.enter_slot(
            slot=self._replicas.take_slot(place.replica),
            generation=self._last_generation,
            pages=[*matched, *pool.allocate(place.missing)],
            num_matched=len(matched) * self.config.page_size,
            num_registered=len(matched),
            parent=pool.serial(matched[-1]) if matched else ROOT,
        )
        if not sequence.was_admitted:
            sequence.was_admitted = True
            self._admitted.append(sequence.request.request_id)
            sequence.num_cached_tokens = sequence.num_entered
            if self.config.enable_prefix_caching:
                self.prefix_queries += len(tokens)
                self.prefix_hits += sequence.num_entered
        self._slots[sequence.slot] = sequence.view()
        self._running[sequence.slot] = sequence
        return True

    def _awaits_shared_prompt(self, sequence: Sequence) -> bool:
        """Whether the request whose prompt pages this one reuses has yet to compute them."""
        other = self._sequences.get(sequence.request.shares_prompt_with or "")
        if other is None or not self.config.enable_prefix_caching:
            return False
        if sequence.request.params.prompt_logprobs is not None:  # it computes its prompt itself
            return False
        # Only one that is ahead is waited for: the head of the queue must never wait for its tail.
        return other.arrival < sequence.arrival and other.num_computed < other.num_prompt_tokens

    # -- the plan ------------------------------------------------------------------------------------

    def _choose_rounds(self) -> int:
        """Rounds of the next dispatch if pages allow: 1 beside prompts, those who wait, and grammars."""
        lane = self._in_flight or any(not s.is_decoding or s.is_guided for s in self._running.values())
        if lane or self._waiting or not self._running:
            return 1
        remaining = max(map(self._outstanding.remaining, self._running.values()))
        limit = min(self.config.max_rounds, remaining // (self.config.num_speculative_tokens + 1))
        return 1 << (max(limit, 1).bit_length() - 1)

    def _enter_chunks(self) -> tuple[list[Chunk | None], list[tuple[int, ChunkExit]]]:
        """One chunk a tick of each replica for Z ticks: back to back for one request, then for the next.

        Returns:
          The chunk of each tick, replica by replica, and (tick, exit) of each chunk.
        """
        lanes: list[list[Chunk | None]] = [[] for _ in range(self.config.data)]
        entered = []
        for sequence in self._running.values():
            replica = self._replicas.of(sequence.slot)
            chunks = lanes[replica]
            while not sequence.is_decoding and len(chunks) < self.config.stages:
                start, tokens = sequence.num_entered, sequence.tokens
                end = min(start + self._chunk_buckets[-1], len(tokens))
                next_token = tokens[end] if end < len(tokens) else -1
                content = tuple(tokens[start:end])
                chunk = Chunk(sequence.slot, sequence.generation, start, content, next_token)
                sequence.num_entered = end
                if chunk.is_final:
                    # Only the chunk of tick 0 passes all Z stages within this dispatch of Z ticks.
                    sequence.exit_plan = self._next_index + (len(chunks) > 0)
                    self._rows.place(sequence.slot, replica)
                flight = ChunkExit(sequence, sequence.generation, end - start, end)
                entered.append((len(chunks), flight))
                chunks.append(chunk)
        filled = [chunks + [None] * (self.config.stages - len(chunks)) for chunks in lanes]
        return [chunk for chunks in filled for chunk in chunks], entered

    def _build(self, rounds: int, chunks: list[Chunk | None], flights: tuple[ChunkExit, ...]) -> DispatchPlan:
        """Puts the plan together and chooses its buckets; `flights` are all chunks in the ring."""
        assert rounds == 1 or not flights, "a dispatch with a prefill lane is one round"
        self._rows.compact(self._row_buckets)
        height = self._rows.height
        num_rows = bucket_for(max(height, self._last_height, 1), self._row_buckets)
        self._last_height = height
        width = max((len(sequence.pages) for sequence in self._running.values()), default=1)
        return DispatchPlan(
            index=self._next_index,
            rounds=rounds,
            rows=self._rows.as_plan(num_rows),
            slots=tuple(self._slots),
            chunks=tuple(chunks) if flights else (),
            num_rows=num_rows,
            width=bucket_for(width, self._width_buckets),
            chunk_size=bucket_for(max(f.size for f in flights), self._chunk_buckets) if flights else 0,
            has_lane=bool(flights),
        )
