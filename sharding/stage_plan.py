"""Which layers each pipeline stage runs. Host data, computed before any array exists.

A stage runs its layers in *layer slots*. Slot j of every stage shares one stacked weight leaf with
a leading `stage` axis, so all stages have the same slots, and a slot has one kind of layer. Where layers
do not divide, or where their kinds do not line up, some stages leave slots empty (a cond that computes
nothing and writes nothing).
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

EMPTY_PRICE = 0.15  # what an empty slot's memory (and its cond) weighs against a busy one's time
REACH = 3  # layers by which a cut is moved in search of a better plan


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """`layers[z]` are the layer indices of stage z, in order, contiguous over stages.

    `slots[j][z]` is the layer in slot j of stage z; None where that stage leaves the slot empty.
    `sizes` are those of all layers, in any unit; layers of one kind are equally large.
    """

    layers: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int | None, ...], ...]
    sizes: tuple[float, ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[Sequence[int]],
        kinds: Sequence[Hashable] | None = None,
        sizes: Sequence[float] | None = None,
    ) -> "StagePlan":
        """The plan of these cuts, with few slots. `kinds` and `sizes` of all layers; None: all are equal."""
        cuts = tuple(tuple(stage) for stage in layers)
        kinds = kinds or [None] * sum(map(len, cuts))
        order: list[Hashable] = []
        for stage in cuts:
            order = _common_supersequence(order, [kinds[layer] for layer in stage])
        columns = [_fit(order, stage, kinds) for stage in cuts]
        slots = (slot for slot in zip(*columns, strict=True) if any(layer is not None for layer in slot))
        return cls(cuts, tuple(slots), tuple(sizes or [1.0] * sum(map(len, cuts))))

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def num_slots(self) -> int:
        """Layer slots of every stage."""
        return len(self.slots)

    def layer_at(self, slot: int, stage: int) -> int | None:
        """The layer in a slot of a stage; None where that stage leaves the slot empty."""
        return self.slots[slot][stage]

    def any_layer(self, slot: int) -> int:
        """A layer of the slot's kind."""
        return next(layer for layer in self.slots[slot] if layer is not None)

    def has_empty(self, slot: int) -> bool:
        return None in self.slots[slot]

    def describe(self) -> str:
        """Layers of each stage, such as `layers 0-14 | 15-29`, and what empty slots cost."""
        text = "layers " + " | ".join(f"{stage[0]}-{stage[-1]}" for stage in self.layers)
        padded = any(self.has_empty(slot) for slot in range(self.num_slots))
        return f"{text} (empty slots add {self.overhead:.1%} to the trunk)" if padded else text

    @property
    def overhead(self) -> float:
        """What empty slots add to the trunk's memory, as a share of it; they cost no time."""
        slots = sum(self.sizes[self.any_layer(slot)] for slot in range(self.num_slots))
        return slots * self.num_stages / sum(self.sizes) - 1


def plan_stages(
    num_stages: int,
    kinds: Sequence[Hashable],
    costs: Sequence[float] | None = None,
    layers: Sequence[int] | None = None,
) -> StagePlan:
    """Cuts layers into contiguous stages of about equal cost, with few empty slots.

    Args:
      num_stages: Z.
      kinds: of each layer: only layers of equal kinds share a slot.
      costs: of each layer, in any unit (bytes, or seconds); None if they are equal.
      layers: of each stage, how many it has, where that is not to be chosen here.

    Raises:
      ValueError: more stages than layers, or `layers` that cannot be; its text says what would be legal.
    """
    count = len(kinds)
    if not 1 <= num_stages <= count:
        raise ValueError(f"1 to {count}, the model's number of layers")
    if layers is not None:
        if len(layers) != num_stages or min(layers) < 1 or sum(layers) != count:
            some = ",".join(str(len(stage)) for stage in plan_stages(num_stages, kinds, costs).layers)
            numbers = "one number" if num_stages == 1 else f"{num_stages} numbers from 1"
            raise ValueError(f"{numbers} that add up to {count}, the model's layers, such as {some}")
        return _cut(tuple(itertools.accumulate(layers[:-1])), kinds, costs)
    costs = costs or [1.0] * count
    by_kind = dict(zip(kinds, costs, strict=True))
    prices: dict[tuple[int, ...], float] = {}

    def price(cuts: tuple[int, ...]) -> float:
        """Time of the slowest stage, and a part of what empty slots take."""
        if cuts not in prices:
            plan = _cut(cuts, kinds, costs)
            slowest = max(sum(costs[layer] for layer in stage) for stage in plan.layers)
            slots = sum(by_kind[kinds[plan.any_layer(slot)]] for slot in range(plan.num_slots))
            prices[cuts] = slowest + EMPTY_PRICE * (slots - slowest)
        return prices[cuts]

    best = _even_cuts(num_stages, costs)
    while True:
        near = min((cuts for cuts in _moved(best, count)), key=price, default=best)
        if price(near) >= price(best):
            return _cut(best, kinds, costs)
        best = near


