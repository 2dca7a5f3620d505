"""Tiny random models and engines for the parity tests: real engine, real scheduler, random weights."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import tokenizers
from tokenizers import decoders, models

from mtp_jax.config import ModelConfig
from mtp_jax.engine.build import EngineOptions, construct, draw_blueprint
from mtp_jax.engine.engine import Engine
from mtp_jax.loading.source import expected_shapes
from mtp_jax.request import EngineRequest, RequestOutput, SamplingParams
from mtp_jax.text.tokenizer import Tokenizer

TINY = ModelConfig(
    model_type="mimo",
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=512,
    attention_bias=True,
    num_nextn_predict_layers=1,
)


class RandomSource:
    """A checkpoint that does not exist: weights drawn by name, so each is the same whatever reads it."""

    name = "random"
    path = "random"

    def __init__(self, config: ModelConfig, seed: int = 0, scale: float = 1.0):
        self.config, self._seed, self._scale = config, seed, scale
        self._shapes = expected_shapes(config)

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        rng = np.random.default_rng([self._seed, *name.encode()])
        drawn = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            return 1 + 0.1 * drawn
        if name == "model.embed_tokens.weight":
            return drawn
        return drawn * np.float32(self._scale * shape[-1] ** -0.5)

    def tokenizer(self) -> Tokenizer:
        """A byte-level tokenizer of single bytes, ids from 0."""
        alphabet = sorted(decoders_alphabet())[: self.config.vocab_size]
        vocab = {char: index for index, char in enumerate(alphabet)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.decoder = decoders.ByteLevel()
        return Tokenizer(backend, "random", {})

    def describe(self) -> str:
        return f"random {self.config.model_type}"


def decoders_alphabet() -> list[str]:
    """The characters that stand for bytes in byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def make_engine(source: RandomSource, **overrides: int | str | bool) -> Engine:
    """An engine without background compiles, small pages and buckets."""
    values = {
        "max_model_len": 128,
        "page_size": 4,
        "num_pages": 256,
        "min_table_tokens": 32,
        "max_num_seqs": 8,
    }
    options = EngineOptions(background_compile=False, overrides=values | overrides)
    return construct(draw_blueprint(options, source))


@dataclasses.dataclass(frozen=True)
class Job:
    """A request of a scripted workload: added before step `arrives`, aborted before step `aborts`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    aborts: int | None = None
    seed: int = 0


def run_jobs(
    engine: Engine, jobs: Mapping[str, Job], max_steps: int = 2000
) -> dict[str, list[RequestOutput]]:
    """Drives the engine until all jobs are done. Outputs by request; aborted ones keep what they got."""
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in jobs}
    for step in range(max_steps):
        for name, job in jobs.items():
            if job.arrives == step:
                engine.add_request(EngineRequest(name, job.prompt, job.params, job.seed))
            if job.aborts == step:
                engine.abort(name)
        for output in engine.step():
            outputs[output.request_id].append(output)
        pending = any(step < job.arrives for job in jobs.values())
        if not pending and not engine.has_work():
            return outputs
    raise AssertionError(f"not done after {max_steps} steps")


def tokens_of(outputs: Iterable[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
