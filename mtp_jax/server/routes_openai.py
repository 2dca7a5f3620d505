"""POST /v1/completions, POST /v1/chat/completions, GET /v1/models."""

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtp_jax.server.async_engine import AsyncEngine, Submission
from mtp_jax.server.bodies import BoundedRoute
from mtp_jax.server.errors import as_api_error
from mtp_jax.server.middleware import request_id
from mtp_jax.server.prompts import chat_requests, check_model, completion_requests
from mtp_jax.server.protocol import ChatBody, CompletionBody, SamplingBody
from mtp_jax.server.responses import DONE, ChatEnvelope, CompletionEnvelope, Tally, event
from mtp_jax.server.streaming import EventStream, unless_disconnected
from mtp_jax.server.turns import ParserOptions, resolved

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; it is for the log


class Exchange:
    """One call: its submission, what it has produced, and how it is told."""

    def __init__(
        self,
        engine: AsyncEngine,
        submission: Submission,
        envelope: CompletionEnvelope | ChatEnvelope,
        body: SamplingBody,
    ):
        self._submission, self._envelope, self._body = submission, envelope, body
        self._num_speculative_tokens = engine.engine.config.num_speculative_tokens
        self._tally = Tally(submission.requests)
        self._started = time.monotonic()
        self._log_id = request_id.get()

    def _metrics(self) -> dict:
        return (
            {"metrics": self._tally.metrics(self._num_speculative_tokens)}
            if self._body.include_metrics
            else {}
        )

    async def collect(self) -> dict:
        """The whole answer."""
        async for index, output in self._submission:
            self._tally.add(index, output)
        return self._envelope.full(self._tally, self._metrics())

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events; an error on the way becomes the last but one."""
        envelope = self._envelope
        extra = {"usage": None} if self._body.include_usage else {}
        for chunk in envelope.opening(len(self._submission.requests), extra):
            yield event(chunk)
        try:
            async for index, output in self._submission:
                self._tally.add(index, output)
                for chunk in envelope.chunks(index, output, extra):
                    yield event(chunk)
        except Exception as error:
            answer = as_api_error(error)
            if answer.status == 500:
                log.exception("request %s failed while streaming", self._log_id)
            yield event(answer.body)
        else:
            closing = ({"usage": self._tally.usage()} if self._body.include_usage else {}) | self._metrics()
            if closing:
                yield event(envelope.closing(closing))
        yield DONE

    def close(self) -> None:
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


async def _answer(request: Request, exchange: Exchange, stream: bool | None) -> Response:
    if stream:
        return EventStream(exchange.events(), exchange.close)
    try:
        answer = await unless_disconnected(request.receive, exchange.collect())
    finally:
        exchange.close()
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    return Response(json.dumps(answer, ensure_ascii=False), media_type="application/json")


def openai_routes(engine: AsyncEngine, fingerprint: str, created: int, parsers: ParserOptions) -> APIRouter:
    """The /v1 routes over `engine`."""
    router = APIRouter(prefix="/v1", route_class=BoundedRoute)

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        core = engine.engine
        check_model(core, body.model)
        name = f"cmpl-{uuid.uuid4().hex}"
        submission = await engine.submit(await completion_requests(core, body, name))
        envelope = CompletionEnvelope(name, int(time.time()), core.model_name, fingerprint)
        return await _answer(request, Exchange(engine, submission, envelope, body), body.stream)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        core = engine.engine
        check_model(core, body.model)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        requests, turns = await chat_requests(core, body, name, resolved(parsers, core))
        submission = await engine.submit(requests)
        envelope = ChatEnvelope(name, int(time.time()), core.model_name, fingerprint, turns)
        return await _answer(request, Exchange(engine, submission, envelope, body), body.stream)

    def card() -> dict:
        core = engine.engine
        return {
            "id": core.model_name,
            "object": "model",
            "created": created,
            "owned_by": "mtp-jax",
            "max_model_len": core.config.max_model_len,
        }

    @router.get("/models")
    async def models() -> dict:
        return {"object": "list", "data": [card()]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict:
        check_model(engine.engine, name)
        return card()

    return router
