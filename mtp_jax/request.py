"""Requests, sampling parameters and outputs: the plain types every layer shares."""

import dataclasses
import enum
import secrets
from collections.abc import Iterable, Mapping, Sequence

from mtp_jax.errors import InvalidRequestError

MAX_LOGPROBS = 20  # alternatives that can be reported of a token
MAX_BAD_WORD_TEXTS = 256  # they are tokenized before anything else is known of them
MAX_CHOICES_OF_A_PROMPT = 64


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client went away or asked for it


@dataclasses.dataclass(frozen=True)
class GrammarSpec:
    """What the text must be; `text.grammar` makes them, and compiles them.

    Attributes:
      kind: `json` (source: a JSON schema), `regex`, or `ebnf` (Lark's or GBNF's syntax).
      field: the parameter of the request that errors name.
    """

    kind: str
    source: str
    field: str = "structured_outputs"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. Names and defaults are vLLM's and OpenAI's.

    Raises:
      InvalidRequestError: a value out of range; it names the parameter.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # nucleus: smallest set of tokens with at least this mass, (0, 1]
    top_k: int = 0  # most likely tokens kept; 0 or -1 keeps all
    seed: int | None = None  # same seed, same text, whatever the layout or batch; None draws one
    max_tokens: int | None = 16  # completion tokens; None: as many as the context allows; 0: the prompt alone
    stop: tuple[str, ...] = ()  # strings that end the completion and are not part of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1  # completions of the same prompt
    num_speculative_tokens: int | None = None  # drafts a round for this request; None is the server's K
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # keep the stop string, or the stop token's text
    min_p: float = 0.0  # least probability of a token, as a share of the most likely one's
    min_tokens: int = 0  # completion tokens before which nothing stops but max_tokens
    presence_penalty: float = 0.0  # taken off the logit of each token that the completion has
    frequency_penalty: float = 0.0  # the same, as often as it has it
    repetition_penalty: float = 1.0  # logits of tokens in prompt or completion shrink by this factor
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # token id, added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled
    banned_token_ids: tuple[int, ...] = ()  # never sampled
    bad_words: tuple[str, ...] = ()  # texts whose tokens never follow each other
    logprobs: int | None = None  # report each token's log-probability, and of so many alternatives
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    structured_outputs: GrammarSpec | None = None  # a grammar of the text; its end ends the completion

    def __post_init__(self):
        self._normalise()
        for name, ok, legal in (*self._basic_checks(), *self._shaping_checks()):
            if not ok:
                raise InvalidRequestError(name, getattr(self, name), legal)

    def _normalise(self) -> None:
        """Texts become lists of one, lists tuples, a mapping pairs: equal parameters compare equal."""
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        bias = self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))

    def _basic_checks(self) -> Iterable[tuple[str, bool, str]]:
        return (
            ("temperature", 0 <= self.temperature <= 100, "a number from 0 to 100"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and up to 1"),
            ("top_k", -1 <= self.top_k < 2**31, "-1 or 0 (off) or a positive 32-bit integer"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "an integer of at least 0"),
            ("n", 1 <= self.n <= MAX_CHOICES_OF_A_PROMPT, f"1 to {MAX_CHOICES_OF_A_PROMPT}"),
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(0 <= t < 2**31 for t in self.stop_token_ids), "token ids"),
            (
                "num_speculative_tokens",
                self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
                "an integer of at least 0",
            ),
        )

    def _shaping_checks(self) -> Iterable[tuple[str, bool, str]]:
        most, penalty = self.max_tokens, "a number from -2 to 2"
        reports = f"0 to {MAX_LOGPROBS}"
        allowed = self.allowed_token_ids
        return (
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            (
                "min_tokens",
                self.min_tokens >= 0 and (most is None or self.min_tokens <= most),
                "an integer from 0 to max_tokens",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, penalty),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, penalty),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "0.01 to 100"),
            (
                "logit_bias",
                all(
                    0 <= token < 2**31 and -100 <= bias <= 100
                    for token, bias in dict(self.logit_bias).items()
                ),
                "token ids with numbers from -100 to 100",
            ),
            (
                "allowed_token_ids",
                allowed is None or (len(allowed) > 0 and all(0 <= t < 2**31 for t in allowed)),
                "null or at least one token id",
            ),
            ("banned_token_ids", all(0 <= t < 2**31 for t in self.banned_token_ids), "token ids"),
            ("bad_words", all(word.strip() for word in self.bad_words), "strings that are not blank"),
            (
                "bad_words",
                len(self.bad_words) <= MAX_BAD_WORD_TEXTS
                and all(len(word) <= 256 for word in self.bad_words),
                f"at most {MAX_BAD_WORD_TEXTS} strings of at most 256 characters",
            ),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, reports),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                reports,
            ),
        )

    @property
    def shapes_logits(self) -> bool:
        """Whether it asks for more than temperature, top-k and top-p."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        masks = self.logit_bias or self.allowed_token_ids is not None or self.banned_token_ids
        masks = masks or self.bad_words or self.min_tokens or self.structured_outputs is not None
        return any(penalties) or bool(masks) or (self.min_p > 0 and self.temperature > 0)

    def end_token_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens that end the completion, given the model's own. Nothing may follow the end of a grammar."""
        ignores = self.ignore_eos and self.structured_outputs is None
        return tuple(dict.fromkeys((*(() if ignores else eos_token_ids), *self.stop_token_ids)))

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequestError for a token id that the model does not have."""
        ids = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(dict(self.logit_bias)),
            "allowed_token_ids": self.allowed_token_ids or (),
            "banned_token_ids": self.banned_token_ids,
        }
        for name, tokens in ids.items():
            wrong = [token for token in tokens if token >= vocab_size]
            if wrong:
                raise InvalidRequestError(name, f"token id {wrong[0]}", f"0 to {vocab_size - 1}")


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """One completion to make. A request with n > 1 becomes n of these that name the first one."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0  # resolved: params.seed, or drawn by the front end
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words as tokens; the engine fills them in
    shares_prompt_with: str | None = None  # request whose prompt pages to wait for and reuse


