"""What the compiled program is: how often it is compiled, what it copies, what it costs."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import mtp_jax.engine.plan_arrays
from mtp_jax.engine.buckets import Bucket, BucketTable, bucket_of
from mtp_jax.engine.build import construct, draw_blueprint
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.options import EngineOptions
from mtp_jax.request import EngineRequest, SamplingParams
from mtp_jax.scheduler.scheduler import Scheduler
from tests.parity.engines import shared_engine
from tests.parity.rig import (
    TINY,
    Job,
    RandomSource,
    blueprint,
    compile_bucket,
    greedy,
    make_engine,
    renew,
    run_jobs,
)

TWO_LAYERS = dataclasses.replace(TINY, num_hidden_layers=2)
FLOAT32 = 4


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Names of the functions that XLA compiled, or took from the compile cache, since the test began."""
    names: list[str] = []

    def listen(event: str, duration: float, **details: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_one_compile_a_bucket(compiles: list[str]) -> None:
    """200 mixed steps: sampled and greedy, of all lengths, aborted, preempted, with and without drafts."""
    overrides = {
        "max_model_len": 96,
        "page_size": 4,
        "num_pages": 60,
        "min_table_tokens": 24,
        "max_num_seqs": 6,
        "prefill_chunk": 16,
        "num_speculative_tokens": 2,
        "max_rounds": 2,
    }
    options = EngineOptions(background_compile=False, overrides=overrides)
    engine = construct(draw_blueprint(options, RandomSource(TWO_LAYERS)))
    rng, wanted, count, steps = np.random.default_rng(1), set(engine.executables.compile_seconds), 0, 0
    launch = engine._launch

    def watch(plan):
        wanted.add(engine._bucket(plan))
        return launch(plan)

    engine._launch = watch  # type: ignore[method-assign]
    while steps < 200 or engine.has_work():
        if steps < 200 and rng.random() < (0.1 if 80 <= steps < 140 else 0.5):
            ids = tuple(rng.integers(0, TINY.vocab_size, rng.integers(1, 70)).tolist())
            temperature = float(rng.choice([0.0, 1.0]))
            params = SamplingParams(
                temperature=temperature,
                top_k=int(rng.choice([0, 5])),
                max_tokens=int(rng.integers(1, 26)),
                num_speculative_tokens=int(rng.integers(0, 3)),
            )
            engine.add_request(EngineRequest(str(count), ids, params, seed=count))
            count += 1
        if rng.random() < 0.1 and count:
            engine.abort(str(rng.integers(count)))
        engine.step()
        steps += 1
    steps_compiled = sorted(name for name in compiles if "step_r" in name)
    preemptions = engine.stats().num_preemptions
    print(f"{len(wanted)} buckets, {steps} steps, {count} requests, {preemptions} preemptions")
    assert preemptions > 0
    assert len(wanted) > 6, "the steps were not mixed"
    assert (
        len(steps_compiled)
        == len(set(steps_compiled))
        == len(wanted)
        == len(engine.executables.compile_seconds)
    )
    before = len(compiles)
    for round_trip in range(2):
        run_jobs(engine, {f"again {round_trip}": Job((1, 2, 3), greedy(20))})
    assert compiles[before:] == []


# Memory


# (stages, K, chunk, rows) of the cases that CI runs: every value of each, at every Z.
MEMORY_IN_CI = {(1, 0, 0, 1), (1, 3, 16, 4), (2, 3, 0, 1), (2, 0, 16, 4), (4, 3, 16, 1), (4, 0, 0, 4)}
MEMORY_IN_CI |= {(1, 3, 0, 4), (1, 0, 16, 1)}
MEMORY_CASES = [
    pytest.param(*case, marks=() if case in MEMORY_IN_CI else pytest.mark.slow)
    for case in itertools.product((1, 2, 4), (0, 3), (0, 16), (1, 4))
]


@pytest.mark.parametrize(("stages", "k", "chunk", "rows"), MEMORY_CASES)
def test_no_cache_is_copied(stages: int, k: int, chunk: int, rows: int) -> None:
    """Temporaries of one device stay below one layer's keys, with caches of 16,384 positions."""
    model = dataclasses.replace(TINY, num_hidden_layers=1 if stages == 1 else stages + 1)
    sizes = {"stages": stages, "num_speculative_tokens": k, "max_num_seqs": 4 * stages, "min_rows": 1}
    drawn = blueprint(RandomSource(model), page_size=16, num_pages=1024, **sizes)
    compiled = compile_bucket(drawn, Bucket(1, rows, drawn.config.pages_per_slot, chunk, k))
    cache = 1024 * 16 * model.num_key_value_heads * model.head_dim * FLOAT32
    memory = compiled.memory_analysis()
    assert memory is not None
    print(f"temporaries {memory.temp_size_in_bytes / cache:.2f} of one cache of {cache / 2**20:.1f} MiB")
    assert memory.temp_size_in_bytes < cache
    # Every cache is an output in the place of its input.
    per_device = drawn.memory.cache
    assert memory.alias_size_in_bytes > per_device


def test_memory_plan_is_what_is_allocated() -> None:
    engine = renew(shared_engine(4, 3))
    drawn = blueprint(RandomSource(TINY), stages=4, num_speculative_tokens=3)

    def bytes_on_first_device(tree: object) -> int:
        first = jax.devices()[0]
        shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first]
        return sum(shard.data.nbytes for shard in shards)

    assert bytes_on_first_device(engine._weights) == drawn.memory.weights
    assert bytes_on_first_device(engine._state) == drawn.memory.cache + drawn.memory.other


