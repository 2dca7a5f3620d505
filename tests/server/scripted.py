"""A tiny deterministic engine with the real one's interface: it repeats the prompt, a few tokens a step.

Tokens are Unicode code points (0 ends a completion), so every expected text can be read off. The
completion of a prompt is the prompt's characters, over and over, shifted by the seed when it samples.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.stats import EngineStats
from mtp_jax.errors import CheckpointError, InvalidRequestError
from mtp_jax.progress import Report
from mtp_jax.request import EngineRequest, FinishReason, GrammarSpec, RequestOutput, SpeculationStats
from mtp_jax.server.arguments import ServeOptions

EOS = 0
VOCAB = 0x110000


class CharacterTokenizer:
    """A token is a character. The chat template writes the turns with their roles; with `raw` in
    chat_template_kwargs, the last message alone."""

    vocab_size = VOCAB
    chat_template: str | None = "{{ tools }} <tool_call> </think>"  # what a parser is chosen by
    special_texts: frozenset[str] = frozenset()

    def use_chat_template(self, template: str) -> None:
        self.chat_template = template

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids) for ids in sequences]

    def max_text_bytes(self, num_tokens: int) -> int:
        return 4 * num_tokens  # no character is longer

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != EOS)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        if variables.get("raw"):
            return str(messages[-1]["content"])
        named = "".join(f"<tool>{tool['function']['name']}" for tool in tools or ())
        text = named + "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


@dataclasses.dataclass
class _Running:
    request: EngineRequest
    waited: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    sent: int = 0  # characters of `text` that were handed out
    cached: int = 0
    started: bool = False
    speculation: SpeculationStats = SpeculationStats()  # noqa: RUF009 - frozen


def completion_token(request: EngineRequest, position: int) -> int:
    """Token number `position` of a completion: the prompt again; `!` in it stands for end-of-sequence."""
    token = request.prompt_token_ids[position % len(request.prompt_token_ids)]
    if token == ord("!") and not request.params.ignore_eos:
        return EOS
    return token + (request.seed % 7 if request.params.temperature > 0 else 0)


class ScriptedEngine:
    """A small honest engine: queueing, pages, stop strings, budgets, aborts and counters.

    A step gives each running request up to K + 1 tokens and takes `step_seconds`. A prompt that
    contains CRASH kills the step; one that contains HANG stops it until `release` is set.
    """

    def __init__(self, config: EngineConfig, step_seconds: float = 0.0, model_name: str = "scripted"):
        self.config, self.model_name = config, model_name
        self.model_config = ModelConfig("scripted", VOCAB, 8, 1, 1, 1, 8, 8)
        self.tokenizer = CharacterTokenizer()
        self.release = threading.Event()
        self.closed = False
        self._step_seconds = step_seconds
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._seen: set[tuple[int, ...]] = set()
        self._stats = EngineStats(num_accepted_per_position=(0,) * config.num_speculative_tokens)

    def compile_grammar(self, spec: GrammarSpec) -> None:
        raise InvalidRequestError(spec.field, spec.kind, "null: a script cannot be held to a grammar")

    def add_request(self, request: EngineRequest) -> None:
        if self._pages(len(request.prompt_token_ids) + 1) > self.config.num_pages:
            raise InvalidRequestError(
                "prompt", len(request.prompt_token_ids), "a prompt that fits the KV pages"
            )
        self._waiting.append(_Running(request, time.monotonic()))

    def abort(self, request_id: str) -> bool:
        before = len(self._waiting) + len(self._running)
        self._waiting = [item for item in self._waiting if item.request.request_id != request_id]
        self._running = [item for item in self._running if item.request.request_id != request_id]
        return len(self._waiting) + len(self._running) < before

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[RequestOutput]:
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            self._running.append(self._waiting.pop(0))
        time.sleep(self._step_seconds)
        outputs = [self._advance(item) for item in self._running]
        done = {output.request_id for output in outputs if output.finish_reason is not None}
        self._running = [item for item in self._running if item.request.request_id not in done]
        self._count(ticks=1, useful_ticks=1)
        return outputs

    def stats(self) -> EngineStats:
        held = sum(self._pages(len(i.request.prompt_token_ids) + len(i.tokens)) for i in self._running)
        return dataclasses.replace(
            self._stats,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=held / self.config.num_pages,
        )

    def close(self) -> None:
        self.closed = True

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _count(self, **more: int) -> None:
        now = self._stats
        self._stats = dataclasses.replace(now, **{key: getattr(now, key) + n for key, n in more.items()})

    def _prefill(self, item: _Running) -> float:
        prompt = item.request.prompt_token_ids
        text = "".join(map(chr, prompt))
        if "CRASH" in text:
            raise RuntimeError("the script says CRASH")
        if "HANG" in text:
            self.release.wait(30)
        full = (
            (len(prompt) - 1) // self.config.page_size * self.config.page_size
        )  # the last token is always computed
        item.cached = full if prompt in self._seen else 0
        self._seen.add(prompt)
        item.started = True
        hits, computed = item.cached, len(prompt) - item.cached
        self._count(prefix_cache_queries=len(prompt), prefix_cache_hits=hits, prompt_tokens=computed)
        return time.monotonic() - item.waited

    def _advance(self, item: _Running) -> RequestOutput:
        """One round of one request: its drafts are always right, so it yields K + 1 tokens if it may."""
        queued = None if item.started else self._prefill(item)
        request = item.request
        limit = request.params.num_speculative_tokens
        drafts = self.config.num_speculative_tokens if limit is None else limit
        room = self.config.max_model_len - len(request.prompt_token_ids)
        budget = min(room, request.params.max_tokens or room)
        new: list[int] = []
        reason, stop = None, None
        while len(new) <= drafts and reason is None:
            new.append(completion_token(request, len(item.tokens)))
            item.tokens.append(new[-1])
            item.text += self.tokenizer.decode(new[-1:])
            reason, stop = self._ending(item, budget)
        self._speculated(item, drafts, len(new) - 1)
        self._count(generation_tokens=len(new))
        longest = max((len(text) for text in request.params.stop), default=1)
        until = len(item.text) if reason else max(item.sent, len(item.text) - longest + 1)
        text, item.sent = item.text[item.sent : until], until
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=tuple(new),
            finish_reason=reason,
            stop_reason=stop,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=item.cached,
            queued_seconds=queued,
            speculation=item.speculation if reason else None,
        )

    @staticmethod
    def _ending(item: _Running, budget: int) -> tuple[FinishReason | None, int | str | None]:
        params, token = item.request.params, item.tokens[-1]
        if token == EOS:
            return FinishReason.STOP, None
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
        for text in params.stop:
            if text in item.text:
                item.text = item.text[: item.text.index(text)]
                return FinishReason.STOP, text
        return (FinishReason.LENGTH if len(item.tokens) >= budget else None), None

    def _speculated(self, item: _Running, drafts: int, accepted: int) -> None:
        if not drafts:
            return
        before = item.speculation
        histogram = list(before.acceptance_histogram or (0,) * (self.config.num_speculative_tokens + 1))
        histogram[accepted] += 1
        item.speculation = SpeculationStats(
            before.num_rounds + 1,
            before.num_draft_tokens + drafts,
            before.num_accepted_tokens + accepted,
            tuple(histogram),
            (*before.per_round_accepted, accepted),
        )
        self._count(num_drafts=1, num_draft_tokens=drafts, num_accepted_tokens=accepted)
        per_position = tuple(
            count + (position < accepted)
            for position, count in enumerate(self._stats.num_accepted_per_position)
        )
        self._stats = dataclasses.replace(self._stats, num_accepted_per_position=per_position)


@dataclasses.dataclass
class ScriptedBackend:
    """Where the server under test gets its engine. Loading takes `load_seconds` in ten reports."""

    step_seconds: float = 0.0
    load_seconds: float = 0.0
    engine: ScriptedEngine | None = None

    def describe(self, options: ServeOptions) -> str:
        self._check(options)
        return f"scripted engine: {options.engine}"

    def build(self, options: ServeOptions, report: Report) -> ScriptedEngine:
        self._check(options)
        for phase in ("reading", "placing", "compiling"):
            for done in range(1, 11):
                time.sleep(self.load_seconds / 30)
                report(phase, done, 10)
        name = options.served_model_name or "scripted"
        self.engine = ScriptedEngine(options.engine, self.step_seconds, name)
        return self.engine

    @staticmethod
    def _check(options: ServeOptions) -> None:
        if options.model is not None and not Path(options.model).exists():
            raise CheckpointError("--model", options.model, "a folder or a GGUF file that exists")
