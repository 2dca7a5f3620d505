"""What answers have when asked: log-probabilities, token ids, the prompt again (echo), and the best of many.

It is put into objects that the envelopes have made. In a stream, what belongs to tokens whose text is still
held back goes with the next chunk, so that every token is told.
"""

import codecs
import dataclasses
from collections.abc import Sequence

from mtp_jax.request import EngineRequest, RequestOutput, TokenLogprobs
from mtp_jax.server.interface import Tokenizer
from mtp_jax.server.protocol import CompletionBody, SamplingBody
from mtp_jax.server.responses import Choice, Tally

LEAST = -9999.0  # JSON has no -inf


def token_text(data: bytes) -> str:
    """A token as OpenAI writes it: its text, or its bytes where they are no characters by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(entry: TokenLogprobs) -> float:
    return max(entry.logprob, LEAST)


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict:
    """`choices[].logprobs` of a chat."""

    def named(entry: TokenLogprobs) -> dict:
        return {"token": token_text(entry.data), "logprob": _number(entry), "bytes": list(entry.data)}

    content = [named(entry) | {"top_logprobs": [named(other) for other in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion; offsets go on from piece to piece of a stream."""

    def __init__(self):
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, entries: Sequence[TokenLogprobs | bytes]) -> dict:
        """The next tokens; the first of a prompt has bytes but no probability."""
        made: dict[str, list] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for entry in entries:
            data = entry if isinstance(entry, bytes) else entry.data
            made["tokens"].append(token_text(data))
            made["text_offset"].append(self._offset)
            self._offset += len(self._characters.decode(data))
            known = isinstance(entry, TokenLogprobs)
            made["token_logprobs"].append(_number(entry) if known else None)
            made["top_logprobs"].append(self._top(entry) if known else None)
        return made

    @staticmethod
    def _top(entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself; of different tokens of one text the likeliest."""
        top: dict[str, float] = {}
        for other in (*entry.top, entry):
            top.setdefault(token_text(other.data), _number(other))
        return top


def prompt_logprobs(entries: Sequence[TokenLogprobs]) -> list[dict | None]:
    """vLLM's `prompt_logprobs`: by token id, and null for the first token."""
    told: list[dict | None] = [None]
    for entry in entries:
        both = {other.token_id: other for other in (*entry.top, entry)}
        told.append(
            {str(i): {"logprob": _number(e), "decoded_token": token_text(e.data)} for i, e in both.items()}
        )
    return told


@dataclasses.dataclass
class _Pending:
    """What a choice of a stream has not told yet."""

    offsets: CompletionLogprobs = dataclasses.field(default_factory=CompletionLogprobs)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs | bytes] = dataclasses.field(default_factory=list)
    has_prompt: bool = False  # the echoed prompt's tokens are among `logprobs`, or were told
    has_begun: bool = False


