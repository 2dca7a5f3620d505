"""Whatever arrives, and whenever it is aborted: tokens equal plain decoding, and all pages return."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mtp_jax.config import EngineConfig
from mtp_jax.request import EngineRequest
from tests.scheduler.harness import Harness, make_request
from tests.scheduler.ring_simulator import reference

CONTEXT = 40


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, the step at which it arrives, and how many steps later it is aborted (None: never)."""

    step: int
    request: EngineRequest
    abort_after: int | None


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    return EngineConfig(
        stages=draw(st.sampled_from((1, 2, 4))),
        data=(data := draw(st.sampled_from((1, 1, 2, 3)))),
        max_num_seqs=data * draw(st.integers(1, 7)),
        max_model_len=CONTEXT,
        page_size=4,
        num_pages=draw(st.sampled_from((7, 10, 12, 16, 40))),
        num_speculative_tokens=draw(st.integers(0, 3)),
        prefill_chunk=draw(st.sampled_from((3, 4, 8, 16))),
        max_rounds=draw(st.sampled_from((1, 2, 4))),
        min_rows=draw(st.sampled_from((1, 2))),
        enable_prefix_caching=draw(st.booleans()),
    )


def prompt_of_family(family: int, length: int, own_tail: int) -> tuple[int, ...]:
    """Prompts of one family share all but their last `own_tail` tokens."""
    shared = reference((family,), 1, 11, length)
    return tuple(shared[: length - own_tail] + [11] * own_tail)


@st.composite
def arrivals(draw: st.DrawFn, config: EngineConfig) -> list[Arrival]:
    pool = config.num_pages * config.page_size
    drawn = []
    for index in range(draw(st.integers(1, 9))):
        length = draw(st.integers(1, min(24, pool - 2)))
        longest = min(CONTEXT, pool) - length
        prompt = prompt_of_family(draw(st.integers(0, 1)), length, draw(st.integers(0, min(length, 3))))
        shares = None
        if drawn and draw(st.booleans()):
            parent = drawn[draw(st.integers(0, len(drawn) - 1))].request
            if len(parent.prompt_token_ids) + 1 < min(CONTEXT, pool):
                shares, prompt = parent.request_id, parent.prompt_token_ids
                longest = min(CONTEXT, pool) - len(prompt)
        drafts = draw(st.none() | st.integers(0, config.num_speculative_tokens))
        request = make_request(
            f"request-{index}",
            prompt,
            seed=draw(st.integers(0, 3)),
            shares=shares,
            max_tokens=draw(st.none() | st.integers(1, longest)),
            num_speculative_tokens=drafts,
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from(((), (3,), (*range(100, 109), 5)))),
        )
        step = draw(st.integers(0, 25))
        drawn.append(Arrival(step, request, draw(st.none() | st.integers(0, 25))))
    return drawn


def play(harness: Harness, workload: list[Arrival]) -> None:
    """Lets requests arrive and leave at their steps, between schedule and update as well."""
    last = max(arrival.step + (arrival.abort_after or 0) for arrival in workload)
    for step in range(last + 1):
        for arrival in workload:
            if arrival.step == step:
                harness.add(arrival.request)
        leaving = [a for a in workload if a.abort_after is not None and a.step + a.abort_after == step]
        early = leaving[::2]
        for arrival in early:
            harness.abort(arrival.request.request_id)
        plan = harness.dispatch()
        for arrival in leaving[1::2]:
            harness.abort(arrival.request.request_id)
        if harness.outstanding and (plan is None or len(harness.outstanding) >= harness.depth):
            harness.read_back()
    harness.finish_all()


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.data())
def test_tokens_equal_plain_decoding(data: st.DataObject):
    config = data.draw(configs())
    harness = Harness(
        config,
        seed=data.draw(st.integers(0, 99)),
        acceptance=data.draw(st.sampled_from((0.0, 0.6, 1.0))),
        join_first=data.draw(st.booleans()),
        depth=data.draw(st.sampled_from((1, 2))),
    )
    play(harness, data.draw(arrivals(config)))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("drafts", [0, 3])
def test_small_pool_preempts_and_everybody_finishes(stages: int, drafts: int):
    config = EngineConfig(
        stages=stages,
        max_num_seqs=6,
        max_model_len=CONTEXT,
        page_size=4,
        num_pages=14,
        num_speculative_tokens=drafts,
        prefill_chunk=8,
        max_rounds=4,
    )
    harness = Harness(config)
    for index in range(8):
        prompt = prompt_of_family(index, 9, 0)
        harness.add(make_request(str(index), prompt, seed=index, max_tokens=25, ignore_eos=True))
    harness.finish_all()
    assert harness.scheduler.num_preemptions > 0
