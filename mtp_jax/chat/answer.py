"""One answer: run through the engine, shown as it comes, and counted."""

import dataclasses
import time
from collections.abc import Callable

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.stats import EngineStats
from mtp_jax.request import EngineRequest, RequestOutput


@dataclasses.dataclass(frozen=True)
class AnswerStats:
    """Figures of one answer, or of several together. Times are seconds."""

    num_answers: int = 0
    num_tokens: int = 0
    num_later_tokens: int = 0  # those after the first increment
    first_seconds: float = 0.0  # until the first increment; a sum, as all of these
    later_seconds: float = 0.0  # from the first increment to the last
    num_rounds: int = 0  # that verified at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: "AnswerStats") -> "AnswerStats":
        names = [field.name for field in dataclasses.fields(self)]
        return AnswerStats(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def describe(self) -> str:
        """`42 tokens, 18.3 tokens/s, first after 0.21 s, accepted length 2.31, acceptance 65.5 %`.

        The second is a mean where there are several answers.
        """
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.num_later_tokens and self.later_seconds > 0:
            parts.append(f"{self.num_later_tokens / self.later_seconds:.1f} tokens/s")
        if self.num_tokens:
            parts.append(f"first after {self.first_seconds / self.num_answers:.2f} s")
        if self.num_rounds:
            parts.append(f"accepted length {1 + self.num_accepted_tokens / self.num_rounds:.2f}")
            parts.append(
                f"acceptance {self.num_accepted_tokens / self.num_draft_tokens:.1%}".replace("%", " %")
            )
        else:
            parts.append("no drafts")
        return ", ".join(parts)


class _Clock:
    """Collects when an answer's tokens came."""

    def __init__(self, before: EngineStats):
        self._before = before
        self._began = time.perf_counter()
        self._first = self._last = self._began
        self._num_tokens = self._num_first = 0

    def saw(self, output: RequestOutput) -> None:
        if output.token_ids:
            self._last = time.perf_counter()
            if not self._num_tokens:
                self._first, self._num_first = self._last, len(output.token_ids)
            self._num_tokens += len(output.token_ids)

    def stats(self, after: EngineStats) -> AnswerStats:
        before = self._before
        return AnswerStats(
            num_answers=1,
            num_tokens=self._num_tokens,
            num_later_tokens=self._num_tokens - self._num_first,
            first_seconds=self._first - self._began,
            later_seconds=self._last - self._first,
            num_rounds=after.num_drafts - before.num_drafts,
            num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        )


def answer(
    engine: Engine,
    request: EngineRequest,
    show: Callable[[RequestOutput], None],
    stopped: Callable[[], bool],
) -> tuple[str, AnswerStats]:
    """Runs one request on an engine that has no other; its text and figures.

    Args:
      show: gets every increment.
      stopped: asked after each step; once it says yes the request is aborted.

    Raises:
      InvalidRequestError: the engine can never serve it.
    """
    pieces: list[str] = []
    clock = _Clock(engine.stats())
    engine.add_request(request)
    finished = False
    try:
        while not finished and not stopped():
            for output in engine.step():
                clock.saw(output)
                pieces.append(output.text)
                show(output)
                finished = output.finish_reason is not None
    finally:
        if not finished:
            engine.abort(request.request_id)
        while engine.has_work():  # a dispatch that is still in flight belongs to this answer's figures
            engine.step()
    return "".join(pieces), clock.stats(engine.stats())
