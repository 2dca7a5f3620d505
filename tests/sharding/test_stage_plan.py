"""Which layers each stage runs."""

import pytest

from sharding.stage_plan import StagePlan, balanced_plan


@pytest.mark.parametrize(
    ("layers", "stages", "expected", "overhead"),
    [
        (5, 1, ((0, 1, 2, 3, 4),), 0),
        (5, 2, ((0, 1, 2), (3, 4)), 1 / 6),
        (5, 4, ((0, 1), (2,), (3,), (4,)), 3 / 8),
        (30, 4, (tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 23)), tuple(range(23, 30))), 2 / 32),
        (4, 4, ((0,), (1,), (2,), (3,)), 0),
    ],
)
def test_table(layers: int, stages: int, expected: tuple[tuple[int, ...], ...], overhead: float) -> None:
    plan = balanced_plan(layers, stages)
    assert plan.layers == expected
    assert plan.overhead == pytest.approx(overhead)


def test_every_layer_once_in_order() -> None:
    for layers in range(1, 40):
        for stages in range(1, min(layers, 8) + 1):
            plan = balanced_plan(layers, stages)
            assert [layer for stage in plan.layers for layer in stage] == list(range(layers))
            sizes = [len(stage) for stage in plan.layers]
            assert max(sizes) - min(sizes) <= 1
            assert plan.num_slots == max(sizes)


def test_empty_slots() -> None:
    plan = balanced_plan(5, 4)
    assert [[plan.layer_at(slot, stage) for stage in range(4)] for slot in range(2)] == [
        [0, 2, 3, 4],
        [1, None, None, None],
    ]
    assert [plan.has_empty(slot) for slot in range(2)] == [False, True]


def test_describe() -> None:
    assert StagePlan.of(((0, 1), (2, 3))).describe() == "layers 0-1 | 2-3"
    assert StagePlan.of(((0, 1, 2), (3, 4))).describe() == "layers 0-2 | 3-4 (17% of the slots are empty)"


@pytest.mark.parametrize("stages", [0, 6])
def test_refuses(stages: int) -> None:
    with pytest.raises(ValueError, match="1 to 5, the model's number of layers"):
        balanced_plan(5, stages)
