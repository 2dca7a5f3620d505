"""From a request's body to engine requests: model name, token ids, limits."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence

from mtp_jax.request import EngineRequest, SamplingParams, expand_request
from mtp_jax.server.conversation import OpenEnd, PromptFields
from mtp_jax.server.errors import ApiError
from mtp_jax.server.interface import EngineCore
from mtp_jax.server.messages import ChatMessage
from mtp_jax.server.protocol import MAX_CHOICES, ChatBody, CompletionBody
from mtp_jax.server.structured import compile_grammar
from mtp_jax.server.turns import Dialect, Turn, TurnPlan, plan_turn

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat has none
_INLINE_CHARACTERS = 1024  # more are rendered and tokenized off the event loop
_MESSAGE_CHARACTERS = 32  # what a message costs a template besides its content


def check_model(engine: EngineCore, name: str | None) -> None:
    """Raises a 404 unless `name` is what is served, `default` or absent."""
    if name not in (None, "default", engine.model_name):
        message = f"the model {name!r} does not exist; this server has {engine.model_name!r} (or 'default')"
        raise ApiError(404, message, param="model", code="model_not_found")


async def encode(
    engine: EngineCore, texts: Sequence[str], add_special_tokens: bool, param: str
) -> list[list[int]]:
    """Token ids of each text; more than a few lines are tokenized off the event loop.

    A text that cannot fit the context whatever its tokens are is refused before it is tokenized.
    """
    most = engine.tokenizer.max_text_bytes(engine.config.max_model_len)
    for text in texts:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:  # JSON can say \ud800, and no tokenizer can read it
            message = f"{param}: expected text without unpaired surrogates"
            raise ApiError(400, message, param, "invalid_value") from None
        if size > most:
            message = (
                f"{param}: got {size} bytes of text; expected at most {most}, which is more than "
                f"the context length of {engine.config.max_model_len} tokens can hold"
            )
            raise ApiError(400, message, param, "context_length_exceeded")
    work = functools.partial(engine.tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens)
    return await _off_loop(sum(map(len, texts)), work)


async def _off_loop[T](num_characters: int, work: Callable[[], T]) -> T:
    """Runs `work` in a thread, unless so few characters take less time than the thread would."""
    return work() if num_characters <= _INLINE_CHARACTERS else await asyncio.to_thread(work)


async def render_chat(
    engine: EngineCore,
    messages: Sequence[ChatMessage],
    fields: PromptFields,
    tools: Sequence[dict[str, object]] | None,
) -> tuple[str, str | None]:
    """The chat template's text, and the part of the last message that is its end, if that goes on.

    Raises:
      InvalidRequestError: the template refuses the messages.
      ApiError: 400, the last message cannot go on.
    """
    end = OpenEnd(messages) if fields.continue_final_message else None
    plain = [message.as_template_message() for message in (messages if end is None else end.messages)]
    variables = fields.template_variables | {"tools": tools}
    work = functools.partial(engine.tokenizer.apply_chat_template, plain, **variables)  # pyright: ignore
    size = sum(_MESSAGE_CHARACTERS + message.num_characters for message in messages)
    text = await _off_loop(size + sum(len(str(tool)) for tool in tools or ()), work)
    return (text, None) if end is None else (end.cut(text), end.said)


def check_token_ids(engine: EngineCore, ids: list[int], param: str) -> None:
    size = engine.model_config.vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise ApiError(
                400, f"{param}: got token id {token}; expected 0 to {size - 1}", param, "invalid_value"
            )


def _check_length(
    engine: EngineCore, length: int, max_tokens: int | None, prompt_param: str, tokens_param: str
) -> None:
    limit = engine.config.max_model_len
    if length == 0:
        raise ApiError(400, f"{prompt_param}: the prompt has no tokens", prompt_param, "invalid_value")
    if length >= limit:
        message = (
            f"{prompt_param}: the prompt has {length} tokens; expected fewer than {limit}, the context length"
        )
        raise ApiError(400, message, prompt_param, "context_length_exceeded")
    if max_tokens is not None and length + max_tokens > limit:
        message = (
            f"{tokens_param}: got {max_tokens}; expected at most {limit - length}: "
            f"the prompt has {length} tokens and the context length is {limit}"
        )
        raise ApiError(400, message, tokens_param, "context_length_exceeded")


def _check_params(engine: EngineCore, params: SamplingParams) -> None:
    size = engine.model_config.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        count = len(getattr(params, name) or ())
        if count > size:
            raise ApiError(400, f"{name}: got {count} ids; expected at most {size}", name, "invalid_value")
    params.check_token_ids(size)
    limit = engine.config.num_speculative_tokens
    if params.num_speculative_tokens is not None and params.num_speculative_tokens > limit:
        message = f"num_speculative_tokens: got {params.num_speculative_tokens}; expected 0 to {limit}"
        raise ApiError(400, message, "num_speculative_tokens", "invalid_value")


async def completion_requests(engine: EngineCore, body: CompletionBody, name: str) -> list[EngineRequest]:
    """Choices in OpenAI's order: all n of the first prompt, then of the second, ..."""
    if body.max_tokens == 0 and not body.echo:
        message = "max_tokens: got 0; expected an integer of at least 1, or echo"
        raise ApiError(400, message, "max_tokens", "invalid_value")
    params = body.sampling_params(body.max_tokens)
    _check_params(engine, params)
    if len(body.prompt) * params.n > MAX_CHOICES:
        message = (
            f"prompt: got {len(body.prompt)} prompts × n = {params.n}; expected at most {MAX_CHOICES} choices"
        )
        raise ApiError(400, message, "prompt", "invalid_value")
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = await encode(engine, texts, body.add_special_tokens, "prompt") if texts else []
    prompts = encoded or [prompt for prompt in body.prompt if not isinstance(prompt, str)]
    await compile_grammar(engine, params)
    requests: list[EngineRequest] = []
    for index, ids in enumerate(prompts):
        _check_length(engine, len(ids), body.max_tokens, "prompt", "max_tokens")
        if not texts:
            check_token_ids(engine, ids, "prompt")
        own = params
        if body.max_tokens is None:  # nobody asked for a length: what fits is no mistake
            room = engine.config.max_model_len - len(ids)
            own = dataclasses.replace(params, max_tokens=min(DEFAULT_COMPLETION_TOKENS, room))
        requests += expand_request(f"{name}-{index}", ids, own)
    return requests