class Details:
    """The details that one call's body asks for."""

    def __init__(self, tokenizer: Tokenizer, body: SamplingBody, requests: Sequence[EngineRequest]):
        self._tokenizer, self._requests, self._body = tokenizer, requests, body
        self._completion = body if isinstance(body, CompletionBody) else None
        asked = getattr(body, "logprobs", None)
        self._logprobs = asked is not None and asked is not False  # 0 asks for the tokens' own
        self._echo = self._completion is not None and bool(self._completion.echo)
        self._pending = [_Pending() for _ in requests] if body.stream else []
        self._prompt_texts: dict[tuple[int, ...], str] = {}

    # Whole answers

    def whole(self, answer: dict, tally: Tally) -> dict:
        """The answer with its details."""
        for choice, told, request in zip(tally.choices, answer["choices"], self._requests, strict=True):
            self._whole_choice(choice, told, request)
        if self._completion is None and self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._requests[0].prompt_token_ids)
        if self._completion is None and self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._cut_prompt(tally.choices[0])
        answer["choices"] = self._best(answer["choices"], tally)
        return answer

    def _whole_choice(self, choice: Choice, told: dict, request: EngineRequest) -> None:
        entries: list[TokenLogprobs | bytes] = list(choice.logprobs)
        if self._echo:
            entries = self._echoed(request, choice.prompt_logprobs) + entries
            told["text"] = self._prompt_text(request) + told["text"]
        if self._logprobs:
            told["logprobs"] = self._told_logprobs(entries, CompletionLogprobs())
        if self._body.return_token_ids:
            told["token_ids"] = choice.token_ids
        if self._completion is not None and self._body.return_token_ids:
            told["prompt_token_ids"] = list(request.prompt_token_ids)
        if self._completion is not None and self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._cut_prompt(choice)

    def _cut_prompt(self, choice: Choice) -> list[dict | None]:
        count = self._body.prompt_logprobs
        cut = (dataclasses.replace(entry, top=entry.top[:count]) for entry in choice.prompt_logprobs)
        return prompt_logprobs(list(cut))

    def _best(self, told: list[dict], tally: Tally) -> list[dict]:
        """best_of: of each prompt's completions the n with the highest mean log-probability."""
        n = self._body.n or 1
        made = self._body.num_choices
        if made <= n:
            return told

        def likelihood(index: int) -> float:
            entries = tally.choices[index].logprobs
            return sum(entry.logprob for entry in entries) / max(len(entries), 1)

        kept = []
        for first in range(0, len(told), made):
            ranked = sorted(range(first, first + made), key=likelihood, reverse=True)
            kept += [told[index] for index in ranked[:n]]
        return [choice | {"index": index} for index, choice in enumerate(kept)]

    # Streams

    def chunks(self, chunks: list[dict], index: int, output: RequestOutput) -> list[dict]:
        """The chunks of one increment with their details."""
        pending = self._pending[index]
        if self._echo and not pending.has_prompt:
            pending.logprobs += self._echoed(self._requests[index], output.prompt_logprobs)
            pending.has_prompt = True
        pending.token_ids += output.token_ids
        pending.logprobs += output.logprobs
        if chunks:
            self._tell(chunks[0]["choices"][0], index, pending)
        return chunks

    def _tell(self, told: dict, index: int, pending: _Pending) -> None:
        """Puts what is pending into the first chunk that there is for it."""
        request = self._requests[index]
        if self._echo and not pending.has_begun:
            told["text"] = self._prompt_text(request) + told["text"]
        if self._logprobs and pending.logprobs:
            told["logprobs"] = self._told_logprobs(pending.logprobs, pending.offsets)
        if self._body.return_token_ids:
            told["token_ids"] = pending.token_ids
            if not pending.has_begun:
                told["prompt_token_ids"] = list(request.prompt_token_ids)
        pending.token_ids, pending.logprobs, pending.has_begun = [], [], True

    # Parts

    def _told_logprobs(self, entries: Sequence[TokenLogprobs | bytes], offsets: CompletionLogprobs) -> dict:
        if self._completion is not None:
            return offsets.take(entries)
        return chat_logprobs([entry for entry in entries if isinstance(entry, TokenLogprobs)])

    def _echoed(
        self, request: EngineRequest, entries: Sequence[TokenLogprobs]
    ) -> list[TokenLogprobs | bytes]:
        """The prompt's tokens, the first without a probability."""
        count = self._completion.logprobs if self._completion is not None else 0
        first = self._tokenizer.decode_batch([request.prompt_token_ids[:1]], skip_special_tokens=False)[0]
        cut = [dataclasses.replace(entry, top=entry.top[:count]) for entry in entries]
        return [first.encode(), *cut]

    def _prompt_text(self, request: EngineRequest) -> str:
        ids = request.prompt_token_ids
        if ids not in self._prompt_texts:
            skip = self._body.skip_special_tokens
            self._prompt_texts[ids] = self._tokenizer.decode_batch([ids], skip_special_tokens=skip)[0]
        return self._prompt_texts[ids]
