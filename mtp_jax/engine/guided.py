"""Grammars of live requests: the masks of their next round, from what was read back of the last one.

A grammar needs the text so far before it can say what may follow, so the scheduler plans nothing while an
unread plan may add to a text with a grammar (`OutstandingPlans.hides_text_of`). A round's result also says
which drafts were made for the next one. So every row of that one has its mask: row j's is what may follow
the first j drafts, and nothing is sampled from it unless these stand.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mtp_jax.engine.plan_arrays import PLAN_SPEC, GuidedRows
from mtp_jax.engine.vocabulary import Vocabulary
from mtp_jax.errors import InvalidRequestError
from mtp_jax.request import GrammarSpec
from mtp_jax.scheduler.plan import SlotView, TokenUpdate
from mtp_jax.text.grammar import Grammar, GrammarCompiler, Matcher
from mtp_jax.text.tokenizer import Tokenizer
from sharding.hosts import place
from sharding.placement import HEAD_AXES, Placement

MASK_SECONDS = 0.25  # of this thread for the masks of a dispatch; beyond it slow grammars must give up:
SLOW_SECONDS = 0.002  # those that take so long for one request. Some 0.05 ms is usual


def mask_shape(num_slots: int, num_drafts: int, padded_vocab: int) -> tuple[int, int, int]:
    """Masks of a dispatch, uint32 [U, K + 1, words]; token t is bit t % 32 of word t // 32."""
    return num_slots, num_drafts + 1, -(-padded_vocab // 32)


def apply_masks(masks: jax.Array, raw: jax.Array, shaped: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """-inf where a token is not allowed: masks [B, T, words], logits [B, T, V / devices].

    Where masks of other kinds leave nothing of what a grammar allows, the grammar alone holds.
    """
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    bits = bits.reshape(*masks.shape[:-1], -1)
    mine = jax.lax.dynamic_slice_in_dim(bits, vocabulary.ids[0], raw.shape[-1], axis=-1)
    allowed = mine > 0
    masked = jnp.where(allowed, shaped, -jnp.inf)
    best = jax.lax.pmax(jnp.max(masked, axis=-1, keepdims=True), HEAD_AXES)
    return jnp.where(allowed & (best == -jnp.inf), raw, masked)


@dataclasses.dataclass
class _Guided:
    """A live request's place in its grammar."""

    spec: GrammarSpec
    matcher: Matcher
    proposals: tuple[int, ...] = ()  # drafts that its next round may verify


class Grammars:
    """Compiles grammars, and follows the texts of live requests. Safe to `compile` from any thread.

    Args:
      tokenizer: the model's.
      vocab_size: tokens of the model.
      eos_token_ids: the model's.
      padded_vocab: rows of the device's vocabulary.
      num_slots: of all replicas together.
      placement: where masks go.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        padded_vocab: int,
        num_slots: int,
        placement: Placement,
    ):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._padded_vocab, self._num_slots = padded_vocab, num_slots
        self._sharding = NamedSharding(placement.mesh, PLAN_SPEC)
        self._lock = threading.Lock()
        self._live: dict[str, _Guided] = {}
        self._free: dict[int, jax.Array] = {}  # by number of drafts: masks that allow everything

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar of a spec; the last ones are kept. Raises InvalidRequestError where it is none."""
        if not self._eos_token_ids:
            legal = "null: this model has no end-of-sequence token, so that no grammar could end"
            raise InvalidRequestError(spec.field, spec.kind, legal)
        with self._lock:
            compiler = self._compiler  # the first request waits for its tables
        return compiler.compile(spec)

    def add(self, request_id: str, spec: GrammarSpec) -> None:
        """A request begins its text. Raises what `compile` raises."""
        self._live[request_id] = _Guided(spec, self.compile(spec).matcher())

    @property
    def num_live(self) -> int:
        return len(self._live)

    def forget(self, request_id: str) -> None:
        """A request has ended; it need not have had a grammar."""
        self._live.pop(request_id, None)

    def advance(self, update: TokenUpdate, *, ended: bool) -> InvalidRequestError | None:
        """Takes tokens that stand. Returns why the grammar cannot go on, if it cannot and has to.

        Args:
          update: the tokens, and the drafts that come next.
          ended: nothing follows them; then it is enough that they fit.
        """
        guided = self._live.get(update.request_id)
        if guided is None:
            return None
        guided.matcher.accept(update.token_ids)
        guided.proposals = update.proposals
        if not guided.matcher.failed or (ended and guided.matcher.fits):
            return None
        legal = (
            "a grammar that can be followed; its text came to where no token fits, or to where it is too slow"
        )
        return InvalidRequestError(guided.spec.field, guided.spec.kind, legal)

    def masks(
        self, slots: Sequence[SlotView], request_in: Callable[[int, int], str | None], num_drafts: int
    ) -> GuidedRows | None:
        """Masks of a dispatch that verifies up to `num_drafts` drafts a row; None where nobody has a grammar.

        A request's proposals may be more than that, and fewer: drafts that nobody told of are none. Where all
        masks together take too long, those whose own do have seen their last.
        """
        live = [
            (index, slot, guided)
            for index, slot in enumerate(slots)
            if (guided := self._live.get(request_in(index, slot.generation) or "")) is not None
        ]
        if not live:
            return None
        words, spent = -(-self._vocab_size // 32), 0.0
        masks = np.full((len(live), num_drafts + 1, words), 0xFFFFFFFF, np.uint32)
        for own, (_, slot, guided) in zip(masks, live, strict=True):
            offered = min(num_drafts, slot.num_drafts)
            drafts = [token for token in guided.proposals[:offered] if token >= 0]
            began = time.thread_time()
            rows = guided.matcher.masks(drafts)
            took = time.thread_time() - began
            spent += took
            if spent > MASK_SECONDS and took > SLOW_SECONDS:
                guided.matcher.give_up()
            own[: len(rows)] = rows
        return GuidedRows(np.array([index for index, _, _ in live], np.int32), masks)

    def place(self, guided: GuidedRows | None, num_drafts: int) -> jax.Array:
        """What `masks` gave, on the devices, for all slots."""
        if guided is None and num_drafts in self._free:
            return self._free[num_drafts]
        shape = mask_shape(self._num_slots, num_drafts, self._padded_vocab)
        masks = np.full(shape, 0xFFFFFFFF, np.uint32)
        if guided is not None:
            masks[guided.slots, :, : guided.masks.shape[-1]] = guided.masks
            return place(masks, self._sharding)
        return self._free.setdefault(num_drafts, place(masks, self._sharding))