def balanced_plan(num_layers: int, num_stages: int) -> StagePlan:
    """Cuts `num_layers` equal layers into contiguous stages that differ by at most one layer.

    >>> balanced_plan(7, 3).layers
    ((0, 1, 2), (3, 4), (5, 6))

    Raises:
      ValueError: more stages than layers; its text says what would be legal.
    """
    return plan_stages(num_stages, [None] * num_layers)


def _cut(cuts: tuple[int, ...], kinds: Sequence[Hashable], sizes: Sequence[float] | None) -> StagePlan:
    """The plan whose stages after the first begin at `cuts`."""
    edges = (0, *cuts, len(kinds))
    return StagePlan.of([range(a, b) for a, b in itertools.pairwise(edges)], kinds, sizes)


def _even_cuts(num_stages: int, costs: Sequence[float]) -> tuple[int, ...]:
    """Each stage takes layers up to its share of what is left, and leaves one for every later stage."""
    cuts: list[int] = []
    first, left = 0, sum(costs)
    for stage in range(num_stages - 1):
        share, taken, last = left / (num_stages - stage), 0.0, first
        most = len(costs) - (num_stages - stage - 1)
        while last < most and taken < share * (1 - 1e-9):
            taken += costs[last]
            last += 1
        cuts.append(last)
        first, left = last, left - taken
    return tuple(cuts)


def _moved(cuts: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """These cuts with one of them moved by a few layers, or a run of them moved together."""
    found = []
    for first in range(len(cuts)):
        for last in range(first + 1, len(cuts) + 1):
            for shift in (*range(-REACH, 0), *range(1, REACH + 1)):
                moved = (*cuts[:first], *(cut + shift for cut in cuts[first:last]), *cuts[last:])
                edges = (0, *moved, count)
                if all(a < b for a, b in itertools.pairwise(edges)):
                    found.append(moved)
    return found


def _common_supersequence(one: Sequence[Hashable], two: Sequence[Hashable]) -> list[Hashable]:
    """The shortest sequence that has both as subsequences."""
    rows, columns = len(one), len(two)
    longest = [[0] * (columns + 1) for _ in range(rows + 1)]  # common subsequence of the tails
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            same = longest[i + 1][j + 1] + 1
            longest[i][j] = same if one[i] == two[j] else max(longest[i + 1][j], longest[i][j + 1])
    joined: list[Hashable] = []
    i = j = 0
    while i < rows and j < columns:
        if one[i] == two[j]:
            joined.append(one[i])
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            joined.append(one[i])
            i += 1
        else:
            joined.append(two[j])
            j += 1
    return [*joined, *one[i:], *two[j:]]


def _fit(
    order: Sequence[Hashable], stage: Sequence[int], kinds: Sequence[Hashable]
) -> tuple[int | None, ...]:
    """The stage's layers in the first slots of their kinds."""
    column: list[int | None] = []
    left = list(stage)
    for kind in order:
        column.append(left.pop(0) if left and kinds[left[0]] == kind else None)
    assert not left, "the slots hold every stage's layers"
    return tuple(column)
