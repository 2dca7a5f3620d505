"""Which layers each pipeline stage runs. Host data, computed before any array exists.

A stage runs its layers in *layer slots*. Slot j of every stage shares one stacked weight leaf with
a leading `stage` axis, so all stages have the same slots, and a slot has one kind of layer. Where layers
do not divide, or where their kinds do not line up, some stages leave slots empty (a cond that computes
nothing and writes nothing). Some kinds have all that another kind needs: then a slot may be *mixed*, of the
larger kind in some stages and of the smaller one in others (a cond between the two).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

EMPTY_PRICE = 0.15  # what an empty slot's memory (and its cond) weighs against a busy one's time
MIXED_PRICE = 0.04  # what a mixed slot's cond weighs against a busy slot's time: some 20 us on a GPU
_JOINED = 0.99  # of a common element: below 1, and two of them above one
REACH = 3  # layers by which a cut is moved in search of a better plan


# The kind of a slot that can hold layers of both kinds; None: there is none.
Join = Callable[[Hashable, Hashable], Hashable | None]


def equal_kinds[K: Hashable](one: K, two: K) -> K | None:
    """The `Join` of layers that share a slot with their own kind only."""
    return one if one == two else None


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """`layers[z]` are the layer indices of stage z, in order, contiguous over stages.

    `slots[j][z]` is the layer in slot j of stage z; None where that stage leaves the slot empty.
    `sizes` are those of all layers, in any unit; layers of one kind are equally large.
    `models[j]` is a layer of slot j's kind, and `mixed` are the slots that hold another kind as well.
    """

    layers: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int | None, ...], ...]
    sizes: tuple[float, ...]
    models: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[Sequence[int]],
        kinds: Sequence[Hashable] | None = None,
        sizes: Sequence[float] | None = None,
        join: Join = equal_kinds,
    ) -> "StagePlan":
        """The plan of these cuts, with few slots. `kinds` and `sizes` of all layers; None: all are equal."""
        cuts = tuple(tuple(stage) for stage in layers)
        kinds = kinds or [None] * sum(map(len, cuts))
        order: list[Hashable] = []
        for stage in cuts:
            order = _common_supersequence(order, [kinds[layer] for layer in stage], join)
        columns = [_fit(order, stage, kinds, join) for stage in cuts]
        slots = [slot for slot in zip(*columns, strict=True) if any(layer is not None for layer in slot)]
        models, mixed = [], []
        for number, slot in enumerate(slots):
            held = {kinds[layer]: layer for layer in slot if layer is not None}
            kind = functools.reduce(lambda one, two: join(one, two), held)
            models.append(held[kind])  # a join is one of the two
            mixed += [number] if len(held) > 1 else []
        sizes = tuple(sizes or [1.0] * sum(map(len, cuts)))
        return cls(cuts, tuple(slots), sizes, tuple(models), tuple(mixed))

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
        return self.models[slot]

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


def plan_stages[K: Hashable](
    num_stages: int,
    kinds: Sequence[K],
    costs: Sequence[float] | None = None,
    layers: Sequence[int] | None = None,
    join: Callable[[K, K], K | None] = equal_kinds,
) -> StagePlan:
    """Cuts layers into contiguous stages of about equal cost, with few empty slots.

    Args:
      num_stages: Z.
      kinds: of each layer: layers share a slot if `join` has a kind for it.
      costs: of each layer, in any unit (bytes, or seconds); None if they are equal.
      layers: of each stage, how many it has, where that is not to be chosen here.
      join: which kinds can share a slot; its result is one of the two.

    Raises:
      ValueError: more stages than layers, or `layers` that cannot be; its text says what would be legal.
    """
    count = len(kinds)
    if not 1 <= num_stages <= count:
        raise ValueError(f"1 to {count}, the model's number of layers")
    if layers is not None and (len(layers) != num_stages or min(layers) < 1 or sum(layers) != count):
        chosen = plan_stages(num_stages, kinds, costs, join=join)
        some = ",".join(str(len(stage)) for stage in chosen.layers)
        numbers = "one number" if num_stages == 1 else f"{num_stages} numbers from 1"
        raise ValueError(f"{numbers} that add up to {count}, the model's layers, such as {some}")
    costs = costs or [1.0] * count
    small, joins = _numbered(kinds, join)  # quicker to compare
    plans: dict[tuple[int, ...], StagePlan] = {}

    def cut(cuts: tuple[int, ...]) -> StagePlan:
        if cuts not in plans:
            edges = [range(a, b) for a, b in itertools.pairwise((0, *cuts, count))]
            plans[cuts] = min((StagePlan.of(edges, small, costs, one) for one in joins), key=_price)
        return plans[cuts]

    if layers is not None:
        return cut(tuple(itertools.accumulate(layers[:-1])))
    best = _even_cuts(num_stages, costs)
    while True:
        near = min(_moved(best, count), key=lambda cuts: _price(cut(cuts)), default=best)
        if _price(cut(near)) >= _price(cut(best)):
            return cut(best)
        best = near


def balanced_plan(num_layers: int, num_stages: int) -> StagePlan:
    """Cuts `num_layers` equal layers into contiguous stages that differ by at most one layer.

    >>> balanced_plan(7, 3).layers
    ((0, 1, 2), (3, 4), (5, 6))

    Raises:
      ValueError: more stages than layers; its text says what would be legal.
    """
    return plan_stages(num_stages, [None] * num_layers)


def _price(plan: StagePlan) -> float:
    """Time of the slowest stage, and a part of what empty and mixed slots take."""
    slowest = max(sum(plan.sizes[layer] for layer in stage) for stage in plan.layers)
    slots = sum(plan.sizes[plan.any_layer(slot)] for slot in range(plan.num_slots))
    mixed = sum(plan.sizes[plan.any_layer(slot)] for slot in plan.mixed)
    return slowest + EMPTY_PRICE * (slots - slowest) + MIXED_PRICE * mixed


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


def _numbered[K: Hashable](
    kinds: Sequence[K], join: Callable[[K, K], K | None]
) -> tuple[list[int], list[Join]]:
    """The kinds as numbers, and in how many ways they can share slots: not at all, and by `join`."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    joint = {
        (numbers[one], numbers[two]): numbers[both]
        for one, two in itertools.permutations(numbers, 2)
        if (both := join(one, two)) is not None
    }

    def by_number(one: Hashable, two: Hashable) -> Hashable | None:
        return one if one == two else joint.get((one, two))  # pyright: ignore[reportArgumentType]

    return [numbers[kind] for kind in kinds], [equal_kinds, by_number] if joint else [equal_kinds]


