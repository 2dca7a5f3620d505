"""Automatic K: the arithmetic, and what it comes to against costs and acceptance that are known."""

import random

import pytest

from mtp_jax.engine.adaptive import FIRST_PAUSE, SAMPLES, SETTLE, Acceptance, DraftChooser

K = 3


def feed(acceptance: Acceptance, chances: list[float], rounds: int, rng: random.Random) -> None:
    for _ in range(rounds):
        accepted = 0
        while accepted < len(chances) and rng.random() < chances[accepted]:
            accepted += 1
        acceptance.add(len(chances), accepted)


def test_tokens_a_round() -> None:
    """1 + c1 + c1 c2 + c1 c2 c3 with the chances that rounds were drawn from."""
    acceptance = Acceptance(K)
    feed(acceptance, [0.8, 0.5, 0.25], 1900, random.Random(0))
    assert acceptance.tokens_a_round(0) == 1
    # Three standard deviations of 1900 rounds: 3 * 0.4 / 1900 ** 0.5 = 0.03, and more for later drafts.
    assert acceptance.tokens_a_round(1) == pytest.approx(1.8, abs=0.03)
    assert acceptance.tokens_a_round(3) == pytest.approx(1.8 + 0.4 + 0.1, abs=0.06)


def test_acceptance_forgets() -> None:
    acceptance, rng = Acceptance(K), random.Random(1)
    feed(acceptance, [0.9, 0.9, 0.9], 5000, rng)
    feed(acceptance, [0.1, 0.1, 0.1], 9000, rng)
    assert acceptance.tokens_a_round(1) == pytest.approx(1.1, abs=0.06)


def test_fewer_drafts_offered_say_nothing_of_later_ones() -> None:
    """Rounds that offer one draft move c1 alone: what a second one adds, per first one, stays."""
    acceptance = Acceptance(K)

    def second_chance() -> float:
        first = acceptance.tokens_a_round(1) - 1
        return (acceptance.tokens_a_round(2) - acceptance.tokens_a_round(1)) / first

    before = second_chance()
    for _ in range(200):
        acceptance.add(1, 1)
    assert acceptance.tokens_a_round(1) > 1.98
    assert second_chance() == pytest.approx(before)


def drive(
    chooser: DraftChooser, rows: int, seconds: dict[int, float], chances: list[float], dispatches: int
) -> dict[int, int]:
    """Serves with these costs and chances; how many dispatches ran with each k."""
    rng, used = random.Random(2), dict.fromkeys(range(K + 1), 0)
    for _ in range(dispatches):
        k = chooser.choose(rows, K)
        used[k] += 1
        accepted = 0
        while accepted < k and rng.random() < chances[accepted]:
            accepted += 1
        if k:
            chooser.verified(k, accepted)
        chooser.timed(rows, k, seconds[k] * rng.uniform(0.97, 1.03))
    return used


FREE = {0: 1.0, 1: 1.02, 2: 1.04, 3: 1.06}  # a GPU with few rows: verification costs next to nothing
DEAR = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}  # a CPU with many: every row costs
MILD = {0: 1.0, 1: 1.4, 2: 2.0, 3: 2.7}
SOME = {0: 1.0, 1: 1.05, 2: 1.1, 3: 1.15}


@pytest.mark.parametrize(
    ("seconds", "chances", "best"),
    [
        (FREE, [0.8, 0.7, 0.6], 3),
        (SOME, [0.01, 0.01, 0.01], 0),
        (DEAR, [0.9, 0.8, 0.8], 0),
        (MILD, [0.8, 0.4, 0.3], 1),
    ],
)
@pytest.mark.parametrize("initial", range(K + 1))
def test_finds_the_best_k(seconds: dict[int, float], chances: list[float], best: int, initial: int) -> None:
    """And loses little on the way: all but the trials run with it."""
    chooser, dispatches = DraftChooser(K, initial, (1, 4)), 3000
    used = drive(chooser, 4, seconds, chances, dispatches)
    decided = chooser.take_decided()
    assert decided[-1].drafts == best and decided[-1].rows == 4
    assert str(best) in decided[-1].describe()
    trials = len(decided) * K * (SETTLE + SAMPLES)
    early = 3 * FIRST_PAUSE  # the first two rounds of trials, a pause and a double one apart, may be wrong
    assert sum(count for k, count in used.items() if k != best) <= trials + early
    assert trials < 0.05 * dispatches
    assert chooser.in_use() == {1: initial, 4: chooser.choose(4, K)}


def test_changes_its_mind() -> None:
    chooser = DraftChooser(K, K, (1,))
    drive(chooser, 1, SOME, [0.9, 0.9, 0.9], 2000)
    first = chooser.take_decided()[-1].drafts
    drive(chooser, 1, SOME, [0.02, 0.02, 0.02], 9000)
    assert (first, chooser.take_decided()[-1].drafts) == (3, 0)


def test_never_more_than_requests_want() -> None:
    offers = range(K + 1)
    assert [DraftChooser(K, K, (1,)).choose(1, offered) for offered in offers] == [0, 1, 2, 3]


def test_a_dispatch_of_another_k_is_no_sample() -> None:
    """What was launched before a trial began, or on a larger executable, says nothing about the trial's k."""
    chooser = DraftChooser(K, K, (1,))
    for _ in range(3 * (SETTLE + SAMPLES)):
        chooser.timed(1, 0, 1e-9)
    assert chooser.choose(1, K) == K


def test_requests_that_want_fewer_drafts_end_a_trial_that_nobody_can_run() -> None:
    """A trial of 3 drafts, and clients that ask for 1: trials go on with what is asked for."""
    chooser, seen = DraftChooser(K, K, (1,)), set()
    for _ in range(10 * (SETTLE + SAMPLES)):
        k = chooser.choose(1, 1)
        seen.add(k)
        chooser.verified(1, 0) if k else None
        chooser.timed(1, k, DEAR[k])
    assert seen == {0, 1}
    assert chooser.take_decided()[-1].drafts == 0


def test_a_k_without_a_program_is_left_out() -> None:
    chooser = DraftChooser(K, 0, (1,))
    for _ in range(10 * (SETTLE + SAMPLES)):
        k = chooser.choose(1, K)
        if k == 1:
            chooser.cannot(1, 1)  # its compile failed, and 0 runs instead
            k = chooser.choose(1, K)
        chooser.timed(1, k, FREE[k])
    decided = chooser.take_decided()[-1]
    assert decided.drafts == 0 and decided.tokens_a_second[1] == 0
