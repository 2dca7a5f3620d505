"""The host's side of shaping: what each slot's request asks for, as arrays, and when they are sent.

A request's arrays go to the device once, before the first dispatch that has it in a slot. From then on the
device keeps count by itself: what it emits is known there a dispatch before the host knows it.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.engine.shaping_state import (
    ANY_TOKEN,
    IN_PROMPT,
    IS_STOP,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    NO_TOKEN,
    ShapingState,
    shaping_shapes,
    shaping_specs,
    slot_specs,
)
from mtp_jax.engine.trees import spec_of
from mtp_jax.errors import InvalidRequestError
from mtp_jax.request import SamplingParams
from mtp_jax.scheduler.plan import Shaping, SlotView
from mtp_jax.text.tokenizer import Tokenizer
from sharding.hosts import place
from sharding.mesh import DATA
from sharding.placement import Placement


@dataclasses.dataclass(frozen=True)
class Installation:
    """A slot's request that the device is not told about yet."""

    slot: int
    generation: int
    shaping: Shaping


class ShapingSlots:
    """Keeps the shaping state of all slots; nothing is allocated before somebody asks for it.

    `pending` belongs to the thread that plans, `install` and `state` to the one that launches.
    """

    def __init__(self, num_slots: int, padded_vocab: int, placement: Placement):
        self._placement, self.padded_vocab = placement, padded_vocab
        self._shapes = shaping_shapes(num_slots, padded_vocab)
        self._seen = [0] * num_slots
        self.state: ShapingState | None = None

    def pending(self, slots: Sequence[SlotView]) -> list[Installation]:
        """What has to be installed before a plan with these slots is launched; each is told once."""
        new = []
        for index, slot in enumerate(slots):
            if slot.shaping is not None and slot.generation and slot.generation != self._seen[index]:
                self._seen[index] = slot.generation
                new.append(Installation(index, slot.generation, slot.shaping))
        return new

    def on_host(self, installations: Sequence[Installation]) -> list[tuple[int, ShapingState]]:
        """Slots and the rows that `install` writes to them: the same in every process."""
        return [(each.slot, slot_arrays(each, self.padded_vocab)) for each in installations]

    def install(self, installations: Sequence[tuple[int, ShapingState]]) -> None:
        """Writes requests to their slots."""
        if self.state is None:
            self.state = jax.jit(self._zeros, out_shardings=self._shardings(shaping_specs(self._placement)))()
        for slot, row in installations:
            sent = place(row, self._shardings(slot_specs(self._placement)))
            self.state = self._put(self.state, np.int32(slot), sent)

    def _zeros(self) -> ShapingState:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), self._shapes)

    def _shardings(self, specs: ShapingState) -> ShapingState:
        return jax.tree.map(lambda spec: NamedSharding(self._placement.mesh, spec_of(spec)), specs)

    @functools.cached_property
    def _put(self):
        specs = shaping_specs(self._placement)
        in_specs = (specs, P(), slot_specs(self._placement))

        @functools.partial(jax.shard_map, mesh=self._placement.mesh, in_specs=in_specs, out_specs=specs)
        def put(state: ShapingState, slot: jax.Array, row: ShapingState) -> ShapingState:
            size = state.generation.shape[0]
            local = slot - jax.lax.axis_index(DATA) * size
            at = jnp.where((local >= 0) & (local < size), local, size)  # past the end: another replica's
            return jax.tree.map(lambda rows, new: rows.at[at].set(new, mode="drop"), state, row)

        return jax.jit(put, donate_argnums=0)


def slot_arrays(installation: Installation, padded_vocab: int) -> ShapingState:
    """One slot's row of every array, on the host."""
    shaping, params = installation.shaping, installation.shaping.params
    emitted = shaping.token_ids[shaping.num_prompt_tokens :]
    bias = np.zeros(padded_vocab, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    for token, value in dict(params.logit_bias).items():
        bias[token] += value
    single = [word[0] for word in shaping.bad_word_ids if len(word) == 1]
    bias[[*params.banned_token_ids, *_within(single, padded_vocab)]] = -np.inf
    marks = np.bincount(np.array(emitted, np.int64), minlength=padded_vocab).astype(np.int32)
    marks[_within(shaping.stop_token_ids, padded_vocab)] |= IS_STOP
    marks[_within(shaping.token_ids[: shaping.num_prompt_tokens], padded_vocab)] |= IN_PROMPT
    tail = np.full(MAX_BAD_WORD_TOKENS - 1, NO_TOKEN, np.int32)
    last = emitted[-tail.size :]
    tail[tail.size - len(last) :] = last
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32)
    for index, word in enumerate(word for word in shaping.bad_word_ids if len(word) > 1):
        words[index] = (ANY_TOKEN,) * (MAX_BAD_WORD_TOKENS - len(word)) + word

    values = {
        "generation": np.int32(installation.generation),
        "bias": bias,
        "marks": marks,
        "tail": tail,
        "bad_words": words,
        "min_total": np.int32(shaping.num_prompt_tokens + params.min_tokens),
        "min_p": np.float32(params.min_p),
        "presence": np.float32(params.presence_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "repetition": np.float32(params.repetition_penalty),
    }
    return ShapingState(**values)  # pyright: ignore[reportArgumentType]


def _within(token_ids: Iterable[int], size: int) -> list[int]:
    """Those that the model has: a tokenizer may know more."""
    return [token for token in token_ids if token < size]


def bad_word_tokens(params: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of `bad_words`: each at the beginning of a word and inside one, as far as they differ.

    Raises:
      InvalidRequestError: more of them, or longer ones, than a slot has room for.
    """
    if not params.bad_words:
        return ()
    texts = [text for word in params.bad_words for text in (word.lstrip(), " " + word.lstrip())]
    encoded = map(tuple, tokenizer.encode_batch(texts, add_special_tokens=False))
    found = tuple(dict.fromkeys(ids for ids in encoded if ids))
    longest, several = max(map(len, found), default=0), sum(len(word) > 1 for word in found)
    if longest > MAX_BAD_WORD_TOKENS:
        legal = f"words of at most {MAX_BAD_WORD_TOKENS} tokens"
        raise InvalidRequestError("bad_words", f"a word of {longest} tokens", legal)
    if several > MAX_BAD_WORDS:
        legal = f"at most {MAX_BAD_WORDS} of them, counted with and without a space before the word"
        raise InvalidRequestError("bad_words", f"{several} sequences of several tokens", legal)
    return found


def check_something_is_left(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], stop_token_ids: Sequence[int], vocab_size: int
) -> None:
    """Raises InvalidRequestError where masks leave no token that could be sampled."""
    if not params.shapes_logits:
        return
    banned = {word[0] for word in bad_words if len(word) == 1 and word[0] < vocab_size}
    banned |= set(params.banned_token_ids)
    stops = banned | set(stop_token_ids)
    if params.allowed_token_ids is None:  # counted, for a vocabulary is large
        field = "banned_token_ids" if params.banned_token_ids else "bad_words"
        is_left, goes_on = len(banned) < vocab_size, len(stops) < vocab_size
    else:
        allowed = set(params.allowed_token_ids)
        field, is_left, goes_on = "allowed_token_ids", bool(allowed - banned), bool(allowed - stops)
    if not is_left:
        legal = "at least one token that is neither banned nor a bad word"
        raise InvalidRequestError(field, "no token left", legal)
    if params.min_tokens and not goes_on:
        raise InvalidRequestError(
            field, "stop tokens only", "at least one other token while min_tokens lasts"
        )
