"""Which layers each stage runs."""

import pytest

from sharding.stage_plan import StagePlan, balanced_plan, plan_stages


@pytest.mark.parametrize(
    ("layers", "stages", "expected", "overhead"),
    [
        (5, 1, ((0, 1, 2, 3, 4),), 0),
        (5, 2, ((0, 1, 2), (3, 4)), 1 / 5),
        (5, 4, ((0, 1), (2,), (3,), (4,)), 3 / 5),
        (30, 4, (tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 23)), tuple(range(23, 30))), 2 / 30),
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
    assert (
        StagePlan.of(((0, 1, 2), (3, 4))).describe()
        == "layers 0-2 | 3-4 (empty slots add 20.0% to the trunk)"
    )


@pytest.mark.parametrize("stages", [0, 6])
def test_refuses(stages: int) -> None:
    with pytest.raises(ValueError, match="1 to 5, the model's number of layers"):
        balanced_plan(5, stages)


def test_overhead_is_weighed_by_size() -> None:
    """A small layer's empty slot costs what that layer takes, not what the others do."""
    plan = StagePlan.of(((0, 1), (2,)), "abb", (1.0, 10.0, 10.0))
    assert plan.slots == ((0, None), (1, 2))
    assert plan.overhead == pytest.approx(1 / 21)


def _upper(one: str, two: str) -> str | None:
    """`A` can hold what `a` needs, and so on."""
    return one if one == two else one.upper() if one.upper() == two.upper() else None


def test_mixed_slots() -> None:
    """A slot of the larger kind holds both, and as few slots as possible are mixed."""
    apart = StagePlan.of(((0, 1, 2), (3, 4, 5)), "aaAaAa")
    assert apart.num_slots == 4 and not apart.mixed
    plan = StagePlan.of(((0, 1, 2), (3, 4, 5)), "aaAaAa", join=_upper)
    assert plan.slots == ((0, 3), (1, 4), (2, 5))
    assert plan.mixed == (1, 2)
    assert ["aaAaAa"[plan.any_layer(slot)] for slot in range(3)] == ["a", "A", "A"]


def test_mixed_slots_are_chosen_where_they_save_memory() -> None:
    kinds = "aaA" * 5  # a period of 3 over 4 stages
    plan = plan_stages(4, kinds, join=_upper)
    assert plan.overhead < plan_stages(4, kinds).overhead
    assert plan_stages(5, kinds, join=_upper).mixed == (), "the cuts fall on periods"
    for stage, layers in enumerate(plan.layers):
        held = [plan.layer_at(slot, stage) for slot in range(plan.num_slots)]
        assert [layer for layer in held if layer is not None] == list(layers)
    for slot in range(plan.num_slots):
        held = {kinds[layer] for layer in plan.slots[slot] if layer is not None}
        assert kinds[plan.any_layer(slot)] == min(held), "upper case comes first"


def test_given_layers() -> None:
    assert plan_stages(3, "aaaaa", layers=(1, 3, 1)).layers == ((0,), (1, 2, 3), (4,))
    assert plan_stages(1, "aaaaa", layers=(5,)).num_slots == 5


@pytest.mark.parametrize("layers", [(3,), (3, 3), (4, 2, -1), (5, 0), (1, 2, 2), ()])
def test_refuses_layers_that_cannot_be(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^2 numbers from 1 that add up to 5, .* such as 3,2$"):
        plan_stages(2, "aaaaa", layers=layers)
