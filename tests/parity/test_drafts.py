"""Whatever number of drafts, kind of sampling or vocabulary a dispatch runs with, the text is the same."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mtp_jax.engine.adaptive import DraftChooser
from mtp_jax.engine.build import construct, draw_blueprint
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.options import EngineOptions
from mtp_jax.loading.mtp_head import DRAFT_VOCAB_IDS
from mtp_jax.models.registry import mtp_tensors
from mtp_jax.request import EngineRequest
from tests.parity.engines import MOST_TOKENS, prompts, reference, shared_engine
from tests.parity.rig import (
    TINY,
    Job,
    RandomSource,
    greedy,
    make_engine,
    renew,
    rigged_drafts,
    run_jobs,
    state_of,
)
from tests.parity.test_greedy import check, workload
from tests.parity.test_sampling import seeded_jobs, texts

K = 3
PREFIX = "model.mtp_layers.0."
SLOW = pytest.mark.slow
SLOW_SWITCHES = ((1, "random"), (1, "rigged"), (2, "random"), (4, "random"), (4, "rigged"))
# One of each stage count and kind of draft runs in CI; all pairs in the full run.
STAGES_AND_KINDS = pytest.mark.parametrize(
    ("stages", "kind"),
    [
        (1, "probabilistic"),
        (2, "greedy"),
        pytest.param(1, "greedy", marks=SLOW),
        pytest.param(2, "probabilistic", marks=SLOW),
    ],
)


class Wandering(DraftChooser):
    """Takes the next number of drafts from a fixed sequence, dispatch after dispatch."""

    def __init__(self, sequence: Iterator[int]):
        super().__init__(K, K, (1,))
        self._sequence = sequence
        self.used: list[int] = []

    def choose(self, rows: int, offered: int) -> int:
        self.used.append(next(self._sequence))
        return self.used[-1]

    def timed(self, rows: int, drafts: int, seconds_a_round: float) -> None:
        """Nothing is learnt."""


def random_drafts(seed: int) -> Iterator[int]:
    """Any number of drafts at any dispatch: every change, up and down, also while flights are under way."""
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(0, K + 1))


@functools.cache
def switching_engine(stages: int) -> Engine:
    """Every executable that `random_drafts` can ask for is compiled inside, with rigged drafts."""
    sequences = [prompt + text for prompt, text in zip(prompts(), reference()[0], strict=True)]
    with rigged_drafts(sequences):
        engine = make_engine(RandomSource(TINY), stages=stages, num_speculative_tokens=K)
        for bucket in list(engine.executables.compile_seconds):
            for drafts in range(K):
                engine.executables.compile(dataclasses.replace(bucket, drafts=drafts))
    return engine


def wander(engine: Engine, sequence: Iterator[int]) -> Wandering:
    engine._chooser = Wandering(sequence)
    return engine._chooser


@pytest.mark.parametrize(
    ("stages", "head"),
    [(2, "rigged"), *(pytest.param(*case, marks=SLOW) for case in SLOW_SWITCHES)],
)
def test_any_change_of_k_keeps_the_text(stages: int, head: str) -> None:
    for seed in range(3):
        engine = renew(switching_engine(stages))
        chooser = wander(engine, random_drafts(seed))
        jobs = workload(K, head)
        outputs = run_jobs(engine, jobs)
        assert check(jobs, outputs) > 100
        assert set(chooser.used) == set(range(K + 1))
    accepted = engine.stats().num_accepted_tokens
    assert accepted > 20 if head == "rigged" else accepted < 40


@pytest.mark.parametrize("stages", [1, 2])
def test_drafts_after_plain_rounds_are_those_of_steady_speculation(stages: int) -> None:
    """Rounds without drafts keep the MTP module's cache true: whoever drafts later, drafts the same."""

    def drafts_at_the_end(sequence: list[int]) -> np.ndarray:
        engine = renew(switching_engine(stages))
        chooser = wander(engine, iter(sequence))
        engine.add_request(EngineRequest("one", prompts()[4], greedy(MOST_TOKENS), seed=1000))
        while len(chooser.used) < len(sequence):  # it is over before the request is
            engine.step()
        assert engine.stats().num_accepted_tokens == 0, "a rejected draft a round, so that positions agree"
        slots = state_of(engine).slots
        return np.asarray(slots.drafts)[0], int(slots.length[0])

    steady = drafts_at_the_end([K] * 18)
    switched = drafts_at_the_end([K] * 3 + [0] * 11 + [K] * 4)
    assert steady[1] == switched[1]
    assert steady[0].tolist() == switched[0].tolist()
    assert min(steady[0]) >= 0


