"""Drives a scheduler against the ring simulator the way the engine does, and checks every step."""

import collections
import itertools
import random

from mtp_jax.config import EngineConfig, power_of_two_buckets
from mtp_jax.request import EngineRequest, SamplingParams
from mtp_jax.scheduler.plan import DispatchPlan, RowResult, TokenUpdate
from mtp_jax.scheduler.scheduler import Scheduler
from tests.scheduler.ring_simulator import RingSimulator, reference

VOCAB = 13
EOS = 12


def make_scheduler(config: EngineConfig, eos_token_ids: tuple[int, ...] = (EOS,)) -> Scheduler:
    """A scheduler with power-of-two buckets."""
    return Scheduler(
        config,
        eos_token_ids=eos_token_ids,
        row_buckets=power_of_two_buckets(config.min_rows, config.rows_per_group),
        width_buckets=power_of_two_buckets(1, config.pages_per_slot),
        chunk_buckets=power_of_two_buckets(min(4, config.prefill_chunk), config.prefill_chunk),
    )


def make_request(
    request_id: str, prompt: tuple[int, ...], *, seed: int = 0, shares: str | None = None, **params
) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(**params), seed=seed, shares_prompt_with=shares)


def expected(request: EngineRequest, config: EngineConfig) -> tuple[list[int], str]:
    """Tokens and finish reason that plain decoding alone would give."""
    params, length = request.params, len(request.prompt_token_ids)
    room = min(config.max_model_len, config.num_pages * config.page_size) - length
    count = room if params.max_tokens is None else params.max_tokens
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    tokens = reference(request.prompt_token_ids, request.seed, VOCAB, count)
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], "stop"
    return tokens, "length"


class Harness:
    """Scheduler and device together.

    Args:
      depth: plans that may be outstanding when results are read; 2 overlaps like the engine, 1 does not.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        seed: int = 0,
        acceptance: float = 0.6,
        join_first: bool = True,
        depth: int = 2,
    ):
        self.config, self.depth = config, depth
        self.scheduler = make_scheduler(config)
        self.ring = RingSimulator(config, VOCAB, random.Random(seed), acceptance, join_first)
        self.outstanding: collections.deque[tuple[DispatchPlan, list[RowResult]]] = collections.deque()
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.plans: list[DispatchPlan] = []
        self.updates: list[TokenUpdate] = []
        self.admitted: list[str] = []  # in the order of their first slots
        self.arrivals: dict[str, int] = {}
        self._prompts: dict[int, list[int]] = {}

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.arrivals[request.request_id] = len(self.arrivals)
        self.tokens[request.request_id] = []

    def abort(self, request_id: str) -> None:
        alive = self.scheduler.finish(request_id)
        assert alive == (request_id not in self.reasons)
        if alive:
            self.reasons[request_id] = "abort"

    def dispatch(self) -> DispatchPlan | None:
        """Schedules one plan and lets the device run it."""
        plan = self.scheduler.schedule()
        self.check_invariants()
        if plan is None:
            return None
        by_generation = {s.generation: s for s in self.scheduler._running.values()}
        for chunk in plan.chunks:
            if chunk:
                self._prompts.setdefault(chunk.generation, list(by_generation[chunk.generation].tokens))
        pools = enumerate(self.scheduler._replicas.pools)
        shared = {
            (i, page) for i, pool in pools for page in range(pool.num_pages) if pool.is_registered(page)
        }
        self.outstanding.append((plan, self.ring.run(plan, self._prompts, shared)))
        self.plans.append(plan)
        return plan

    def read_back(self) -> None:
        """Hands the oldest results to the scheduler."""
        for update in self.scheduler.update(*self.outstanding.popleft()):
            assert update.request_id not in self.reasons, "tokens after the end"
            self.updates.append(update)
            self.tokens[update.request_id] += update.token_ids
            if update.finish_reason:
                self.reasons[update.request_id] = update.finish_reason
                assert (update.stop_token is not None) == (update.finish_reason == "stop")
                assert update.stop_token in (None, update.token_ids[-1])
        self.check_invariants()

    def step(self) -> bool:
        """One turn of the engine's loop; False where there was nothing to do."""
        plan = self.dispatch()
        if self.outstanding and (plan is None or len(self.outstanding) >= self.depth):
            self.read_back()
            return True
        return plan is not None

    def finish_all(self, most_steps: int = 5000) -> None:
        """Steps until everything is done, then checks tokens and that the house is empty."""
        for _ in range(most_steps):
            if not self.step():
                break
        else:
            raise AssertionError("no end in sight")
        self.check_outcome()

    def check_outcome(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_unfinished, "deadlock: requests are left and no plan comes"
        assert not self.outstanding
        for request_id, request in self.requests.items():
            tokens, reason = expected(request, self.config)
            if self.reasons[request_id] == "abort":
                assert self.tokens[request_id] == tokens[: len(self.tokens[request_id])]
            else:
                assert (self.tokens[request_id], self.reasons[request_id]) == (tokens, reason)
        assert scheduler.pages_used == 0
        replicas = scheduler._replicas
        assert {pool.num_available for pool in replicas.pools} == {self.config.num_pages}
        free = [sorted(slots) for slots in replicas._free]
        assert list(itertools.chain(*free)) == list(range(self.config.max_num_seqs))
        assert len(scheduler._rows) == 0
        assert not any(view.generation for view in scheduler._slots)
        assert self.ring.pauses == 0, "a row paused although its pages were reserved"

    def check_invariants(self) -> None:
        """Every page has exactly the holders it counts; requests are admitted in order of arrival."""
        scheduler, running = self.scheduler, list(self.scheduler._running.values())
        replicas, used = scheduler._replicas, 0
        for index, pool in enumerate(replicas.pools):
            mine = [sequence for sequence in running if replicas.of(sequence.slot) == index]
            assert replicas.running(index) == len(mine)
            holders = collections.Counter(page for sequence in mine for page in sequence.pages)
            for page in range(pool.num_pages):
                assert pool.holders(page) == holders[page]
                assert holders[page] <= 1 or pool.is_registered(page), "a private page has two holders"
            assert pool.num_held == len(holders)
            used += len(holders)
            assert len(set(pool._free)) == len(pool._free) and not set(pool._free) & set(pool._idle)
        assert used == scheduler.pages_used
        waiting = [sequence.arrival for sequence in scheduler._waiting]
        assert waiting == sorted(waiting), "the queue is not in order"
        if len(replicas.pools) == 1:
            arrivals = [*(sequence.arrival for sequence in running), *waiting]
            assert arrivals == sorted(arrivals), "a request was overtaken"
        self.admitted += scheduler.take_admitted()
        ahead = [self.arrivals[name] for name in self.admitted]
        assert ahead == sorted(ahead), "a request was overtaken"
