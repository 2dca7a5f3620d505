"""OpenAI's response objects, built as plain dicts: a chunk is made per token, so this is a hot path."""

import dataclasses
import itertools
import json
from collections.abc import Iterator

from mtp_jax.request import EngineRequest, RequestOutput, SpeculationStats, TokenLogprobs
from mtp_jax.server.turns import Turn
from mtp_jax.text.turn.parts import Call, Content, Part, Reasoning

DONE = "data: [DONE]\n\n"


def to_json(payload: dict, separators: tuple[str, str] = (",", ":")) -> str:
    """JSON that UTF-8 can carry: an answer may repeat half a surrogate pair of its request, as an escape."""
    text = json.dumps(payload, ensure_ascii=False, separators=separators)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(payload, separators=separators)
    return text


def event(payload: dict) -> str:
    """One server-sent event."""
    return f"data: {to_json(payload)}\n\n"


@dataclasses.dataclass
class Choice:
    """One completion as it grows."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationStats | None = None


class Tally:
    """Collects outputs into choices, and counts what is billed: each prompt once, every completion token."""

    def __init__(self, requests: tuple[EngineRequest, ...]):
        self.requests = requests
        self.choices = [Choice() for _ in requests]
        self._cached = [0] * len(requests)

    def add(self, index: int, output: RequestOutput) -> None:
        choice = self.choices[index]
        choice.text += output.text
        choice.token_ids += output.token_ids
        choice.logprobs += output.logprobs
        choice.prompt_logprobs += output.prompt_logprobs
        self._cached[index] = max(self._cached[index], output.num_cached_tokens)
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason.value
            choice.stop_reason = output.stop_reason
            choice.speculation = output.speculation

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt_token_ids) for r in self.requests if r.shares_prompt_with is None)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def usage(self) -> dict:
        owners = (i for i, r in enumerate(self.requests) if r.shares_prompt_with is None)
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached[i] for i in owners)},
        }

    def speculation(self) -> SpeculationStats:
        """All choices together."""
        stats = [choice.speculation for choice in self.choices if choice.speculation is not None]
        width = max((len(s.acceptance_histogram) for s in stats), default=0)
        padded = [s.acceptance_histogram + (0,) * (width - len(s.acceptance_histogram)) for s in stats]
        return SpeculationStats(
            num_rounds=sum(s.num_rounds for s in stats),
            num_draft_tokens=sum(s.num_draft_tokens for s in stats),
            num_accepted_tokens=sum(s.num_accepted_tokens for s in stats),
            acceptance_histogram=tuple(sum(column) for column in zip(*padded, strict=True)),
            per_round_accepted=tuple(itertools.chain.from_iterable(s.per_round_accepted for s in stats)),
        )

    def metrics(self, num_speculative_tokens: int, detailed: bool = False) -> dict:
        """vLLM's per-request `metrics` object; in detail it has each round, one choice after the other."""
        stats = self.speculation()
        return {
            "speculative_decoding": {
                "mean_acceptance_length": stats.mean_acceptance_length,
                "draft_acceptance_rate": stats.acceptance_rate,
                "acceptance_histogram": list(stats.acceptance_histogram),
                "num_spec_steps": stats.num_rounds,
                "num_accepted_draft_tokens": stats.num_accepted_tokens,
                "num_draft_tokens": stats.num_draft_tokens,
                "num_spec_tokens": num_speculative_tokens,
                **({"per_step_accepted": list(stats.per_round_accepted)} if detailed else {}),
            }
        }


@dataclasses.dataclass(frozen=True)
class Envelope:
    """What all objects of one answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def _wrap(self, kind: str, choices: list[dict], extra: dict) -> dict:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **extra,
        }


class CompletionEnvelope(Envelope):
    """Objects of /v1/completions."""

    def full(self, tally: Tally, extra: dict) -> dict:
        choices = [
            self._choice(index, choice.text, choice.finish_reason, choice.stop_reason)
            for index, choice in enumerate(tally.choices)
        ]
        return self._wrap("text_completion", choices, {"usage": tally.usage(), **extra})

    def opening(self, count: int, extra: dict) -> list[dict]:
        return []

    def chunks(self, index: int, output: RequestOutput, extra: dict) -> list[dict]:
        if not output.text and output.finish_reason is None:
            return []
        choice = self._choice(index, output.text, output.finish_reason, output.stop_reason)
        return [self._wrap("text_completion", [choice], extra)]

    def closing(self, extra: dict) -> dict:
        return self._wrap("text_completion", [], extra)

    @staticmethod
    def _choice(index: int, text: str, finish: str | None, stop: int | str | None) -> dict:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}


@dataclasses.dataclass(frozen=True)
class ChatEnvelope(Envelope):
    """Objects of /v1/chat/completions. A turn for each choice."""

    turns: tuple[Turn, ...] = ()

    def full(self, tally: Tally, extra: dict) -> dict:
        choices = []
        for index, (choice, turn) in enumerate(zip(tally.choices, self.turns, strict=True)):
            turn.push(choice.text, is_last=True)
            choices.append(
                {
                    "index": index,
                    "message": _message(turn),
                    "logprobs": None,
                    "finish_reason": turn.finish_reason(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                }
            )
        return self._wrap("chat.completion", choices, {"usage": tally.usage(), **extra})

    def opening(self, count: int, extra: dict) -> list[dict]:
        """The role, for each choice, before any text."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta, None, None, extra) for index in range(count)]

    def chunks(self, index: int, output: RequestOutput, extra: dict) -> list[dict]:
        turn, is_last = self.turns[index], output.finish_reason is not None
        num_calls = len(turn.calls)
        parts = turn.push(output.text, is_last)
        new_calls = iter(range(num_calls, len(turn.calls)))
        made = [self._chunk(index, _delta(part, turn, new_calls), None, None, extra) for part in parts]
        if is_last:
            reason = turn.finish_reason(output.finish_reason)
            made.append(self._chunk(index, {}, reason, output.stop_reason, extra))
        return made

    def closing(self, extra: dict) -> dict:
        return self._wrap("chat.completion.chunk", [], extra)

    def _chunk(
        self, index: int, delta: dict, finish: str | None, stop: int | str | None, extra: dict
    ) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = stop
        return self._wrap("chat.completion.chunk", [choice], extra)


def tool_call(identity: str, call: Call) -> dict:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _message(turn: Turn) -> dict:
    content = None if turn.calls and not turn.content else turn.content
    message: dict = {"role": "assistant", "content": content, "refusal": None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [tool_call(*item) for item in turn.calls]
    return message


def _delta(part: Part, turn: Turn, new_calls: Iterator[int]) -> dict:
    match part:
        case Reasoning():
            return {"reasoning_content": part.text}
        case Content():
            return {"content": part.text}
        case Call():
            index = next(new_calls)
            return {"tool_calls": [{"index": index, **tool_call(*turn.calls[index])}]}
