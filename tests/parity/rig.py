"""Tiny random models and engines for the parity tests: real engine, real scheduler, random weights."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import NamedSharding
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from mtp_jax.config import ModelConfig
from mtp_jax.engine.buckets import Bucket
from mtp_jax.engine.build import Blueprint, construct, draw_blueprint
from mtp_jax.engine.draft import Drafter
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.guided import Grammars
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.plan_arrays import PlanWriter
from mtp_jax.engine.shaping_slots import ShapingSlots
from mtp_jax.engine.stand_ins import idle_plan
from mtp_jax.engine.state import EngineState, state_shapes, state_specs
from mtp_jax.loading import WeightSource, resolve_model
from mtp_jax.models.registry import expected_tensors
from mtp_jax.request import EngineRequest, RequestOutput, SamplingParams
from mtp_jax.scheduler.scheduler import Scheduler
from mtp_jax.text.tokenizer import Tokenizer

Value = int | str | bool | tuple[int, ...]

TINY = ModelConfig(
    model_type="mimo",
    vocab_size=97,  # so that 2 and 4 devices pad it
    hidden_size=32,
    num_hidden_layers=5,  # so that 2 and 4 stages leave layer slots empty
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=16384,
    attention_bias=True,
    num_nextn_predict_layers=1,
)


class RandomSource:
    """A checkpoint that does not exist: weights drawn by name, so each is the same whatever reads it.

    `head_scale` multiplies the weights of the MTP module, `head_seed` draws another one.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, head_seed: int = 0, head_scale: float = 1.0):
        self.config, self._seed = config, seed
        self._head_seed, self._head_scale = head_seed, head_scale
        self._shapes = expected_tensors(config)

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32)

    def nbytes(self, name: str) -> int:
        return 4 * int(np.prod(self.shape(name)))

    def read(self, name: str) -> np.ndarray:
        shape, in_head = self._shapes[name], ".mtp_layers." in name
        rng = np.random.default_rng([self._seed, self._head_seed * in_head, *name.encode()])
        drawn = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            return 1 + 0.1 * drawn
        if name == "model.embed_tokens.weight":
            return drawn
        return drawn * np.float32((self._head_scale if in_head else 1.0) * shape[-1] ** -0.5)

    def tokenizer(self) -> Tokenizer:
        """Single bytes, ids from 0."""
        alphabet = sorted(ByteLevel.alphabet())[: self.config.vocab_size]
        backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
        backend.decoder = decoders.ByteLevel()
        return Tokenizer(backend, "random", {})

    def describe(self) -> str:
        return f"random {self.config.model_type}"


class WithRandomHead(RandomSource):
    """A real checkpoint with a random MTP module beside it."""

    def __init__(self, target: WeightSource, head_seed: int = 0, head_scale: float = 1.0):
        config = dataclasses.replace(target.config, num_nextn_predict_layers=1)
        super().__init__(config, 0, head_seed, head_scale)
        self._target = target

    def read(self, name: str) -> np.ndarray:
        return super().read(name) if ".mtp_layers." in name else self._target.read(name)

    def tokenizer(self) -> Tokenizer:
        return self._target.tokenizer()


def smollm2(head_seed: int = 0, head_scale: float = 1.0) -> WithRandomHead:
    """The default model with a random head."""
    return WithRandomHead(resolve_model(), head_seed, head_scale)


def blueprint(source: WeightSource, **overrides: Value) -> Blueprint:
    """A small engine with one bucket of rows, of table widths and of chunks.

    That makes two executables, and one more for each larger number of rounds. All are compiled by
    `construct`, while whatever a test patches is in force.
    """
    values: dict[str, Value] = {
        "max_model_len": 96,
        "page_size": 4,
        "num_pages": 256,
        "min_table_tokens": 1 << 20,
        "max_num_seqs": 8,
        "prefill_chunk": 16,
    }
    values |= overrides
    groups = int(values.get("data", 1)) * int(values.get("stages", 1))
    rows = -(-int(values["max_num_seqs"]) // groups)
    values.setdefault("min_rows", rows)
    drawn = draw_blueprint(EngineOptions(background_compile=False, overrides=values), source)
    return dataclasses.replace(
        drawn, buckets=dataclasses.replace(drawn.buckets, chunks=drawn.buckets.chunks[-1:])
    )


def make_engine(source: WeightSource, **overrides: Value) -> Engine:
    """The engine of `blueprint`."""
    return construct(blueprint(source, **overrides))


def renew(engine: Engine, source: WeightSource | None = None, **host: Value) -> Engine:
    """A new engine on another's executables: an empty state and a scheduler of its own.

    Args:
      source: draws the MTP module anew; None keeps it.
      host: fields of the scheduler's configuration (`num_pages` may only be lowered, `max_rounds` compiles).
    """
    config, old = dataclasses.replace(engine.config, **host), engine._scheduler  # type: ignore[arg-type]
    assert config.num_pages <= engine.config.num_pages
    scheduler = Scheduler(
        config,
        eos_token_ids=engine.model_config.eos_token_ids,
        row_buckets=old._row_buckets,
        width_buckets=old._width_buckets,
        chunk_buckets=old._chunk_buckets,
    )
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), engine._state)
    weights = engine._weights
    if source is not None:
        layout = engine.executables._program.layout
        weights = layout.load(source.read, source.read, lambda done, total: None)
    return Engine(
        model_name=engine.model_name,
        model_config=engine.model_config,
        config=config,
        tokenizer=engine.tokenizer,
        scheduler=scheduler,
        executables=engine.executables,
        buckets=engine._buckets,
        writer=PlanWriter(config, engine._writer.placement),
        shaping=ShapingSlots(config.max_num_seqs, engine._shaping.padded_vocab, engine._writer.placement),
        grammars=Grammars(
            engine.tokenizer,
            engine.model_config.vocab_size,
            engine.model_config.eos_token_ids,
            engine._shaping.padded_vocab,
            config.max_num_seqs,
            engine._writer.placement,
        ),
        weights=weights,
        state=state,
    )


