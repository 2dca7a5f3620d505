"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them."""

import json
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtp_jax.request import RequestOutput
from mtp_jax.server.anthropic_body import CountBody, MessagesBody
from mtp_jax.server.async_engine import AsyncEngine
from mtp_jax.server.bodies import BoundedRoute
from mtp_jax.server.errors import ApiError
from mtp_jax.server.exchange import Exchange
from mtp_jax.server.prompts import chat_requests, chat_text, check_model, encode
from mtp_jax.server.responses import Tally, to_json
from mtp_jax.server.turns import ParserOptions, Segments, Turn, resolved
from mtp_jax.text.turn.parts import Call, Content, Part, Reasoning


def _event(payload: dict) -> str:
    text = to_json(payload)
    return f"event: {payload['type']}\ndata: {text}\n\n"


def _block(part: Part) -> dict:
    match part:
        case Reasoning():
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case Content():
            return {"type": "text", "text": part.text}
        case Call():
            name, arguments = part.name, json.loads(part.arguments)
            return {
                "type": "tool_use",
                "id": f"toolu_{uuid.uuid4().hex[:24]}",
                "name": name,
                "input": arguments,
            }


class AnthropicNarrator:
    """A call in the words of /v1/messages."""

    def __init__(self, name: str, model: str, turn: Turn, num_prompt_tokens: int):
        self._name, self._model, self._turn = name, model, turn
        self._num_prompt_tokens = num_prompt_tokens
        self._segments = Segments()

    def _message(self, content: list[dict], ending: dict, usage: dict) -> dict:
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **ending,
            "usage": usage,
        }

    def _ending(self, tally: Tally) -> dict:
        choice = tally.choices[0]
        stopped = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif self._turn.calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped}

    @staticmethod
    def _usage(tally: Tally) -> dict:
        usage = tally.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def whole(self, tally: Tally) -> dict:
        self._turn.push(tally.choices[0].text, is_last=True)
        content = [_block(part) for part in self._turn.parts]
        return self._message(content, self._ending(tally), self._usage(tally))

    def opening(self) -> list[str]:
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return [_event({"type": "message_start", "message": message})]

    def increment(self, index: int, output: RequestOutput) -> list[str]:
        is_last = output.finish_reason is not None
        steps = list(self._steps(self._turn.push(output.text, is_last)))
        return steps + (self._close() if is_last else [])

    def _steps(self, parts: list[Part]) -> list[str]:
        events = []
        for what, part in self._segments.push(parts):
            index = self._segments.index
            if what == "open":
                events += self._open(index, part)
            elif what == "more":
                assert isinstance(part, Reasoning | Content)
                key = "thinking" if isinstance(part, Reasoning) else "text"
                delta = {"type": f"{key}_delta", key: part.text}
                events.append(_event({"type": "content_block_delta", "index": index, "delta": delta}))
            else:
                events.append(self._stop(index))
        return events

    @staticmethod
    def _open(index: int, part: Part) -> list[str]:
        block = _block(part)
        if not isinstance(part, Call):
            block |= {"thinking": ""} if isinstance(part, Reasoning) else {"text": ""}
            return [_event({"type": "content_block_start", "index": index, "content_block": block})]
        delta = {"type": "input_json_delta", "partial_json": part.arguments}
        return [
            _event({"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}),
            _event({"type": "content_block_delta", "index": index, "delta": delta}),
        ]

    def _stop(self, index: int) -> str:
        return _event({"type": "content_block_stop", "index": index})

    def _close(self) -> list[str]:
        return [self._stop(self._segments.index) for _ in self._segments.finish()]

    def closing(self, tally: Tally) -> list[str]:
        delta = {"type": "message_delta", "delta": self._ending(tally), "usage": self._usage(tally)}
        return [_event(delta), _event({"type": "message_stop"})]

    def failure(self, error: ApiError) -> list[str]:
        return [_event(error.anthropic_body)]


def anthropic_routes(engine: AsyncEngine, parsers: ParserOptions) -> APIRouter:
    """The routes over `engine`."""
    router = APIRouter(prefix="/v1/messages", route_class=BoundedRoute)

    @router.post("")
    async def messages(body: MessagesBody, request: Request) -> Response:
        core = engine.engine
        check_model(core, body.model)
        name = f"msg_{uuid.uuid4().hex}"
        requests, turns = await chat_requests(core, body.as_chat(), name, resolved(parsers, core))
        submission = await engine.submit(requests)
        length = len(requests[0].prompt_token_ids)
        narrator = AnthropicNarrator(name, core.model_name, turns[0], length)
        return await Exchange(submission, narrator).answer(request, body.stream)

    @router.post("/count_tokens")
    async def count_tokens(body: CountBody) -> dict:
        core = engine.engine
        check_model(core, body.model)
        text, _ = await chat_text(core, body.as_chat(), resolved(parsers, core))
        (ids,) = await encode(core, [text], False, "messages")
        return {"input_tokens": len(ids)}

    return router