# Kinds of sampling


@functools.cache
def static_engine(stages: int, kind: str) -> Engine:
    """An executable for each kind of sampling, chosen on the host."""
    sizes = {"stages": stages, "num_speculative_tokens": K, "draft_sampling": kind}
    return make_engine(RandomSource(TINY), static_sampling=True, **sizes)


@STAGES_AND_KINDS
def test_kinds_of_sampling_agree(stages: int, kind: str) -> None:
    """Greedy, tempered and cut requests, alone and together, against a conditional on the device."""
    engine, plain = static_engine(stages, kind), shared_engine(stages, K, kind=kind)
    jobs = seeded_jobs()
    jobs |= {f"greedy {i}": Job(prompt, greedy(12), arrives=2 * i) for i, prompt in enumerate(prompts()[:3])}
    assert texts(engine, jobs) == texts(plain, jobs)
    for name, job in jobs.items():
        alone = {name: dataclasses.replace(job, arrives=0)}
        assert texts(engine, alone) == texts(plain, alone)
    kinds = {bucket.sampling.name for bucket in engine.executables.compile_seconds}
    assert kinds == {"GREEDY", "WHOLE", "ANY"} | ({"NOISE"} if kind == "greedy" else set())


# A reduced draft vocabulary


def save_head(path: Path, source: RandomSource, ids: np.ndarray | None) -> Path:
    """The source's MTP module as a stand-alone head that drafts among `ids`."""
    tensors = {name: source.read(name).astype(ml_dtypes.bfloat16) for name in mtp_tensors(source.config)}
    if ids is not None:
        tensors[PREFIX + DRAFT_VOCAB_IDS] = ids.astype(np.int32)
    save_file(tensors, path)
    return path


def engine_with_head(path: Path, **overrides: int | str) -> Engine:
    target = RandomSource(dataclasses.replace(TINY, num_nextn_predict_layers=0))
    values = {"max_model_len": 96, "page_size": 4, "num_pages": 256, "min_table_tokens": 1 << 20}
    values |= {"max_num_seqs": 8, "min_rows": 8, "prefill_chunk": 16, "num_speculative_tokens": K}
    options = EngineOptions(mtp_head=str(path), background_compile=False, overrides={**values, **overrides})
    return construct(draw_blueprint(options, target))


@STAGES_AND_KINDS
def test_all_ids_are_as_good_as_no_reduction(stages: int, kind: str, tmp_path: Path) -> None:
    """A reduced head that leaves nothing out drafts, and so samples, exactly like the whole one."""
    source = RandomSource(TINY)
    every = save_head(tmp_path / "every.safetensors", source, np.arange(TINY.vocab_size))
    whole = save_head(tmp_path / "whole.safetensors", source, None)
    found = [
        texts(engine_with_head(path, stages=stages, draft_sampling=kind), seeded_jobs())
        for path in (every, whole)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=SLOW)])
def test_few_ids_draft_no_others(stages: int, tmp_path: Path) -> None:
    """Text as ever; drafts from the list alone, also where the devices' shares are padded."""
    ids = np.sort(np.random.default_rng(3).permutation(TINY.vocab_size)[:21])
    engine = engine_with_head(save_head(tmp_path / "few.safetensors", RandomSource(TINY), ids), stages=stages)
    jobs = workload(K, "random")
    seen: set[int] = set()
    step = engine.step

    def watched():
        outputs = step()
        seen.update(np.asarray(state_of(engine).slots.drafts).ravel().tolist())
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    check(jobs, run_jobs(engine, jobs))
    drafted = seen - {-1, 0}
    assert len(drafted) > 5
    assert drafted <= set(ids.tolist())
