"""Plans that were handed out and not yet read back, and what they may still produce."""

import collections
import dataclasses

from mtp_jax.scheduler.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class ChunkExit:
    """A prompt chunk that leaves the last stage during one plan."""

    sequence: Sequence
    generation: int
    size: int  # tokens in the chunk
    end: int  # position after its last token

    @property
    def is_live(self) -> bool:
        """Whether the device still writes it: its request has neither ended nor been preempted."""
        return self.sequence.generation == self.generation


@dataclasses.dataclass(frozen=True)
class OutstandingPlan:
    """What the scheduler has to remember of a plan until its results arrive."""

    index: int
    rounds: int
    exits: tuple[ChunkExit, ...]

    def most_tokens(self, sequence: Sequence, widest: int) -> int:
        """Most tokens that it can add to a decoding request, at `widest` tokens a round."""
        assert sequence.exit_plan is not None
        if self.index <= sequence.exit_plan:
            return int(self.index == sequence.exit_plan)
        return self.rounds * widest

    def fewest_tokens(self, sequence: Sequence) -> int:
        """Tokens that it adds to a request for sure, as long as that is not finished: one a round.

        The plan in which the final chunk leaves the ring gives the first token. In the plan after it
        the row may miss one round, because its group may pass the last stage before the chunk does.
        """
        if sequence.exit_plan is None or self.index < sequence.exit_plan:
            return 0
        if self.index == sequence.exit_plan:
            return 1
        return self.rounds - (self.index == sequence.exit_plan + 1)


class OutstandingPlans:
    """Outstanding plans, oldest first."""

    def __init__(self):
        self._plans: collections.deque[OutstandingPlan] = collections.deque()

    def push(self, plan: OutstandingPlan) -> None:
        self._plans.append(plan)

    def pop(self, index: int) -> OutstandingPlan:
        """The oldest plan, which must have this index: results come back in order."""
        plan = self._plans.popleft()
        assert plan.index == index, f"plan {index} came back before plan {plan.index}"
        return plan

    def most_tokens(self, sequence: Sequence, widest: int) -> int:
        return sum(plan.most_tokens(sequence, widest) for plan in self._plans)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that a request may still need after all of them."""
        sure = sum(plan.fewest_tokens(sequence) for plan in self._plans)
        return sequence.max_total - len(sequence.tokens) - sure

    def surely_finish(self, sequence: Sequence) -> bool:
        """Whether they finish the request even if every draft is rejected.

        This counts on no row pausing for want of pages, which holds because every plan reserves pages
        for every request that it is not already sure of.
        """
        return self.remaining(sequence) <= 0

    def hides_text_of(self, sequence: Sequence) -> bool:
        """Whether a request's grammar has yet to see what they emit: the next masks follow from it."""
        may_grow = sequence.is_guided and sequence.is_decoding
        return may_grow and self.most_tokens(sequence, widest=1) > 0
