"""The target writes its own training text, by the engine's batched decoding.

Prompts are requests (from files or the built-in templates) and user turns that the target itself writes:
the chat template is opened at the user's turn and sampled. All of them run in the same engine at once. What
it writes is kept as it goes, so that a killed run resumes; several processes with other shards or seeds may
write to one folder at the same time.
"""

import collections
import dataclasses
import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from mtp_jax.engine.engine import Engine
from mtp_jax.errors import InvalidValueError
from mtp_jax.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.corpus import Origin, Sample, fingerprint
from mtp_jax.train.prompts import (
    Conversation,
    HeldOut,
    OpenTurn,
    prompt_ids,
    requests,
    text_of_turn,
    user_turn,
)
from mtp_jax.train.repetition import loop_start
from mtp_jax.train.shelf import Counts, Shelf

log = logging.getLogger(__name__)

TURN_TOKENS = 128  # of a user's turn: a longer one has usually lost its thread
# At 1 small models wander off into nonsense. A top-p would cost passes over the vocabulary in every step.
TURN_TEMPERATURE = 0.8
TRIED_TURNS = 64  # after so many it is known whether the target can write them
LEAST_TOKENS = 16  # that must be left of a completion whose loop was cut off
LEAST_SHARE = 0.5  # of distinct 4-grams
MOST_STALE = 100  # prompts in a row that bring nothing new; more where files have more
MOST_EXCESS = 16.0  # 4-grams: a loop of some 32 tokens at the end


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """What to generate.

    Raises:
      InvalidValueError: a value out of range; names the flag.
    """

    num_tokens: int  # of completions, over all shards
    seconds: float | None = None  # this process ends after that
    seed: int = 0
    shard: tuple[int, int] = (0, 1)  # (i, n): this process writes the i-th n-th of it
    temperatures: tuple[tuple[float, float], ...] = TrainOptions.temperatures  # and weights
    max_tokens: int = TrainOptions.max_tokens  # of a completion
    own_prompts: float = TrainOptions.own_prompts  # share of prompts that the target writes
    conversations: Sequence[Conversation] = ()  # requests to use instead of the built-in ones
    held_out: Sequence[Conversation] = ()  # prompts to stay away from

    def __post_init__(self):
        index, count = self.shard
        checks = (
            ("--tokens", self.num_tokens, self.num_tokens >= 1, "an integer of at least 1"),
            ("--seconds", self.seconds, self.seconds is None or self.seconds > 0, "a number above 0"),
            ("--shard", f"{index}/{count}", 0 <= index < count, "i/n with i from 0 to n - 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "an integer of at least 1"),
            ("--own-prompts", self.own_prompts, 0 <= self.own_prompts <= 1, "a share from 0 to 1"),
            (
                "--temperatures",
                self.temperatures,
                bool(self.temperatures) and all(t >= 0 and w > 0 for t, w in self.temperatures),
                "temperatures from 0 on, each with a weight above 0",
            ),
        )
        for flag, got, ok, legal in checks:
            if not ok:
                raise InvalidValueError(flag, got, legal)

    @property
    def own_tokens(self) -> int:
        """This shard's part of the tokens."""
        index, count = self.shard
        return self.num_tokens * (index + 1) // count - self.num_tokens * index // count


def part_name(shard: tuple[int, int], seed: int) -> str:
    """(0, 2), 5 -> 0of2-seed5: what the names of a part's shards begin with."""
    return f"{shard[0]}of{shard[1]}-seed{seed}"


def generate_corpus(
    engine: Engine, folder: str | Path, options: GenerateOptions, *, use_tqdm: bool = True
) -> Counts:
    """Writes shards of completions into `folder` until this process's part of the tokens is there.

    What this shard wrote in earlier runs counts, so a finished one does nothing. It also ends when time is
    up (requests under way are lost), or when prompts bring nothing new any more.

    Raises:
      InvalidValueError: the folder has shards of another target, or a broken one; names the file.
    """
    run = _Run(engine, Path(folder), options)
    shown = tqdm(
        total=options.own_tokens,
        initial=min(run.counts.tokens, options.own_tokens),
        desc="generating",
        unit="tok",
        unit_scale=True,
        disable=not use_tqdm,
        mininterval=0.1 if sys.stderr.isatty() else 10.0,  # into a file, a line now and then is enough
        file=sys.stderr,
    )
    with shown as bar:
        run.run(bar)
    return run.counts


@dataclasses.dataclass
class _Live:
    """A request in the engine. A user's turn has no temperature of its own."""

    prompt: tuple[int, ...]
    temperature: float | None
    tokens: list[int] = dataclasses.field(default_factory=list)


class _Run:
    """One call of `generate_corpus`."""

    def __init__(self, engine: Engine, folder: Path, options: GenerateOptions):
        self._engine, self._options = engine, options
        self.counts = Counts()
        index, count = options.shard
        name = part_name(options.shard, options.seed)
        self._shelf = Shelf(folder, name, _origin(engine), _settings(engine, options), self.counts)
        rng = random.Random(f"generate {options.seed} {index} {count} {self._shelf.num_shards}")
        self._rng = rng
        self._held_out = HeldOut(options.held_out)
        self._open = OpenTurn.of(engine.tokenizer) if options.own_prompts else None
        self._source = _source(options, skip=self.counts.requests)
        self._ready: collections.deque[tuple[int, ...]] = collections.deque()  # prompts to complete
        self._live: dict[str, _Live] = {}
        self._launched = self._turns_launched = 0
        self._answered = self._stale = 0  # completions in this run; the last ones that brought nothing new
        self._answer_tokens = 0

    def run(self, bar: tqdm) -> None:
        began = time.monotonic()
        deadline = None if self._options.seconds is None else began + self._options.seconds
        try:
            while True:
                self._feed()
                if not self._live or (deadline is not None and time.monotonic() >= deadline):
                    break
                for output in self._engine.step():
                    self._take(output)
                if self._shelf.flush_when_due():
                    bar.set_postfix_str(f"{self.counts.samples} samples", refresh=False)
                bar.update(min(self.counts.tokens, bar.total) - bar.n)
        finally:
            for request_id in self._live:
                self._engine.abort(request_id)
            self._shelf.flush()
            self.counts.seconds = time.monotonic() - began

    # -- requests --------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Keeps the engine's slots taken and as many requests again waiting."""
        while len(self._live) < 2 * self._engine.config.max_num_seqs and self._wants_more():
            if self._ready:
                self._launch_answer(self._ready.popleft())
            elif self._turn_is_next():
                self._launch_turn()
            elif not self._next_request():
                break

    def _wants_more(self) -> bool:
        """Whether what is under way will not bring the tokens that are missing."""
        if self._stale > MOST_STALE + 4 * len(self._options.conversations):
            return False
        mean = self._answer_tokens / self._answered if self._answered else self._options.max_tokens
        return self.counts.tokens + mean * len(self._live) < self._options.own_tokens

    def _turn_is_next(self) -> bool:
        # Turns under way count as kept: most are.
        turns = self._turns_launched - self.counts.turns_dropped
        share = self._options.own_prompts
        return self._open is not None and turns * (1 - share) <= self._launched * share

    def _next_request(self) -> bool:
        """Makes the next request of files or templates ready; False where there is none."""
        conversation = next(self._source, None)
        if conversation is None:
            return False
        self.counts.requests += 1
        self._launched += 1
        if conversation in self._held_out:
            self.counts.held_out += 1
            self._stale += 1
        else:
            self._ready.append(prompt_ids(self._engine.tokenizer, conversation))
        return True

    def _launch_turn(self) -> None:
        assert self._open is not None
        self._turns_launched += 1
        params = SamplingParams(
            temperature=TURN_TEMPERATURE,
            max_tokens=max(1, min(TURN_TOKENS, self._room(self._open.prefix) // 2)),
            stop_token_ids=self._open.stop_token_ids,
        )
        self._add(_Live(self._open.prefix, None), params)

    def _launch_answer(self, prompt: tuple[int, ...]) -> None:
        values, weights = zip(*self._options.temperatures, strict=True)
        (temperature,) = self._rng.choices(values, weights)
        room = self._room(prompt)
        if room < LEAST_TOKENS:
            self.counts.refused += 1
            self._stale += 1
            return
        params = SamplingParams(temperature=temperature, max_tokens=min(self._options.max_tokens, room))
        self._add(_Live(prompt, temperature), params)

    def _room(self, prompt: tuple[int, ...]) -> int:
        """Tokens that a request may have after its prompt."""
        config = self._engine.config
        return min(config.max_model_len, config.num_pages * config.page_size) - len(prompt)

    def _add(self, live: _Live, params: SamplingParams) -> None:
        seed = self._rng.getrandbits(63)
        request_id = f"generate-{seed:x}"
        self._engine.add_request(EngineRequest(request_id, live.prompt, params, seed))
        self._live[request_id] = live

    # -- what they bring -------------------------------------------------------------------------------

    def _take(self, output: RequestOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        live.tokens.extend(output.token_ids)
        if output.finish_reason is None:
            return
        del self._live[output.request_id]
        if live.temperature is None:
            self._take_turn(live, output.finish_reason)
        else:
            self._take_answer(live, live.temperature)

    def _take_turn(self, live: _Live, reason: FinishReason) -> None:
        prompt = self._prompt_of(live.tokens) if reason is FinishReason.STOP else None
        if prompt is None or not self._shelf.is_new_turn(prompt):
            self.counts.turns_dropped += 1
            self._give_up_turns()
            return
        self.counts.turns += 1
        self._ready.append(prompt)

    def _give_up_turns(self) -> None:
        """Asks the target for no more user turns if they are nearly all useless."""
        kept, dropped = self.counts.turns, self.counts.turns_dropped
        if self._open is not None and kept + dropped >= TRIED_TURNS and 4 * kept < dropped:
            log.warning("the target writes no sound user turns (%d of %d): no more", kept, kept + dropped)
            self._open = None

    def _prompt_of(self, turn: list[int]) -> tuple[int, ...] | None:
        """The prompt of a user's turn that the target wrote, its end token included; None for one to drop."""
        if loop_start(turn, LEAST_SHARE, MOST_EXCESS) < len(turn):
            return None
        text = text_of_turn(self._engine.tokenizer, turn[:-1])
        if text is None:
            return None
        conversation = user_turn(text)
        if conversation in self._held_out:
            self.counts.held_out += 1
            return None
        return prompt_ids(self._engine.tokenizer, conversation)

    def _take_answer(self, live: _Live, temperature: float) -> None:
        self._answered += 1
        self._answer_tokens += len(live.tokens)
        self._stale += 1
        kept = loop_start(live.tokens, LEAST_SHARE, MOST_EXCESS)
        if kept < len(live.tokens):
            if kept < LEAST_TOKENS:
                self.counts.loops_dropped += 1
                return
            self.counts.loops_cut += 1
        if self._shelf.put(Sample(live.prompt, live.tokens[:kept], temperature)):
            self._stale = 0


def _source(options: GenerateOptions, skip: int) -> Iterator[Conversation]:
    """This shard's requests; those of files come again and again, in another order each time."""
    index, count = options.shard
    stream = _repeated(options) if options.conversations else requests(options.seed)
    for place, conversation in enumerate(stream):
        if place % count == index and place // count >= skip:
            yield conversation


def _repeated(options: GenerateOptions) -> Iterator[Conversation]:
    rng = random.Random(f"files {options.seed}")
    while True:
        yield from rng.sample(options.conversations, len(options.conversations))


def _origin(engine: Engine) -> Origin:
    return Origin(engine.model_name, engine.model_config.vocab_size, fingerprint(engine.tokenizer))


def _settings(engine: Engine, options: GenerateOptions) -> dict[str, object]:
    """What a shard tells people about how it was made."""
    return {
        "temperatures": options.temperatures,
        "max_tokens": options.max_tokens,
        "own_prompts": options.own_prompts if engine.tokenizer.has_chat_template else 0.0,
        "requests": "files" if options.conversations else "templates",
    }