def expand_request(
    request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
) -> list[EngineRequest]:
    """The `params.n` engine requests of one prompt, in the order of their choices.

    Their seeds are seed, seed + 1, ...; without a seed one is drawn. All but the first wait for
    the prompt pages of the first.

    >>> [r.request_id for r in expand_request("a", [1, 2], SamplingParams(n=2, seed=7))]
    ['a-0', 'a-1']
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed
    ids, first = tuple(prompt_token_ids), f"{request_id}-0"
    return [
        EngineRequest(
            request_id=f"{request_id}-{index}",
            prompt_token_ids=ids,
            params=params,
            seed=(seed + index + 2**63) % 2**64 - 2**63,  # stays a 64-bit integer
            shares_prompt_with=None if index == 0 else first,
        )
        for index in range(params.n)
    ]


@dataclasses.dataclass(frozen=True)
class SpeculationStats:
    """What speculation did for one request, over the rounds that verified at least one draft.

    Index j of the histogram: rounds that accepted exactly j drafts.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    per_round_accepted: tuple[int, ...] = ()  # drafts accepted by each of these rounds, in order

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the bonus token included; 0.0 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-probability, and those of the likeliest tokens at its place, the best first.

    The natural logarithm, of the model's own distribution or of the one that was sampled from
    (`EngineConfig.logprobs_mode`).
    """

    token_id: int
    logprob: float
    top: tuple["TokenLogprobs", ...] = ()  # as many as were asked for
    data: bytes = b""  # what the token contributes to the text


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """One increment of a completion, as the engine hands it to the front end.

    `text` and `token_ids` are what is new since the last increment. `text` never holds half a
    character, and never runs past a stop string. The last increment has a `finish_reason`.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    error: Exception | None = None  # why it was given up; its reason is ABORT then
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens answered by the prefix cache
    queued_seconds: float | None = None  # waited for a slot; set on the first increment
    speculation: SpeculationStats | None = None  # set on the last increment
    # Half-open ranges of `text`, in order and apart, whose characters came from accepted drafts; a
    # character belongs to the token that completed it.
    accepted_spans: tuple[tuple[int, int], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of token_ids, one each, where the request asks for them
    # Of the prompt's tokens but the first, on the first increment, where the request asks for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
