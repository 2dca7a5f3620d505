"""What the front end needs of an engine and of a tokenizer, and what it tells the metrics."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.stats import EngineStats
from mtp_jax.request import EngineRequest, RequestOutput


@dataclasses.dataclass
class Timing:
    """When things happened to one request, in `time.monotonic()` seconds, and its tokens so far."""

    arrived: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0


class Tokenizer(Protocol):
    """What the front end needs of `mtp_jax.text`'s tokenizer."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_texts(self) -> frozenset[str]: ...
    def use_chat_template(self, template: str) -> None: ...
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    def decode_batch(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]: ...
    def max_text_bytes(self, num_tokens: int) -> int: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str: ...


class EngineCore(Protocol):
    """What the front end needs of `mtp_jax.engine`'s Engine: synchronous, driven by one thread."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def model_name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class Observer(Protocol):
    """Told, on the event loop, of what passes by; the metrics."""

    def engine_ready(self, engine: EngineCore) -> None: ...
    def output(self, request: EngineRequest, timing: Timing, output: RequestOutput, now: float) -> None: ...
    def aborted(self, request: EngineRequest, timing: Timing, now: float) -> None: ...
    def stepped(self, stats: EngineStats) -> None: ...