async def chat_text(engine: EngineCore, body: ChatBody, dialect: Dialect) -> tuple[str, TurnPlan]:
    """The prompt's text with the assistant's turn begun, and how that turn is read."""
    plan = plan_turn(
        dialect, body.tools or (), body.tool_choice, body.parallel_tool_calls, has_grammar=body.has_grammar
    )
    text, said = await render_chat(engine, body.messages, body, plan.tools)
    return plan.begin(text, said)


async def chat_requests(
    engine: EngineCore, body: ChatBody, name: str, dialect: Dialect
) -> tuple[list[EngineRequest], tuple[Turn, ...]]:
    """The choices of a chat call, and what reads their text."""
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        message = "max_completion_tokens: expected the same as max_tokens, or only one of them"
        raise ApiError(400, message, "max_completion_tokens", "invalid_value")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(
            400, f"{param}: got {max_tokens}; expected an integer of at least 1", param, "invalid_value"
        )
    params = body.sampling_params(max_tokens)
    _check_params(engine, params)
    text, plan = await chat_text(engine, body, dialect)
    params = _showing_marks(engine, params, plan)
    if plan.grammar is not None:
        params = dataclasses.replace(params, structured_outputs=plan.grammar)
    (ids,) = await encode(engine, [text], False, "messages")  # the template writes special tokens itself
    _check_length(engine, len(ids), max_tokens, "messages", param)
    await compile_grammar(engine, params)
    requests = expand_request(name, ids, params)
    return requests, tuple(plan.turn() for _ in requests)


def _showing_marks(engine: EngineCore, params: SamplingParams, plan: TurnPlan) -> SamplingParams:
    """Parameters under which the parsers get to see their marks, if these are special tokens."""
    marks = plan.marks()  # a special token may be a piece of one, as DeepSeek-V3.2's ｜DSML｜ is
    if any(special in mark for special in engine.tokenizer.special_texts for mark in marks):
        return dataclasses.replace(params, skip_special_tokens=False)
    return params
