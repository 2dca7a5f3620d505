"""What the engine counts, and the frozen snapshot of it that metrics, logs and benchmarks read."""

import dataclasses
from collections.abc import Mapping

from mtp_jax.scheduler.plan import DispatchPlan, TokenUpdate


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and gauges of this moment.

    Counters only grow. Tokens are those of the engine itself: surplus tokens that a stop string
    cut off later, or that an abort came too late for, are in `generation_tokens` here although no
    client is billed for them.
    """

    # Gauges.
    num_running: int = 0  # requests that hold a slot
    num_waiting: int = 0  # requests that wait for one
    is_compiling: bool = False  # a compiler is at work; requests that need what it makes wait for it
    kv_cache_usage: float = 0.0  # pages that live requests hold / pages; 0..1

    # Prefix cache and preemption.
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0

    # Speculation. sum(num_accepted_per_position) == num_accepted_tokens <= num_draft_tokens.
    num_drafts: int = 0  # rounds that verified at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()  # index j: rounds that accepted draft j; K entries
    # A gauge: drafts a round by row bucket, where the engine chooses them itself; else empty.
    drafts_in_use: Mapping[int, int] = dataclasses.field(default_factory=dict)

    # The ring.
    ticks: int = 0  # counted once for each stage of each replica
    useful_ticks: int = 0  # those in which the stage had work
    host_seconds_per_dispatch: float = 0.0  # mean: host work around one dispatch, waiting excluded

    # Tokens.
    prompt_tokens: int = 0  # computed by prefill, cached ones left out
    generation_tokens: int = 0


class Counts:
    """Counters of one engine since its start."""

    def __init__(self, num_speculative_tokens: int):
        self.dispatches = self.ticks = self.useful_ticks = 0
        self.host_seconds = 0.0
        self.prompt_tokens = self.generation_tokens = 0
        self.drafted_rounds = self.draft_tokens = 0
        self.accepted_per_position = [0] * num_speculative_tokens

    def dispatched(self, plan: DispatchPlan, ticks: int, useful: int) -> None:
        """One dispatch of so many ticks, of each stage and replica, was read."""
        self.dispatches += 1
        self.ticks += ticks * len(plan.rows)
        self.useful_ticks += useful
        self.prompt_tokens += sum(len(chunk.token_ids) for chunk in plan.chunks if chunk is not None)

    def delivered(self, update: TokenUpdate) -> None:
        """Tokens of one request arrived."""
        self.generation_tokens += len(update.token_ids)
        if update.num_drafts:
            self.drafted_rounds += 1
            self.draft_tokens += update.num_drafts
            for position in range(update.num_accepted):
                self.accepted_per_position[position] += 1
