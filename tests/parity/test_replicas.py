"""Replicas of the data axis: the text of plain decoding, whichever replica a request comes to.

The workloads are those of `test_greedy`, `test_sampling` and `test_scripted`: K = 0 to 3 by request, one
arrival a step, an abort at every step, groups that are not full.
"""

import functools

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.request import EngineRequest
from tests.parity.engines import MOST_TOKENS, PROMPT_LENGTHS, shared_engine
from tests.parity.rig import TINY, Job, RandomSource, greedy, make_engine, renew, run_jobs, tokens_of
from tests.parity.scripted_model import ScriptedSource, do_everything, scripted_engine
from tests.parity.test_greedy import FEW_PAGES, SCRAMBLED, K, check, crowd, run_and_check, workload
from tests.parity.test_sampling import alone, seeded_jobs, texts
from tests.parity.test_scripted import (
    check_greedy,
    jobs_of,
    params,
    sampled,
    sampling_cases,
    shaping_cases,
)

SLOW = pytest.mark.slow
LAYOUTS = ((2, 1, 2), (1, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 4))  # stages, tensor, data
IN_CI = LAYOUTS[0]
EVERY = pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=() if one == IN_CI else SLOW) for one in LAYOUTS], ids=str
)


def engine_of(layout: tuple[int, int, int], head: str = "rigged", **host: int | bool) -> Engine:
    """A fresh engine; `host` are fields that only the scheduler looks at."""
    stages, tensor, data = layout
    base = shared_engine(stages, K, kind="greedy", tensor=tensor, data=data)
    return renew(base, SCRAMBLED if head == "scrambled" else None, **host)


@pytest.mark.parametrize("head", ["rigged", "random", pytest.param("scrambled", marks=SLOW)])
@EVERY
def test_speculative(layout: tuple[int, int, int], head: str) -> None:
    engine = engine_of(layout, head)
    assert run_and_check(engine, head) > 100
    assert engine.stats().num_draft_tokens > 100


@EVERY
def test_aborts_at_every_step(layout: tuple[int, int, int]) -> None:
    """The same workload over and over in one engine, with an abort one step later each time."""
    engine = engine_of(layout)
    steps = range(len(PROMPT_LENGTHS) + 24) if layout == IN_CI else range(0, len(PROMPT_LENGTHS) + 24, 3)
    compared = sum(run_and_check(engine, "rigged", step) for step in steps)
    print(f"{layout}: {compared} tokens compared")
    assert engine.stats().prefix_cache_hits > 0


@EVERY
def test_prefix_cache(layout: tuple[int, int, int]) -> None:
    """The second time, prompts come to the replicas that have their pages."""
    engine = engine_of(layout)
    run_and_check(engine, "rigged")
    before = engine.stats().prefix_cache_hits
    run_and_check(engine, "rigged")
    assert engine.stats().prefix_cache_hits - before > 100


@EVERY
def test_preemption(layout: tuple[int, int, int]) -> None:
    """Far fewer pages than the requests of a replica need together."""
    engine = engine_of(layout, num_pages=FEW_PAGES)
    jobs = crowd(K, "rigged")
    assert check(jobs, run_jobs(engine, jobs)) == len(jobs) * MOST_TOKENS
    _, _, data = layout
    assert engine.stats().num_preemptions > 0 or data == 4, (
        "three requests of a replica may have pages enough"
    )


@pytest.mark.parametrize("kind", ["greedy", pytest.param("probabilistic", marks=SLOW)])
@EVERY
def test_a_seed_fixes_the_text(layout: tuple[int, int, int], kind: str) -> None:
    stages, tensor, data = layout
    assert texts(shared_engine(stages, K, kind=kind, tensor=tensor, data=data), seeded_jobs()) == alone(kind)


def test_a_replica_with_nothing_to_do() -> None:
    """A single request: the other replica has nothing to do at any tick, and the counters say so."""
    engine = engine_of(IN_CI)
    jobs = {"0": workload(K, "rigged")["0"]}
    assert check(jobs, run_jobs(engine, jobs)) > 0
    stats = engine.stats()
    stages, _, data = IN_CI
    assert 0 < stats.useful_ticks <= stats.ticks // (stages * data)


@pytest.mark.parametrize("per_group", [1, 2])
def test_steady_decode_is_all_useful(per_group: int) -> None:
    """As many requests as groups of all replicas, or more: every stage of each works at every tick."""
    stages, _, data = IN_CI
    engine, rng = engine_of(IN_CI), np.random.default_rng(1)
    for index in range(stages * data * per_group):
        ids = tuple(rng.integers(0, TINY.vocab_size, 3 + index).tolist())
        engine.add_request(EngineRequest(str(index), ids, greedy(80), seed=1000))
    for _ in range(16):  # all prompts in, all rows in flight
        engine.step()
    before = engine.stats()
    for _ in range(6):
        engine.step()
    after = engine.stats()
    ticks = after.ticks - before.ticks
    assert ticks == 6 * data * stages**2
    assert after.useful_ticks - before.useful_ticks == ticks


@pytest.mark.slow
def test_automatic_drafts() -> None:
    """K as measured: the choice is one for all replicas."""
    sizes = {"stages": 2, "data": 2, "num_speculative_tokens": 3, "adaptive_drafts": True}
    engine = make_engine(RandomSource(TINY), **sizes)
    jobs = workload(K, "random")
    check(jobs, run_jobs(engine, jobs))
    assert set(engine.stats().drafts_in_use) == set(engine._buckets.rows)


# Shaped logits and log-probabilities


@functools.cache
def scripted(stages: int, data: int) -> Engine:
    return scripted_engine(stages, K, data=data)


def scripted_of(stages: int, data: int) -> Engine:
    return do_everything(renew(scripted(stages, data), ScriptedSource("alternate")))


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "data"), [(1, 2), (2, 2)])
def test_shaping_and_reports(stages: int, data: int) -> None:
    """Every parameter, log-probabilities of tokens and of prompts."""
    check_greedy(scripted_of(stages, data), jobs_of(shaping_cases(), K))
    rng = np.random.default_rng(1)
    asked = params(prompt_logprobs=4, logprobs=2, max_tokens=3)
    jobs = {
        str(size): Job(tuple(rng.integers(0, 64, size).tolist()), asked, arrives=size // 9)
        for size in (1, 2, 15, 16, 17, 33, 45)
    }
    outputs = check_greedy(scripted_of(stages, data), jobs)
    for name, job in jobs.items():
        told = [entry.token_id for output in outputs[name] for entry in output.prompt_logprobs]
        assert told == list(job.prompt[1:])


@pytest.mark.slow
def test_shaped_and_sampled() -> None:
    """Seeded text under penalties, masks and min-p is that of plain decoding without replicas."""
    jobs = {
        f"{name} {seed}": Job((seed,), asked, seed=seed)
        for name, asked in sampling_cases().items()
        for seed in range(16)
    }
    outputs = run_jobs(scripted_of(2, 2), jobs)
    wanted = sampled(1, 0, "good")
    for name in jobs:
        assert tuple(tokens_of(outputs[name])) == wanted[name][0], name
