"""What plans that are not read back may still produce: the bounds behind reservations and idling."""

import pytest

from mtp_jax.config import EngineConfig
from mtp_jax.scheduler.outstanding import OutstandingPlan, OutstandingPlans
from mtp_jax.scheduler.sequence import make_sequence
from tests.scheduler.harness import make_request, make_scheduler

CONFIG = EngineConfig(max_model_len=64)


@pytest.mark.parametrize(
    ("index", "fewest", "most"),
    [
        (4, 0, 0),  # the prompt is still in the ring
        (5, 1, 1),  # its last chunk leaves: the first token
        (6, 3, 12),  # the row may miss the first of four rounds
        (7, 4, 12),
    ],
)
def test_bounds_of_one_plan(index: int, fewest: int, most: int):
    sequence = make_sequence(make_request("a", (1, 2)), CONFIG, (), 0)
    sequence.exit_plan = 5
    plan = OutstandingPlan(index, rounds=4, exits=())
    assert plan.fewest_tokens(sequence) == fewest
    assert plan.most_tokens(sequence, widest=3) == most


def test_a_request_in_prefill_gets_nothing():
    sequence = make_sequence(make_request("a", (1, 2), max_tokens=1), CONFIG, (), 0)
    plans = OutstandingPlans()
    plans.push(OutstandingPlan(0, rounds=1, exits=()))
    assert plans.remaining(sequence) == 1 and not plans.surely_finish(sequence)


def test_remaining_counts_down_with_every_plan():
    sequence = make_sequence(make_request("a", (1, 2), max_tokens=8), CONFIG, (), 0)
    sequence.exit_plan = 0
    plans = OutstandingPlans()
    remaining = []
    for index, rounds in enumerate((1, 2, 4, 4)):
        plans.push(OutstandingPlan(index, rounds, exits=()))
        remaining.append(plans.remaining(sequence))
    assert remaining == [7, 6, 2, -2]
    assert plans.surely_finish(sequence)


@pytest.mark.parametrize(("prompt_tokens", "exit_plan"), [(4, 0), (5, 1), (8, 1), (9, 1), (13, 2)])
def test_the_plan_in_which_a_prompt_is_complete(prompt_tokens: int, exit_plan: int):
    """With two stages the chunk of tick 0 leaves at tick 1, that of tick 1 at tick 0 of the next plan."""
    config = EngineConfig(stages=2, max_model_len=64, page_size=4, prefill_chunk=4)
    scheduler = make_scheduler(config)
    scheduler.add(make_request("a", tuple(range(prompt_tokens)), max_tokens=8))
    while not any(chunk and chunk.is_final for chunk in scheduler.schedule().chunks):
        pass
    (sequence,) = scheduler._running.values()
    assert sequence.exit_plan == exit_plan
