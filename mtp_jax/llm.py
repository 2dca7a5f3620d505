"""Offline use, with vLLM's manners.

>>> from mtp_jax import LLM, SamplingParams  # doctest: +SKIP
>>> llm = LLM()  # doctest: +SKIP
>>> llm.generate("The sky is", SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP
"""

import atexit
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, TypedDict

from tqdm import tqdm

from mtp_jax.config import EngineConfig
from mtp_jax.engine.cluster import find_cluster
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.hosts import build_together, follow, lead
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.prepare import default_compile_cache, prepare_jax
from mtp_jax.engine.stats import EngineStats
from mtp_jax.errors import InvalidRequestError, InvalidValueError
from mtp_jax.progress import PhaseBars
from mtp_jax.request import (
    EngineRequest,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    expand_request,
)
from mtp_jax.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
ChatMessages = Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int  # 0 to n - 1
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # a FinishReason: "stop" or "length", or "abort" where `error` says what happened
    stop_reason: int | str | None  # the stop token or stop string that ended it
    acceptance: SpeculationStats  # what speculation did for it
    logprobs: tuple[TokenLogprobs, ...] = ()  # of token_ids, where SamplingParams.logprobs asks for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens but the first, likewise
    error: Exception | None = None  # why it could not be finished; see `LLM.generate`


