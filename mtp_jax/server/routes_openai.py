"""POST /v1/completions, POST /v1/chat/completions, GET /v1/models."""

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtp_jax.request import RequestOutput
from mtp_jax.server.async_engine import AsyncEngine, Submission
from mtp_jax.server.bodies import BoundedRoute
from mtp_jax.server.details import Details
from mtp_jax.server.errors import ApiError
from mtp_jax.server.exchange import Exchange
from mtp_jax.server.interface import EngineCore
from mtp_jax.server.prompts import chat_requests, check_model, completion_requests
from mtp_jax.server.protocol import ChatBody, CompletionBody, SamplingBody
from mtp_jax.server.responses import DONE, ChatEnvelope, CompletionEnvelope, Tally, event
from mtp_jax.server.turns import ParserOptions, resolved


class OpenAINarrator:
    """A call in the words of /v1/completions or /v1/chat/completions."""

    def __init__(
        self,
        core: EngineCore,
        envelope: CompletionEnvelope | ChatEnvelope,
        body: SamplingBody,
        submission: Submission,
        spec_metrics: str,
    ):
        self._spec_metrics = "summary" if spec_metrics == "none" and body.include_metrics else spec_metrics
        self._envelope, self._body = envelope, body
        self._num_choices = len(submission.requests)
        self._num_speculative_tokens = core.config.num_speculative_tokens
        self._extra = {"usage": None} if body.include_usage else {}
        self._made = [0] * self._num_choices  # tokens of each choice so far
        self._num_prompt_tokens = [len(request.prompt_token_ids) for request in submission.requests]
        self._details = Details(core.tokenizer, body, submission.requests)

    def _metrics(self, tally: Tally) -> dict:
        if self._spec_metrics == "none":
            return {}
        detailed = self._spec_metrics == "detailed"
        return {"metrics": tally.metrics(self._num_speculative_tokens, detailed)}

    def _beside(self, index: int) -> dict:
        """What a chunk of a choice has besides its choices."""
        if not self._body.continuous_usage:
            return self._extra
        prompt, made = self._num_prompt_tokens[index], self._made[index]
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return {"usage": usage}

    def whole(self, tally: Tally) -> dict:
        return self._details.whole(self._envelope.full(tally, self._metrics(tally)), tally)

    def opening(self) -> list[str]:
        return [event(chunk) for chunk in self._envelope.opening(self._num_choices, self._beside(0))]

    def increment(self, index: int, output: RequestOutput) -> list[str]:
        self._made[index] += len(output.token_ids)
        chunks = self._envelope.chunks(index, output, self._beside(index))
        return [event(chunk) for chunk in self._details.chunks(chunks, index, output)]

    def closing(self, tally: Tally) -> list[str]:
        """A chunk without choices only for those who asked: many clients take the first choice of each."""
        if not (self._body.include_usage or self._body.include_metrics):
            return [DONE]
        extra = ({"usage": tally.usage()} if self._body.include_usage else {}) | self._metrics(tally)
        return [event(self._envelope.closing(extra)), DONE]

    def failure(self, error: ApiError) -> list[str]:
        return [event(error.body), DONE]


def openai_routes(
    engine: AsyncEngine, fingerprint: str, created: int, parsers: ParserOptions, spec_metrics: str
) -> APIRouter:
    """The /v1 routes over `engine`."""
    router = APIRouter(prefix="/v1", route_class=BoundedRoute)

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        core = engine.engine
        check_model(core, body.model)
        name = f"cmpl-{uuid.uuid4().hex}"
        submission = await engine.submit(await completion_requests(core, body, name))
        envelope = CompletionEnvelope(name, int(time.time()), core.model_name, fingerprint)
        narrator = OpenAINarrator(core, envelope, body, submission, spec_metrics)
        return await Exchange(submission, narrator).answer(request, body.stream)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        core = engine.engine
        check_model(core, body.model)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        requests, turns = await chat_requests(core, body, name, resolved(parsers, core))
        submission = await engine.submit(requests)
        envelope = ChatEnvelope(name, int(time.time()), core.model_name, fingerprint, turns)
        narrator = OpenAINarrator(core, envelope, body, submission, spec_metrics)
        return await Exchange(submission, narrator).answer(request, body.stream)

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
