"""Structured output, the host's part: grammars, and which tokens they allow next. No device is involved.

How an engine uses it, for one request whose rounds verify K drafts:

    grammar = compiler.compile(spec)              # when the request comes; a thread, 400 if it raises
    matcher = grammar.matcher()                   # one for each completion
    each round:
      masks = matcher.masks(drafts)               # [K + 1, words]
      ... the device adds -inf to the target's logits of row j where masks[j] has no bit: a draft that
      ... breaks the grammar then has probability 0 in its row and is rejected; the row after the last
      ... accepted draft samples the token of the round under its own mask
      matcher.accept(emitted)                     # the tokens that stand, end-of-sequence included

Token t is bit t % 32 of word t // 32, least significant first. Words cover the model's vocabulary; tokens
of its padding are never allowed. An end-of-sequence token is allowed where the text may end, and nothing
else once it must. Rows behind a draft that breaks the grammar are never sampled from: all bits are set
there, so that no distribution of them is empty.
"""

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import llguidance
import numpy as np

from mtp_jax.errors import InvalidRequestError
from mtp_jax.request import GrammarSpec
from mtp_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_CHARACTERS = 64 * 1024
MAX_CHOICES = 1024
CACHED_GRAMMARS = 64
# What the compiler and a step of the parser may spend. A thread cannot be interrupted, so these, and the
# size of the source, are the bound on time: the test has the worst grammars that we know.
_LIMITS = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
# A model may write white space for ever where any amount of it is legal.
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
_SPECIAL_CHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$/#&~-]")


def json_object(field: str = "structured_outputs") -> GrammarSpec:
    """Any JSON object."""
    return GrammarSpec("json", '{"type": "object"}', field)


def json_schema(schema: Mapping[str, object], field: str = "structured_outputs") -> GrammarSpec:
    """JSON that a schema describes."""
    return GrammarSpec("json", json.dumps(schema), field)


def choice(texts: Sequence[str], field: str = "structured_outputs") -> GrammarSpec:
    """One of several texts. Raises InvalidRequestError where there are none, or too many."""
    if not 0 < len(texts) <= MAX_CHOICES or not all(texts):
        legal = f"1 to {MAX_CHOICES} texts that are not empty"
        raise InvalidRequestError(field, f"{len(texts)} texts", legal)
    escaped = (_SPECIAL_CHARACTERS.sub(r"\\\g<0>", text) for text in texts)
    return GrammarSpec("regex", "|".join(escaped), field)


class _Vocabulary:
    """The tokenizer as llguidance takes it: each token's bytes, which are those of our own detokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        pieces = [tokenizer.token_text.piece(token) for token in range(vocab_size)]
        self.tokens = [b"" if piece is None or piece.special else piece.data for piece in pieces]
        # What has no text is no part of any.
        self.special_token_ids = [token for token, data in enumerate(self.tokens) if not data]
        self.eos_token_id = eos_token_ids[0]
        self._encode = functools.partial(tokenizer.encode, add_special_tokens=False)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class GrammarCompiler:
    """Compiles grammars for one model. Safe for use from several threads.

    Args:
      tokenizer: the model's.
      vocab_size: tokens of the model, padding included.
      eos_token_ids: at least one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        assert eos_token_ids, "a text that must end needs a token that ends it"
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self.vocab_size, self._eos = vocab_size, tuple(eos_token_ids)
        self.compile: Callable[[GrammarSpec], Grammar] = functools.lru_cache(CACHED_GRAMMARS)(self._compile)
        """The grammar of a spec; the last ones are kept.

        Raises:
          InvalidRequestError: it is no grammar, too large, too slow, or nothing at all fits it.
        """

    def _compile(self, spec: GrammarSpec) -> "Grammar":
        if len(spec.source) > MAX_SOURCE_CHARACTERS:
            legal = f"a grammar of at most {MAX_SOURCE_CHARACTERS} characters"
            raise InvalidRequestError(spec.field, f"{len(spec.source)} characters", legal)
        try:
            made = llguidance.LLMatcher(self._tokenizer, _translated(spec), log_level=0, limits=_limits())
        except ValueError as error:
            raise _refusal(spec, str(error)) from None
        grammar = Grammar(made, self.vocab_size, self._eos, spec)
        if not made.is_error():
            first = grammar.matcher()
            first.mask()  # the first step finds what the compiler let pass
            if not first.failed:
                return grammar
            made = first.state
        raise _refusal(spec, made.get_error() or "no token of this model can begin it")


