"""POST /v1/responses: OpenAI's newer API, without its memory."""

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtp_jax.request import RequestOutput
from mtp_jax.server.async_engine import AsyncEngine
from mtp_jax.server.bodies import BoundedRoute
from mtp_jax.server.errors import ApiError
from mtp_jax.server.exchange import Exchange
from mtp_jax.server.interface import EngineCore
from mtp_jax.server.prompts import chat_requests, check_model
from mtp_jax.server.responses import Tally, to_json
from mtp_jax.server.responses_body import ResponsesBody
from mtp_jax.server.turns import ParserOptions, Segments, Turn, resolved
from mtp_jax.text.turn.parts import Call, Content, Part, Reasoning

_KINDS = {Reasoning: ("reasoning", "rs"), Content: ("message", "msg"), Call: ("function_call", "fc")}


def _new_id(part: Part) -> str:
    return f"{_KINDS[type(part)][1]}_{uuid.uuid4().hex}"


def _content(part: Reasoning | Content, text: str) -> dict:
    if isinstance(part, Reasoning):
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(part: Part, identity: str, status: str) -> dict:
    """An output item; while it is in progress it has no content yet."""
    done = status != "in_progress"
    item = {"type": _KINDS[type(part)][0], "id": identity, "status": status}
    match part:
        case Call():
            more = {"call_id": f"call_{identity[3:27]}", "name": part.name}
            return item | more | {"arguments": part.arguments if done else ""}
        case Content():
            return item | {"role": "assistant", "content": [_content(part, part.text)] if done else []}
        case Reasoning():
            return item | {"summary": [], "content": [_content(part, part.text)] if done else []}


class ResponsesNarrator:
    """A call in the words of /v1/responses."""

    def __init__(self, core: EngineCore, name: str, body: ResponsesBody, turn: Turn):
        self._model, self._tokenizer = core.model_name, core.tokenizer
        self._name, self._body, self._turn = name, body, turn
        self._created = int(time.time())
        self._segments = Segments()
        self._num_events = 0
        self._items: list[tuple[Part, str]] = []  # what was opened, with its text so far; and its id

    def _response(self, status: str, output: list[dict], more: dict) -> dict:
        body = self._body.model_dump(include={"instructions", "max_output_tokens", "metadata", "tools"})
        choice = self._body.tool_choice
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            **body,
            "tools": body["tools"] or [],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "temperature": 1.0 if self._body.temperature is None else self._body.temperature,
            "top_p": 1.0 if self._body.top_p is None else self._body.top_p,
            "reasoning": {"effort": self._body.reasoning and self._body.reasoning.effort, "summary": None},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **more,
        }

    def _finished(self, tally: Tally) -> dict:
        """The response at its end. The last item of one that was cut off is incomplete itself."""
        cut = tally.choices[0].finish_reason == "length"
        status = "incomplete" if cut else "completed"
        output = [_item(part, identity, "completed") for part, identity in self._items]
        if cut and output:
            output[-1]["status"] = status
        details = {"reason": "max_output_tokens"} if cut else None
        return self._response(status, output, {"usage": self._usage(tally), "incomplete_details": details})

    def _usage(self, tally: Tally) -> dict:
        usage = tally.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # Counted anew: where reasoning ends among the tokens of one step, nobody knows.
        (thoughts,) = self._tokenizer.encode_batch([self._turn.reasoning], add_special_tokens=False)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(thoughts)},
            "total_tokens": usage["total_tokens"],
        }

    def whole(self, tally: Tally) -> dict:
        self._turn.push(tally.choices[0].text, is_last=True)
        self._items = [(part, _new_id(part)) for part in self._turn.parts]
        return self._finished(tally)

    def _event(self, kind: str, **fields: object) -> str:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        text = to_json(payload)
        return f"event: {kind}\ndata: {text}\n\n"

    def opening(self) -> list[str]:
        response = self._response("in_progress", [], {})
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def increment(self, index: int, output: RequestOutput) -> list[str]:
        is_last = output.finish_reason is not None
        events: list[str] = []
        for what, part in self._segments.push(self._turn.push(output.text, is_last)):
            events += self._step(what, part)
        if is_last:
            for what, part in self._segments.finish():
                events += self._step(what, part)
        return events

    def _step(self, what: str, part: Part) -> list[str]:
        if what == "open":
            self._items.append((part if isinstance(part, Call) else type(part)(""), _new_id(part)))
        whole, identity = self._items[-1]
        where = {"item_id": identity, "output_index": len(self._items) - 1}
        if isinstance(part, Call):
            return self._call(what, part, identity, where)
        assert isinstance(whole, Content | Reasoning)
        where["content_index"] = 0
        kind = "response.output_text" if isinstance(part, Content) else "response.reasoning_text"
        more = {"logprobs": []} if isinstance(part, Content) else {}
        if what == "open":
            return [
                self._added(part, identity),
                self._event("response.content_part.added", part=_content(part, ""), **where),
            ]
        if what == "more":
            self._items[-1] = (type(whole)(whole.text + part.text), identity)
            return [self._event(f"{kind}.delta", delta=part.text, **more, **where)]
        return [
            self._event(f"{kind}.done", text=whole.text, **more, **where),
            self._event("response.content_part.done", part=_content(whole, whole.text), **where),
            self._done(whole, identity),
        ]

    def _call(self, what: str, call: Call, identity: str, where: dict) -> list[str]:
        if what == "open":
            return [self._added(call, identity)]
        kind = "response.function_call_arguments"
        return [
            self._event(f"{kind}.delta", delta=call.arguments, **where),
            self._event(f"{kind}.done", arguments=call.arguments, name=call.name, **where),
            self._done(call, identity),
        ]

    def _added(self, part: Part, identity: str) -> str:
        item, index = _item(part, identity, "in_progress"), len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _done(self, part: Part, identity: str) -> str:
        item, index = _item(part, identity, "completed"), len(self._items) - 1
        return self._event("response.output_item.done", output_index=index, item=item)

    def closing(self, tally: Tally) -> list[str]:
        response = self._finished(tally)
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> list[str]:
        told = {"code": error.code or "server_error", "message": error.message}
        output = [_item(part, identity, "incomplete") for part, identity in self._items]
        return [self._event("response.failed", response=self._response("failed", output, {"error": told}))]


def responses_routes(engine: AsyncEngine, parsers: ParserOptions) -> APIRouter:
    """The route over `engine`."""
    router = APIRouter(prefix="/v1", route_class=BoundedRoute)

    @router.post("/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        core = engine.engine
        check_model(core, body.model)
        name = f"resp_{uuid.uuid4().hex}"
        requests, turns = await chat_requests(core, body.as_chat(), name, resolved(parsers, core))
        submission = await engine.submit(requests)
        narrator = ResponsesNarrator(core, name, body, turns[0])
        return await Exchange(submission, narrator).answer(request, body.stream)

    return router