def _common_supersequence(one: Sequence[Hashable], two: Sequence[Hashable], join: Join) -> list[Hashable]:
    """The shortest sequence that has both as subsequences, where an element may stand for what it joins.

    Of equally short ones that with the fewest joined elements.
    """
    if list(one) == list(two):
        return list(one)
    rows, columns = len(one), len(two)
    joins = {(a, b): join(a, b) for a in set(one) for b in set(two)}
    shared = [[0.0] * (columns + 1) for _ in range(rows + 1)]  # elements that the tails share, at most
    for i in reversed(range(rows)):
        row, below = shared[i], shared[i + 1]
        for j in reversed(range(columns)):
            row[j] = max(below[j], row[j + 1])
            if joins[one[i], two[j]] is not None:
                row[j] = max(row[j], below[j + 1] + (1 if one[i] == two[j] else _JOINED))
    joined: list[Hashable] = []
    i = j = 0
    while i < rows and j < columns:
        if shared[i][j] == shared[i + 1][j]:
            joined.append(one[i])
            i += 1
        elif shared[i][j] == shared[i][j + 1]:
            joined.append(two[j])
            j += 1
        else:
            joined.append(joins[one[i], two[j]])
            i, j = i + 1, j + 1
    return [*joined, *one[i:], *two[j:]]


def _fit(
    order: Sequence[Hashable], stage: Sequence[int], kinds: Sequence[Hashable], join: Join
) -> tuple[int | None, ...]:
    """The stage's layers in slots that can hold them: in those of their own kinds as far as that goes."""
    rows, columns = len(stage), len(order)
    holds = {(a, kind): join(a, kind) == a for a in set(order) for kind in {kinds[layer] for layer in stage}}
    own = [[0.0 if i == rows else -math.inf] * (columns + 1) for i in range(rows + 1)]  # of the tails
    for i in reversed(range(rows)):
        kind, row, below = kinds[stage[i]], own[i], own[i + 1]
        for j in reversed(range(columns)):
            row[j] = row[j + 1]
            if holds[order[j], kind]:
                row[j] = max(row[j], below[j + 1] + (kind == order[j]))
    assert own[0][0] >= 0, "the slots hold every stage's layers"
    column: list[int | None] = []
    i = 0
    for j in range(columns):  # the first slots that do as well
        takes = i < rows and holds[order[j], kinds[stage[i]]]
        takes = takes and own[i][j] == own[i + 1][j + 1] + (kinds[stage[i]] == order[j])
        column.append(stage[i] if takes else None)
        i += takes
    return tuple(column)
