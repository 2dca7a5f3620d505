"""One call from its submission to its last byte, in whatever protocol the client speaks."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

from fastapi import Request
from starlette.responses import Response

from mtp_jax.request import RequestOutput
from mtp_jax.server.async_engine import Submission
from mtp_jax.server.errors import ApiError, as_api_error
from mtp_jax.server.middleware import request_id
from mtp_jax.server.responses import Tally, to_json
from mtp_jax.server.streaming import EventStream, unless_disconnected

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; it is for the log


class Narrator(Protocol):
    """Tells a call's outputs in the words of one protocol: as one object, or as server-sent events."""

    def whole(self, tally: Tally) -> dict: ...
    def opening(self) -> list[str]: ...
    def increment(self, index: int, output: RequestOutput) -> list[str]: ...
    def closing(self, tally: Tally) -> list[str]: ...
    def failure(self, error: ApiError) -> list[str]: ...


class Exchange:
    """One call: its submission, what it has produced, and how it is told."""

    def __init__(self, submission: Submission, narrator: Narrator):
        self._submission, self._narrator = submission, narrator
        self._tally = Tally(submission.requests)
        self._started = time.monotonic()
        self._log_id = request_id.get()

    async def answer(self, request: Request, stream: bool | None) -> Response:
        """The whole response; it frees what still runs, however it ends."""
        if stream:
            return EventStream(self._events(), self._close)
        try:
            answer = await unless_disconnected(request.receive, self._collect())
        finally:
            self._close()
        if answer is None:
            return Response(status_code=CLIENT_GONE)
        return Response(answer, media_type="application/json")

    async def _collect(self) -> str:
        async for index, output in self._submission:
            self._tally.add(index, output)
        # Megabytes, with log-probabilities: in a thread, for others wait in this one.
        return await asyncio.to_thread(self._written)

    def _written(self) -> str:
        return to_json(self._narrator.whole(self._tally), (", ", ": "))

    async def _events(self) -> AsyncIterator[str]:
        """The answer as server-sent events; an error on the way is told at the end."""
        narrator = self._narrator
        for event in narrator.opening():
            yield event
        try:
            async for index, output in self._submission:
                self._tally.add(index, output)
                for event in narrator.increment(index, output):
                    yield event
        except Exception as error:
            answer = as_api_error(error)
            if answer.status == 500:
                log.exception("request %s failed while streaming", self._log_id)
            last = narrator.failure(answer)
        else:
            last = narrator.closing(self._tally)
        for event in last:
            yield event

    def _close(self) -> None:
        """Frees what is still running, and logs the call."""
        unfinished = len(self._submission.unfinished)
        self._submission.close()
        seconds = time.monotonic() - self._started
        firsts = [timing.first for timing in self._submission.timings.values() if timing.first is not None]
        first = f"{min(firsts) - self._started:.3f} s" if firsts else "none"
        reasons = ",".join(choice.finish_reason or "abort" for choice in self._tally.choices)
        stats = self._tally.speculation()
        acceptance = f", acceptance {stats.acceptance_rate:.1%}" if stats.num_draft_tokens else ""
        log.info(
            "request %s: %d prompt + %d completion tokens in %.3f s, first after %s, %s%s%s",
            self._log_id,
            self._tally.prompt_tokens,
            self._tally.completion_tokens,
            seconds,
            first,
            reasons,
            acceptance,
            f", {unfinished} aborted" if unfinished else "",
        )