@dataclasses.dataclass(frozen=True)
class CompletionResult:
    """A prompt and its `n` completions."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int  # prompt tokens that the prefix cache answered


class LLM:
    """A model and its engine in this process; not for use from several threads at once.

    Args:
      model: Hugging Face directory or GGUF file; None is the default model.
      stages, tensor, data: the mesh; their product is the number of devices. "auto" chooses by the model and
        the devices that there are.
      num_speculative_tokens: drafts a round. None or "auto": where the model has an MTP module, 0 to 3,
        whatever is measured to be the fastest; else 0.
      dtype: `float32`, `bfloat16` or `float16`; None chooses by device.
      max_model_len: tokens of prompt and completion together. None chooses by model and device.
      mtp_head: file or folder with the weights of an MTP module.
      kv_cache_gib: memory for KV pages on each device, instead of `num_pages`.
      compile_cache: folder for compiled programs, or `off`. None keeps what JAX is configured to
        use, or `~/.cache/mtp_jax/xla` if that is nothing.
      coordinator, num_processes, process_id: for a model on several hosts, where the same script runs in
        every process: HOST:PORT of process 0, how many processes there are, and which this is. coordinator
        "auto" takes all three from Cloud TPU, SLURM or Kubernetes. Only process 0 gets an LLM: in the others
        the constructor works for it until it is closed (or process 0 ends), and then raises SystemExit.
      engine_options: other fields of EngineConfig, such as max_num_seqs, page_size, num_pages,
        prefill_chunk, max_rounds, draft_sampling, enable_prefix_caching.

    Raises:
      InvalidValueError: an option or a checkpoint that cannot be used.
      SystemExit: in a process other than 0, at the end.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        stages: int | Literal["auto"] = 1,
        tensor: int | Literal["auto"] = 1,
        data: int | Literal["auto"] = 1,
        num_speculative_tokens: int | Literal["auto"] | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        mtp_head: str | Path | None = None,
        kv_cache_gib: float | None = None,
        compile_cache: str | Path | None = None,
        use_tqdm: bool = True,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        **engine_options: int | str | bool | tuple[int, ...],
    ):
        legal = {field.name for field in dataclasses.fields(EngineConfig)}
        for name, value in engine_options.items():
            if name not in legal:
                raise InvalidValueError(name, value, f"no such option; there are {', '.join(sorted(legal))}")
        if kv_cache_gib is not None and not 0 < kv_cache_gib < math.inf:
            raise InvalidValueError("kv_cache_gib", kv_cache_gib, "a finite number above 0")
        overrides = {"stages": stages, "tensor": tensor, "data": data, **engine_options}
        optional = {"num_speculative_tokens": num_speculative_tokens, "max_model_len": max_model_len}
        overrides |= {name: value for name, value in optional.items() if value is not None}
        options = EngineOptions(
            model=None if model is None else str(model),
            mtp_head=None if mtp_head is None else str(mtp_head),
            dtype=dtype or "auto",
            kv_cache_gib=kv_cache_gib,
            overrides=overrides,
        )
        auto = coordinator == "auto"
        cluster = None
        if auto or (coordinator, num_processes, process_id) != (None, None, None):
            cluster = find_cluster(None if auto else coordinator, num_processes, process_id)
        given = [size for size in (stages, tensor, data) if isinstance(size, int)]
        _prepare(math.prod(given), compile_cache, 1 if cluster is None else cluster.num_processes)
        if cluster is not None and cluster.process_id:
            follow(cluster, options)
            raise SystemExit(0)
        leader = None if cluster is None else lead(cluster)
        bars = PhaseBars()
        try:
            self._engine: Engine | None = build_together(options, leader, bars if use_tqdm else _silent)
        finally:
            bars.close()
        if leader is not None:
            atexit.register(self.close)  # the other processes end in good order then
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine. Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[CompletionResult]:
        """Completes prompts; they share the engine's slots, and results keep their order.

        Args:
          prompts: a text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list of these.
          sampling_params: one for all, or one a prompt.

        A completion that comes to where it cannot go on (a grammar that no token can follow, a program that
        cannot be compiled) has an `error`, and the others their text.

        Raises:
          InvalidRequestError: a prompt or parameter that cannot be served; nothing has run then.
        """
        items = _as_list(prompts)
        texts, ids = [], []
        for item in items:
            text, tokens = self._read(item)
            texts.append(text)
            ids.append(tokens)
        return self._run(texts, ids, _params_for(len(items), sampling_params), use_tqdm)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_variables: object,
    ) -> list[CompletionResult]:
        """Like `generate`, for one conversation or several, by the model's chat template."""
        if not messages:
            raise InvalidRequestError("messages", messages, "at least one message")
        one = isinstance(messages[0], Mapping)
        conversations: Sequence[ChatMessages] = [messages] if one else messages  # type: ignore[list-item,assignment]
        tokenizer = self.engine.tokenizer
        texts = [tokenizer.apply_chat_template(each, **template_variables) for each in conversations]  # type: ignore[arg-type]
        ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return self._run(texts, ids, _params_for(len(texts), sampling_params), use_tqdm)

    def close(self) -> None:
        """Frees the engine; may be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            atexit.unregister(self.close)
            engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, item: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """Text (if it was text) and token ids of one prompt."""
        legal = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
        if isinstance(item, Mapping):
            if len(item) != 1 or next(iter(item)) not in ("prompt", "prompt_token_ids"):
                raise InvalidRequestError("prompt", item, legal)
            return self._read(next(iter(item.values())))  # type: ignore[arg-type]
        if isinstance(item, str):
            return item, tuple(self.engine.tokenizer.encode(item))
        if not isinstance(item, Sequence) or not all(type(token) is int for token in item):
            raise InvalidRequestError("prompt", item, legal)
        size = self.engine.model_config.vocab_size
        for token in item:
            if not 0 <= token < size:
                raise InvalidRequestError("prompt_token_ids", token, f"token ids from 0 to {size - 1}")
        return None, tuple(item)

    def _run(
        self,
        texts: Sequence[str | None],
        ids: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
    ) -> list[CompletionResult]:
        names = [f"llm-{next(self._ids)}" for _ in ids]
        groups = [expand_request(*each) for each in zip(names, ids, params, strict=True)]
        outputs = self._complete([request for group in groups for request in group], use_tqdm)
        return [
            CompletionResult(
                request_id=name,
                prompt=text,
                prompt_token_ids=tokens,
                outputs=tuple(_join(index, outputs[r.request_id]) for index, r in enumerate(group)),
                num_cached_tokens=max(output.num_cached_tokens for output in outputs[group[0].request_id]),
            )
            for name, text, tokens, group in zip(names, texts, ids, groups, strict=True)
        ]

    def _complete(self, requests: list[EngineRequest], use_tqdm: bool) -> dict[str, list[RequestOutput]]:
        """Runs requests to their ends; whatever goes wrong, none of them stays in the engine."""
        engine = self.engine
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        unfinished: set[str] = set()
        try:
            for request in requests:
                engine.add_request(request)
                unfinished.add(request.request_id)
            with tqdm(total=len(requests), desc="completions", disable=not use_tqdm) as bar:
                while unfinished:
                    for output in engine.step():
                        outputs[output.request_id].append(output)
                        if output.finish_reason is not None:
                            unfinished.discard(output.request_id)
                            bar.update()
        finally:
            for request_id in unfinished:
                engine.abort(request_id)
        return outputs


def _silent(phase: str, done: float, total: float) -> None:
    pass


def _prepare(num_devices: int, compile_cache: str | Path | None, num_processes: int) -> None:
    import jax

    chosen = compile_cache or jax.config.jax_compilation_cache_dir or default_compile_cache()  # pyright: ignore
    prepare_jax(num_devices, str(chosen), num_processes)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if prompts and all(type(item) is int for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(
    count: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if len(sampling_params) != count:
        raise InvalidRequestError(
            "sampling_params", len(sampling_params), f"one, or one for each of {count} prompts"
        )
    return list(sampling_params)


def _join(index: int, outputs: list[RequestOutput]) -> CompletionOutput:
    last = outputs[-1]
    assert last.finish_reason is not None
    return CompletionOutput(
        index=index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=last.finish_reason.value,
        stop_reason=last.stop_reason,
        acceptance=last.speculation or SpeculationStats(),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
        error=last.error,
    )
