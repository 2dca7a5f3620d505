"""The tiny trained checkpoints in real engines: text behind held-out prompts, and what was accepted."""

import dataclasses
import functools
from pathlib import Path

from mtp_jax.engine.engine import Engine
from mtp_jax.loading import WeightSource, resolve_model
from mtp_jax.request import SamplingParams
from mtp_jax.train.repetition import distinct_share
from tests.checkpoints import ledger
from tests.parity.rig import Job, Value, make_engine, renew, run_jobs, tokens_of

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
NAMES = tuple(sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))  # those that are made
K = 3
NUM_PROMPTS, NUM_TOKENS = 64, 64
# Greedy elsewhere. This one has not learnt the cargo: the likeliest of a hundred numbers is less likely than
# "late", again and again (tests/checkpoints/README.md). Text of a seed is as repeatable as greedy text.
TEMPERATURES = {"qwen3_5_moe": 1.0}
SIZES: dict[str, Value] = {
    "max_model_len": 160,
    "page_size": 16,
    "num_pages": 384,
    "max_num_seqs": 32,
    "prefill_chunk": 64,
}


@dataclasses.dataclass(frozen=True)
class Served:
    """What serving some prompts came to."""

    texts: tuple[tuple[int, ...], ...]
    histogram: tuple[int, ...]  # index j: rounds that accepted exactly j drafts
    rounds: tuple[tuple[int, ...], ...]  # of each request, drafts accepted round by round

    def accepted(self, position: int) -> float:
        """Share of the rounds whose drafts up to this position, counted from 1, all stood."""
        return sum(self.histogram[position:]) / max(sum(self.histogram), 1)

    @property
    def distinct(self) -> float:
        """Mean share of distinct 4-grams of a text."""
        return sum(map(distinct_share, self.texts)) / len(self.texts)


@functools.cache
def checkpoint(name: str) -> WeightSource:
    return resolve_model(CHECKPOINTS / name)


@functools.cache
def held_out(name: str) -> tuple[tuple[int, ...], ...]:
    """Prompts of pages that no checkpoint was trained on: another seed, and 1e9 pages there could be."""
    tokenizer = checkpoint(name).tokenizer()
    return tuple(tuple(tokenizer.encode(prompt)) for prompt in ledger.prompts(1, NUM_PROMPTS))


def build(name: str, stages: int = 1, k: int = K, **overrides: Value) -> Engine:
    """An engine, compiled while whatever a test patches is in force."""
    return make_engine(checkpoint(name), stages=stages, num_speculative_tokens=k, **SIZES | overrides)


@functools.cache
def engine_of(name: str, stages: int = 1, k: int = K) -> Engine:
    """The engine as it is, compiled once a test run. Run `renew` of it."""
    return build(name, stages, k)


def serve(
    engine: Engine,
    name: str,
    count: int = NUM_PROMPTS,
    tokens: int = NUM_TOKENS,
    temperature: float | None = None,
) -> Served:
    """Answers to the first `count` held-out prompts, in a fresh state; the checkpoint's own temperature."""
    if temperature is None:
        temperature = TEMPERATURES.get(name, 0.0)
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    prompts = held_out(name)[:count]
    jobs = {str(index): Job(prompt, params, seed=index) for index, prompt in enumerate(prompts)}
    outputs = run_jobs(renew(engine), jobs)
    told = [outputs[str(index)] for index in range(count)]
    stats = [output[-1].speculation for output in told]
    assert all(one is not None for one in stats)
    histograms = [one.acceptance_histogram for one in stats]
    width = max(map(len, histograms), default=0)
    padded = [histogram + (0,) * (width - len(histogram)) for histogram in histograms]
    return Served(
        tuple(tuple(tokens_of(output)) for output in told),
        tuple(map(sum, zip(*padded, strict=True))),
        tuple(one.per_round_accepted for one in stats),
    )


@functools.cache
def served(name: str, stages: int = 1, k: int = K) -> Served:
    """All held-out prompts in the engine as it is."""
    return serve(engine_of(name, stages, k), name)
