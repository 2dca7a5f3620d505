"""Greedy text is the text of plain decoding, whatever the ring, the head, the batch or the caches do."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.request import RequestOutput
from tests.parity.engines import MOST_TOKENS, PROMPT_LENGTHS, prompts, reference, shared_engine
from tests.parity.rig import TINY, Job, RandomSource, greedy, renew, rigged_rounds, run_jobs, tokens_of

K = 3
FEW_PAGES = 30  # the longest request needs 23
HEADS = ("random", "scrambled", "rigged")
UNRIGGED = 1000  # seeds from here on get the drafts of the MTP module
SCRAMBLED = RandomSource(TINY, head_seed=7, head_scale=20.0)


def test_reference_has_no_near_ties() -> None:
    """So every comparison below is exact, and nothing is forgiven."""
    texts, ties = reference()
    assert ties == 0
    assert sum(map(len, texts)) == len(PROMPT_LENGTHS) * MOST_TOKENS
    assert len({token for text in texts for token in text}) > 20, "texts without variety show little"


def engine_for(stages: int, k: int, head: str = "random", chunk: int = 16, **host: int | bool) -> Engine:
    """A fresh engine; `host` are fields that only the scheduler looks at."""
    base = shared_engine(stages, k, chunk, rounds=4 if host.get("max_rounds", 1) > 1 else 1)
    host = {"max_rounds": 1, "enable_prefix_caching": True} | host
    return renew(base, SCRAMBLED if head == "scrambled" else None, **host)


def workload(k: int, head: str, abort_step: int | None = None) -> dict[str, Job]:
    """One request a step, of unlike lengths and K; one of them is aborted before `abort_step`."""
    jobs, first_seed = {}, 0 if head == "rigged" else UNRIGGED
    for index, prompt in enumerate(prompts()):
        drafts = index % (k + 1) if index % 5 else k
        params = greedy(MOST_TOKENS - 2 * index % 19, drafts)
        aborts = abort_step if abort_step is not None and index == abort_step % len(prompts()) else None
        jobs[str(index)] = Job(prompt, params, arrives=index, aborts=aborts, seed=first_seed + index)
    return jobs


def check(jobs: Mapping[str, Job], outputs: Mapping[str, list[RequestOutput]]) -> int:
    """Compares every token with the reference; returns how many."""
    texts, compared = reference()[0], 0
    for name, job in jobs.items():
        tokens = tokens_of(outputs[name])
        wanted = list(texts[job.seed % UNRIGGED][: job.params.max_tokens])
        if job.aborts is None:
            assert tokens == wanted, f"request {name}"
            assert outputs[name][-1].finish_reason == "length"
        else:
            assert tokens == wanted[: len(tokens)], f"request {name}, aborted"
        compared += len(tokens)
    return compared


def check_acceptance(jobs: Mapping[str, Job], outputs: Mapping[str, list[RequestOutput]]) -> None:
    """A rigged head is accepted exactly where its table is right."""
    for name, job in jobs.items():
        if job.aborts is not None:
            continue
        speculation = outputs[name][-1].speculation
        assert speculation is not None and job.params.num_speculative_tokens is not None
        total = len(job.prompt) + (job.params.max_tokens or 0)
        rounds = rigged_rounds(len(job.prompt), total, job.params.num_speculative_tokens)
        rounds = [(drafts, accepted) for drafts, accepted in rounds if drafts]  # plain rounds are not counted
        assert speculation.num_rounds == len(rounds)
        assert speculation.num_draft_tokens == sum(drafts for drafts, _ in rounds)
        assert speculation.num_accepted_tokens == sum(accepted for _, accepted in rounds)
        counts = np.bincount([accepted for _, accepted in rounds]) if rounds else []
        assert speculation.acceptance_histogram == tuple(counts)


def run_and_check(engine: Engine, head: str, abort_step: int | None = None) -> int:
    jobs = workload(engine.config.num_speculative_tokens, head, abort_step)
    outputs = run_jobs(engine, jobs)
    if head == "rigged" and not engine.stats().num_preemptions:
        check_acceptance(jobs, outputs)
    return check(jobs, outputs)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_speculative(stages: int, head: str) -> None:
    """K = 0 to 3 per request inside one engine; the head decides the speed and nothing else."""
    engine = engine_for(stages, K, head)
    assert run_and_check(engine, head) > 100
    stats = engine.stats()
    rate = stats.num_accepted_tokens / stats.num_draft_tokens
    print(f"Z = {stages}, {head}: {rate:.2f} of {stats.num_draft_tokens} drafts accepted")
    assert stats.num_draft_tokens > 100
    assert rate > 0.3 if head == "rigged" else rate < 0.3


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_plain(stages: int) -> None:
    engine = engine_for(stages, 0)
    assert run_and_check(engine, "none") > 100
    assert engine.stats().num_draft_tokens == 0


@pytest.mark.parametrize(("stages", "head"), [(1, "rigged"), (2, "rigged"), (2, "random"), (4, "rigged")])
def test_aborts_at_every_step(stages: int, head: str) -> None:
    """The same workload over and over in one engine, with an abort one step later each time."""
    engine = engine_for(stages, K, head)
    compared = sum(run_and_check(engine, head, abort_step) for abort_step in range(len(PROMPT_LENGTHS) + 24))
    print(f"Z = {stages}, {head}: {compared} tokens compared over {len(PROMPT_LENGTHS) + 24} runs")
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("stages", "head"), [(1, "rigged"), (2, "random"), (4, "rigged")])
def test_prefix_cache(stages: int, head: str, caching: bool) -> None:
    """Twice: the second time, nearly every prompt is answered from pages of the first."""
    engine = engine_for(stages, K, head, enable_prefix_caching=caching)
    run_and_check(engine, head)
    before = engine.stats().prefix_cache_hits
    run_and_check(engine, head)
    hits = engine.stats().prefix_cache_hits - before
    assert hits > 100 if caching else hits == 0


def crowd(k: int, head: str) -> dict[str, Job]:
    """Everybody at once, each to the full length."""
    return {
        name: dataclasses.replace(job, arrives=0, params=greedy(MOST_TOKENS, k))
        for name, job in workload(k, head).items()
    }


@pytest.mark.parametrize(
    ("stages", "k", "head"), [(1, 3, "rigged"), (2, 3, "random"), (4, 3, "rigged"), (2, 0, "none")]
)
@pytest.mark.parametrize("caching", [True, False])
def test_preemption(stages: int, k: int, head: str, caching: bool) -> None:
    """Far fewer pages than the requests need together: some are thrown out and computed again."""
    engine = engine_for(stages, k, head, num_pages=FEW_PAGES, enable_prefix_caching=caching)
    jobs = crowd(k, head)
    assert check(jobs, run_jobs(engine, jobs)) == len(jobs) * MOST_TOKENS
    assert engine.stats().num_preemptions > 0
    print(f"Z = {stages}, K = {k}, {head}: {engine.stats().num_preemptions} preemptions")


@pytest.mark.parametrize("head", ["rigged", "random"])
@pytest.mark.parametrize("rounds", [2, 4])
def test_rounds(rounds: int, head: str) -> None:
    """Several rounds a dispatch, once nobody waits for the prompt lane."""
    engine = engine_for(2, K, head, max_rounds=rounds)
    seen = set()
    launch = engine._launch

    def watch(plan):
        seen.add(plan.rounds)
        return launch(plan)

    engine._launch = watch  # type: ignore[method-assign]
    run_and_check(engine, head)
    assert max(seen) == rounds


@pytest.mark.parametrize("head", HEADS)
def test_long_chunks(head: str) -> None:
    assert run_and_check(engine_for(2, K, head, chunk=64), head) > 100


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize(("k", "head"), [(0, "none"), *((K, head) for head in HEADS)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_everything(stages: int, k: int, head: str, chunk: int) -> None:
    """The whole matrix."""
    compared = 0
    for caching in (True, False):
        for rounds in (1, 2, 4):
            host = {"max_rounds": rounds, "enable_prefix_caching": caching}
            engine = engine_for(stages, k, head, chunk, **host)
            for abort_step in (None, *range(len(PROMPT_LENGTHS) + 24)):
                compared += run_and_check(engine, head, abort_step)
            engine = engine_for(stages, k, head, chunk, num_pages=FEW_PAGES, **host)
            jobs = crowd(k, head)
            compared += check(jobs, run_jobs(engine, jobs))
            assert engine.stats().num_preemptions > 0
    print(f"Z = {stages}, K = {k}, {head}, chunks of {chunk}: {compared} tokens compared")