def compile_bucket(drawn: Blueprint, bucket: Bucket) -> jax.stages.Compiled:
    """One executable of an engine that is not built: nothing is allocated."""
    program, config = drawn.program, drawn.config
    layout = program.layout
    mesh = layout.placement.mesh

    def placed(shape: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    weights = jax.tree.map(placed, layout.shapes(), layout.specs())
    state = jax.tree.map(placed, state_shapes(layout, config), state_specs(layout, config))
    plan = PlanWriter(config, layout.placement).write(idle_plan(bucket, config), bucket)
    return program.step(bucket).lower(weights, state, plan).compile()


@dataclasses.dataclass(frozen=True)
class Job:
    """A request of a scripted workload: added before step `arrives`, aborted before step `aborts`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    aborts: int | None = None
    seed: int = 0


def run_jobs(
    engine: Engine, jobs: Mapping[str, Job], max_steps: int = 5000
) -> dict[str, list[RequestOutput]]:
    """Drives the engine until all jobs are done. Outputs by request; aborted ones keep what they got."""
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in jobs}
    last = max((job.arrives for job in jobs.values()), default=0)
    for step in range(max_steps):
        for name, job in jobs.items():
            if job.arrives == step:
                engine.add_request(EngineRequest(name, job.prompt, job.params, job.seed))
            if job.aborts == step:
                engine.abort(name)
        for output in engine.step():
            outputs[output.request_id].append(output)
        if step >= last and not engine.has_work():
            assert engine.stats().kv_cache_usage == 0, "pages leaked"
            return outputs
    raise AssertionError(f"not done after {max_steps} steps")


def state_of(engine: Engine) -> EngineState:
    """The state after the last launched dispatch."""
    for launched in engine._unread:
        launched.output.result()  # the launcher's thread is done with it
    return engine._state


def tokens_of(outputs: Iterable[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def greedy(max_tokens: int, num_drafts: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, num_speculative_tokens=num_drafts
    )


@contextmanager
def rigged_drafts(sequences: Sequence[Sequence[int]]) -> Iterator[None]:
    """Engines compiled inside draft from a table, not by the MTP module, for requests of a small seed.

    A seed below len(sequences) is a row of it: prompt and known continuation (greedy decoding has no other
    use for a seed). Drafts are right, except at positions 2, 5, 8, ...: there they are one id too high.
    Requests of other seeds get the MTP module's drafts, so that one program serves every kind of head.
    """
    longest = max(map(len, sequences))
    table = np.zeros((len(sequences), longest + 16), np.int32)  # drafts run past the end of a sequence
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence)] = sequence
    propose_by_module = Drafter._propose

    def propose(
        self: Drafter, output: jax.Array, slot: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        token, logits = propose_by_module(self, output, slot, position)
        seed = self.plan.seed[slot]
        rigged = (seed[:, 0] < len(sequences)) & (seed[:, 1] == 0)
        known = jnp.asarray(table)[jnp.where(rigged, seed[:, 0], 0).astype(jnp.int32), position]
        wrong = (position % 3 == 2).astype(jnp.int32)
        return jnp.where(rigged, (known + wrong) % self.model.vocab_size, token), logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "_propose", propose)
        yield


def rigged_rounds(prompt: int, total: int, num_drafts: int) -> list[tuple[int, int]]:
    """(drafts, accepted) of each round that `rigged_drafts` implies for a request of `total` tokens."""
    known, rounds = prompt + 1, []
    while known < total:
        offered = min(num_drafts, total - known - 1)
        accepted = 0
        while accepted < offered and (known + accepted) % 3 != 2:
            accepted += 1
        rounds.append((offered, accepted))
        known += accepted + 1
    return rounds
