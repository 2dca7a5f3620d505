"""Acceptance of trained heads on held-out prompts: it is there, on every layout, and mistakes take it away.

Random weights cannot show a bad draft: nothing of theirs is ever accepted. The checkpoints are small, and
trained by `python -m tests.checkpoints.make`.
"""

import pytest

from tests.parity import mistakes, test_goldens
from tests.parity.mistakes import Mistake
from tests.parity.trained import (
    CHECKPOINTS,
    NAMES,
    NUM_PROMPTS,
    NUM_TOKENS,
    K,
    build,
    engine_of,
    held_out,
    serve,
    served,
)

SLOW = pytest.mark.slow
FEW, SHORT = 16, 24  # prompts and tokens where a mistake is seen at once
LEAST_ACCEPTED = 0.6
LEAST_DISTINCT = 0.5  # below it text goes in circles, which any head can foresee
# Of the true acceptance, what a mistake leaves at most. A foreign embedding leaves a half (in the report a
# third): the target's state alone tells much of what follows. Without the projection it is a thirtieth.
FORGOTTEN = 0.6
# Stale positions leave more, 0.69 measured: the token before and the target's state are still the right ones.
FORGOTTEN_BY = {mistakes.stale_draft_indices: 0.8}


ALL = [pytest.param(name, marks=() if name == "mimo" else SLOW) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_small(name: str) -> None:
    assert sum(path.stat().st_size for path in (CHECKPOINTS / name).iterdir()) < 3e6


@pytest.mark.parametrize("name", ALL)
def test_drafts_are_accepted(name: str) -> None:
    found = served(name)
    print(name, "accepted", [round(found.accepted(j), 3) for j in range(1, K + 1)], round(found.distinct, 3))
    assert found.accepted(1) >= LEAST_ACCEPTED
    assert found.distinct >= LEAST_DISTINCT
    assert len(found.texts) == NUM_PROMPTS and {len(text) for text in found.texts} == {NUM_TOKENS}


@SLOW
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_acceptance_is_that_of_one_stage(name: str, stages: int, k: int) -> None:
    """fp32, greedy or of a seed: not about the same but the same, round by round."""
    alone, spread = served(name, 1, k), served(name, stages, k)
    assert spread.texts == alone.texts
    assert spread.rounds == alone.rounds
    assert spread.histogram == alone.histogram and sum(alone.histogram) >= NUM_PROMPTS * NUM_TOKENS // (k + 1)


# Mistakes

COLLAPSES = [
    ("mimo", mistakes.skip_fc),
    ("mimo", mistakes.foreign_embedding),
    ("glm_moe_dsa", mistakes.skip_fc),
    ("glm_moe_dsa", mistakes.foreign_embedding),
    ("glm_moe_dsa", mistakes.stale_draft_indices),
    ("qwen3_5_moe", mistakes.skip_fc),
    ("qwen3_5_moe", mistakes.foreign_embedding),
]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [pytest.param(*case, marks=() if case == COLLAPSES[0] else SLOW) for case in COLLAPSES],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_mistakes_in_the_head_collapse_acceptance(
    name: str, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave the text alone: that is why nobody noticed them."""
    right = serve(engine_of(name), name, FEW, SHORT)
    mistake(monkeypatch)
    wrong = serve(build(name), name, FEW, SHORT)
    print(name, right.accepted(1), wrong.accepted(1))
    assert right.accepted(1) >= LEAST_ACCEPTED
    assert wrong.accepted(1) < FORGOTTEN_BY.get(mistake, FORGOTTEN) * right.accepted(1)
    assert wrong.texts == right.texts


@SLOW
def test_a_branch_on_the_rank_collapses_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage is all first rank, and sees nothing of it."""
    right = serve(engine_of("mimo"), "mimo", FEW, SHORT)
    mistakes.skip_fc_off_first_rank(monkeypatch)
    wrong = serve(build("mimo", stages=2), "mimo", FEW, SHORT)
    print("mimo", right.accepted(1), wrong.accepted(1))
    assert wrong.accepted(1) < FORGOTTEN * right.accepted(1)
    assert wrong.texts == right.texts


def test_recycling_before_the_norm_is_not_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden drafts see it; K = 1 could not (there is nothing to recycle)."""
    mistakes.recycle_before_norm(monkeypatch)
    with pytest.raises(AssertionError):
        test_goldens.test_tiny_drafts("tiny_mimo", 1)


@SLOW
def test_a_state_that_is_not_rolled_back_fails_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen3_5_moe"
    right = serve(engine_of(name), name, FEW, SHORT)
    assert right.texts == serve(engine_of(name, k=0), name, FEW, SHORT).texts
    assert any(count < K for rounds in right.rounds for count in rounds), "nothing to roll back"
    mistakes.keep_all_rows_everywhere(monkeypatch)
    assert serve(build(name), name, FEW, SHORT).texts != right.texts


def test_the_prompts_are_unlike() -> None:
    prompts = held_out("mimo")
    assert len(set(prompts)) == NUM_PROMPTS and len({len(prompt) for prompt in prompts}) > 3
