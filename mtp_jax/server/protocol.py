"""The bodies of requests. Strict: no coercion, unknown fields are errors, nothing is ignored silently.

Parameters of OpenAI's and vLLM's APIs that this release does not implement are fields all the same:
they may have the value that changes nothing, and any other is refused by name.
"""

import json
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import PrivateAttr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mtp_jax.request import MAX_CHOICES_OF_A_PROMPT, MAX_LOGPROBS, GrammarSpec, SamplingParams
from mtp_jax.server.body import Body, invalid
from mtp_jax.server.conversation import Messages, PromptFields
from mtp_jax.server.errors import ApiError
from mtp_jax.server.messages import ToolChoice
from mtp_jax.server.structured import ResponseFormat, StructuredOutputs, TextFormat, spec_of_format

MAX_STOP_STRINGS = 16
MAX_CHOICES = 1024  # prompts × n of one call

# Parameter -> the values that change nothing; null always is one.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
_CHAT = (
    "audio",
    "function_call",
    "functions",
    "modalities",
    "prediction",
    "verbosity",
    "web_search_options",
)
_COMPLETION = ("suffix",)
_SHARED = tuple(name for name in NEUTRAL if name not in _CHAT + _COMPLETION)


def _same(value: object, legal: object) -> bool:
    numbers = isinstance(value, int | float) and isinstance(legal, int | float)
    both_bool = isinstance(value, bool) == isinstance(legal, bool)
    return value == legal and (both_bool if numbers else type(value) is type(legal))


def check_neutral(value: object, info: ValidationInfo) -> object:
    """Refuses a parameter of `NEUTRAL` unless its value changes nothing."""
    legal = NEUTRAL[info.field_name or ""]
    if value is None or any(_same(value, item) for item in legal):
        return None
    words = " or ".join(["null", *(json.dumps(item) for item in legal)])
    text = f"not supported by this release; leave it out or send {words}"
    raise PydanticCustomError("unsupported", "{text}", {"text": text})


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool = False  # every chunk says what its choice has so far

    @field_validator("continuous_usage_stats")
    @classmethod
    def _continuous(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not info.data.get("include_usage"):
            raise invalid("false unless include_usage is true")
        return value


class SamplingBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted and unused, as OpenAI does.
    user: str | None = None
    metadata: dict[str, object] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's and our own extra parameters.
    top_k: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False  # adds `token_ids` and `prompt_token_ids` to the answer
    include_metrics: bool = False  # adds `metrics.speculative_decoding` to the answer
    response_format: ResponseFormat | None = None
    _format_field: str = PrivateAttr("response_format")  # what the caller knows it as
    structured_outputs: StructuredOutputs | None = None
    # Not implemented; see NEUTRAL.
    length_penalty: object = None
    service_tier: object = None
    use_beam_search: object = None

    _neutral = field_validator(*_SHARED, mode="plain")(check_neutral)

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: object) -> object:
        items = [value] if isinstance(value, str) else value
        if items is None:
            return None
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise invalid("a non-empty string or a list of non-empty strings")
        if len(items) > MAX_STOP_STRINGS:
            raise invalid(f"at most {MAX_STOP_STRINGS} strings")
        return items

    @field_validator("stream_options")
    @classmethod
    def _stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise invalid("null unless stream is true")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not (key.isascii() and key.isdecimal() and len(key) < 11):
                raise invalid(f"token ids as keys, not {key!r}")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _structured_outputs(
        cls, value: StructuredOutputs | None, info: ValidationInfo
    ) -> StructuredOutputs | None:
        if value is not None and spec_of_format(info.data.get("response_format")) is not None:
            raise invalid("null beside a response_format")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _prompt_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise invalid("null where stream is true")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report of each token; None: no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def num_choices(self) -> int:
        """Completions to make of a prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def has_grammar(self) -> bool:
        return self.structured_outputs is not None or not isinstance(self.response_format, TextFormat | None)

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the text must be. Raises InvalidRequestError for choices that are none."""
        asked = self.structured_outputs
        return spec_of_format(self.response_format, self._format_field) if asked is None else asked.spec()

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k is None else self.top_k,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            n=self.num_choices,
            num_speculative_tokens=self.num_speculative_tokens,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            banned_token_ids=tuple(self.banned_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            structured_outputs=self.grammar,
        )


class CompletionBody(SamplingBody):
    """POST /v1/completions. `prompt` is a list of prompts, each text or token ids."""

    prompt: list[str | list[int]]
    max_tokens: int | None = None
    add_special_tokens: bool = True
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None  # completions made, of which the n likeliest are answered
    suffix: object = None

    _neutral_too = field_validator(*_COMPLETION, mode="plain")(check_neutral)

    @field_validator("best_of")
    @classmethod
    def _best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if value is not None and not n <= value <= MAX_CHOICES_OF_A_PROMPT:
            raise invalid(f"n (here {n}) to {MAX_CHOICES_OF_A_PROMPT}, not {value}")
        if value not in (None, n) and info.data.get("stream"):
            raise invalid("n where stream is true: which completions are best is known at the end")
        return value

    @property
    def num_choices(self) -> int:
        return super().num_choices if self.best_of is None or self.n == 0 else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_choices > super().num_choices else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [
            count
            for count in (self.prompt_logprobs, self.logprobs if self.echo else None)
            if count is not None
        ]
        return max(asked, default=None)

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: object) -> list[str | list[int]]:
        return as_prompts(value)


class ChatBody(PromptFields, SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    audio: object = None
    function_call: object = None
    functions: object = None
    modalities: object = None
    prediction: object = None
    verbosity: object = None
    web_search_options: object = None

    _neutral_too = field_validator(*_CHAT, mode="plain")(check_neutral)

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise invalid("0 or null unless logprobs is true")
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise invalid(f"0 to {MAX_LOGPROBS}, not {value}")
        return value

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def chat_body(fields: dict[str, object], names: Mapping[str, str]) -> ChatBody:
    """A chat request that another protocol's request comes to.

    Args:
      fields: chat's.
      names: what that protocol calls chat's fields, for errors; `response_format` is among them.

    Raises:
      ApiError: 400, where it is none.
    """
    try:
        body = ChatBody.model_validate(fields)
        body._format_field = names["response_format"]
        return body
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        parts = [names.get(str(part), str(part)) for part in first["loc"]]
        where = ".".join(parts)
        raise ApiError(400, f"{where}: {first['msg']}", where, "invalid_value") from None


class TokenizeBody(PromptFields):
    """POST /tokenize: one of `prompt` and `messages`, of which chat would make the same prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid", "prompt: expected exactly one of prompt and messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def is_token_ids(value: object) -> bool:
    """True for a non-empty list of integers (booleans are not integers here)."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def as_prompts(value: object) -> list[str | list[int]]:
    """OpenAI's four shapes of `prompt` as one list: a text, texts, token ids, lists of token ids."""
    legal = "a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"
    prompts: list = [value] if isinstance(value, str) or is_token_ids(value) else value  # type: ignore[assignment]
    if not isinstance(prompts, list) or not prompts:
        raise invalid(legal)
    if not (all(isinstance(item, str) for item in prompts) or all(is_token_ids(item) for item in prompts)):
        raise invalid(legal)
    return prompts