def _translated(spec: GrammarSpec) -> str:
    match spec.kind:
        case "json":
            return llguidance.LLMatcher.grammar_from_json_schema(spec.source, overrides=JSON_OPTIONS)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec.source)
        case "ebnf":
            return llguidance.grammar_from("ebnf", spec.source)
    raise AssertionError(spec.kind)


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(**_LIMITS)


def _refusal(spec: GrammarSpec, reason: str) -> InvalidRequestError:
    kind = {"json": "a JSON schema", "regex": "a regular expression", "ebnf": "a grammar"}[spec.kind]
    short = spec.source if len(spec.source) <= 100 else spec.source[:100] + "..."
    return InvalidRequestError(
        spec.field, short, f"{kind} that can be compiled ({' '.join(reason.split())[:300]})"
    )


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A compiled grammar, to be shared."""

    _start: llguidance.LLMatcher
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    spec: GrammarSpec

    def matcher(self) -> "Matcher":
        """The state of one completion, at its beginning."""
        return Matcher(self._start.deep_copy(), self.vocab_size, self.eos_token_ids)


class Matcher:
    """Where a completion is in its grammar. Not for use from two threads at once.

    It may have to give up (`failed`): a step exceeds its limits, or no token of this vocabulary can follow.
    Then whatever comes is accepted, and masks allow the end only.
    """

    def __init__(self, state: llguidance.LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]):
        self.state, self._eos = state, frozenset(eos_token_ids)
        self._is_lost = False  # a token came that cannot follow, or none can
        self._fits = True
        self._num_ends = 0  # end-of-sequence tokens taken; the library need not hear of them
        self._end_only = np.zeros(-(-vocab_size // 32), np.uint32)
        for token in eos_token_ids:
            self._end_only[token // 32] |= np.uint32(1 << token % 32)

    @property
    def failed(self) -> bool:
        return self._is_lost or self.state.is_error()

    @property
    def may_end(self) -> bool:
        """The text so far fits the grammar as it is."""
        return self.state.is_accepting()

    @property
    def ended(self) -> bool:
        """Nothing but an end-of-sequence token can follow."""
        return self._num_ends > 0 or self.state.is_stopped()

    @property
    def fits(self) -> bool:
        """Every token so far was allowed by the mask of its row, though what follows may have `failed`."""
        return self._fits

    def mask(self) -> np.ndarray:
        """Allowed next tokens, uint32 [words]."""
        if self.ended or self.failed:
            return self._end_only
        mask = np.frombuffer(self.state.compute_bitmask(), np.uint32)[: self._end_only.size]
        if not self.may_end:
            mask = mask & ~self._end_only  # a range of tokens in a grammar may name an end
        self._is_lost = not mask.any()
        return self._end_only if self.failed else mask

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Allowed tokens of each row of a round, uint32 [len(drafts) + 1, words]. The state stays.

        Row j is what may follow the first j drafts. A copy looks ahead: not every state can be taken back,
        and limits that are exceeded behind a draft mean nothing before it stands.
        """
        rows = np.full((len(drafts) + 1, self._end_only.size), np.uint32(0xFFFFFFFF))
        rows[0] = self.mask()
        if not drafts or self.failed:
            return rows
        ahead = copy.copy(self)
        ahead.state = self.state.deep_copy()
        for row, token in enumerate(drafts, start=1):
            if not ahead._take(token):
                break
            mask = ahead.mask()
            if ahead.failed:
                break
            rows[row] = mask
        return rows

    def accept(self, tokens: Sequence[int]) -> None:
        """Advances by tokens that stand, each of which the mask of its row allowed; else it has `failed`."""
        for token in tokens:
            self._fits &= not self.failed
            if not self._take(token):
                self._fits &= self.state.is_error()  # else it could not follow
                self._is_lost = True

    def give_up(self) -> None:
        """It takes too long: it has `failed` from here on."""
        self._is_lost = True

    def _take(self, token: int) -> bool:
        """Advances by one token if it may."""
        if token in self._eos:
            self._num_ends += self.may_end
            return self.may_end
        return self._num_ends == 0 and self.state.try_consume_tokens([token]) == 1
