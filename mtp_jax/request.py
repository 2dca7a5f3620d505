"""Requests, sampling parameters and outputs: the plain types every layer shares."""

import dataclasses
import enum
import secrets
from collections.abc import Sequence

from mtp_jax.errors import InvalidRequestError


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client went away or asked for it


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
    max_tokens: int | None = 16  # completion tokens; None is as many as the context allows
    stop: tuple[str, ...] = ()  # strings that end the completion and are not part of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1  # completions of the same prompt
    num_speculative_tokens: int | None = None  # drafts a round for this request; None is the server's K
    skip_special_tokens: bool = True

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = (
            ("temperature", 0 <= self.temperature <= 100, "a number from 0 to 100"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and up to 1"),
            ("top_k", -1 <= self.top_k < 2**31, "-1 or 0 (off) or a positive 32-bit integer"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "an integer of at least 1"),
            ("n", 1 <= self.n <= 64, "1 to 64"),
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(0 <= t < 2**31 for t in self.stop_token_ids), "token ids"),
            (
                "num_speculative_tokens",
                self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
                "an integer of at least 0",
            ),
        )
        for name, ok, legal in checks:
            if not ok:
                raise InvalidRequestError(name, getattr(self, name), legal)


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """One completion to make. A request with n > 1 becomes n of these that name the first one."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0  # resolved: params.seed, or drawn by the front end
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
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens answered by the prefix cache
    queued_seconds: float | None = None  # waited for a slot; set on the first increment
    speculation: SpeculationStats | None = None  # set on the last increment
    # Half-open ranges of `text`, in order and apart, whose characters came from accepted drafts; a
    # character belongs to the token that completed it.
    accepted_spans: tuple[tuple[int, int], ...] = ()