# Cost


def hundred_token_buckets(max_model_len: int) -> set[Bucket]:
    """Buckets that the scheduler picks over the life of a request of 100 tokens, with default sizes."""
    source = RandomSource(TINY)
    overrides = {"max_model_len": max_model_len, "num_pages": 1024, "num_speculative_tokens": 1}
    drawn = draw_blueprint(EngineOptions(background_compile=False, overrides=overrides), source)
    table = BucketTable.of(drawn.config)
    scheduler = Scheduler(
        drawn.config,
        eos_token_ids=(),
        row_buckets=table.rows,
        width_buckets=table.widths,
        chunk_buckets=table.chunks,
    )
    scheduler.add(EngineRequest("a", tuple(range(70)), greedy(30)))
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(bucket_of(plan, drafts=1))
    return set(plans)


def test_context_limit_costs_nothing() -> None:
    """A request of 100 tokens asks for the same program at max_model_len 8192 and 512."""
    assert hundred_token_buckets(8192) == hundred_token_buckets(512)
    costs = {}
    for context in (512, 8192):
        overrides = {"max_model_len": context, "num_pages": 1024, "num_speculative_tokens": 1}
        drawn = draw_blueprint(EngineOptions(overrides=overrides), RandomSource(TINY))
        for bucket in sorted(hundred_token_buckets(context)):
            analysis = compile_bucket(drawn, bucket).cost_analysis()
            assert analysis is not None
            costs.setdefault(bucket, []).append((analysis["flops"], analysis["bytes accessed"]))
    for bucket, (short, long) in costs.items():
        print(
            bucket,
            "flops and bytes at 8192 over 512:",
            [f"{b / a:.3f}" for a, b in zip(short, long, strict=True)],
        )
        for a, b in zip(short, long, strict=True):
            assert abs(b / a - 1) < 0.1


def seconds_a_step(engine: Engine) -> float:
    """Median over steady decoding of one request."""
    engine.add_request(EngineRequest("a", tuple(range(70)), greedy(30)))
    seconds = []
    while engine.has_work():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[5:-2])


def test_context_limit_measured() -> None:
    """The same as measured time; a loose bound, because other programs share the machine."""
    times = {}
    for context in (512, 8192):
        sizes = {"max_model_len": context, "num_pages": 1024, "min_table_tokens": 256, "max_num_seqs": 1}
        engine = make_engine(RandomSource(TWO_LAYERS), num_speculative_tokens=0, page_size=16, **sizes)
        times[context] = min(seconds_a_step(renew(engine)) for _ in range(3))
    print(f"a step at max_model_len 8192 takes {times[8192] / times[512]:.2f} of that at 512: {times}")
    assert times[8192] < 2 * times[512]


# The host


def test_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Scheduling, sending and digesting take a few hundred microseconds a dispatch."""
    engine = renew(shared_engine(1, 3))
    run_jobs(engine, {str(i): Job((1, 2, 3 + i), greedy(80), seed=1000) for i in range(8)})
    milliseconds = 1e3 * engine.stats().host_seconds_per_dispatch
    print(f"host time a dispatch: {milliseconds:.2f} ms with 8 requests")
    assert 0 < milliseconds < 20


def test_steady_decode_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But a page table, when a request gets another page."""
    engine = renew(shared_engine(1, 3))
    for index in range(2):
        engine.add_request(EngineRequest(str(index), (1, 2, 3 + index), greedy(90), seed=1000))
    for _ in range(14):
        engine.step()
    sent: list[int] = []
    real = jax.device_put

    def count(arrays, *args, **kwargs):
        sent.append(len(arrays))
        return real(arrays, *args, **kwargs)

    plans = []
    launch = engine._launch

    def watch(plan):
        plans.append(tuple(len(slot.pages) for slot in plan.slots))
        return launch(plan)

    engine._launch = watch  # type: ignore[method-assign]
    monkeypatch.setattr(mtp_jax.engine.plan_arrays.jax, "device_put", count)
    for _ in range(14):
        engine.step()
    assert len(plans) == len(sent) == 14
    for before, after, fields in zip(plans, plans[1:], sent[1:], strict=False):
        assert fields == (0 if before == after else 2), "table and capacity, when a page was added"
    assert 0 in sent[1:]
