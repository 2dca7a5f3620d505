"""Which layers each pipeline stage runs. Host data, computed before any array exists.

A stage runs its layers in *layer slots*. Slot j of every stage shares one stacked weight leaf with
a leading `stage` axis, so all stages have the same number of slots; where layers do not divide, some
stages leave their last slot empty (a cond that computes nothing and writes nothing).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """`layers[z]` are the layer indices of stage z, in order, contiguous over stages."""

    layers: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def num_slots(self) -> int:
        """Layer slots of every stage: the largest stage's layer count."""
        return max(len(stage) for stage in self.layers)

    def layer_at(self, slot: int, stage: int) -> int | None:
        """The layer in a slot of a stage; None where that stage leaves the slot empty."""
        stage_layers = self.layers[stage]
        return stage_layers[slot] if slot < len(stage_layers) else None

    def has_empty(self, slot: int) -> bool:
        return any(self.layer_at(slot, stage) is None for stage in range(self.num_stages))

    def describe(self) -> str:
        """Layers of each stage, such as `layers 0-14 | 15-29`, and what empty slots cost."""
        text = "layers " + " | ".join(f"{stage[0]}-{stage[-1]}" for stage in self.layers)
        return f"{text} ({self.overhead:.0%} of the slots are empty)" if self.overhead else text

    @property
    def overhead(self) -> float:
        """Empty slots over all slots: the share of trunk memory (and of no time) that padding costs."""
        filled = sum(len(stage) for stage in self.layers)
        return 1 - filled / (self.num_slots * self.num_stages)


def balanced_plan(num_layers: int, num_stages: int) -> StagePlan:
    """Cuts `num_layers` equal layers into contiguous stages that differ by at most one layer.

    >>> balanced_plan(7, 3).layers
    ((0, 1, 2), (3, 4), (5, 6))

    Raises:
      ValueError: more stages than layers; its text says what would be legal.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"1 to {num_layers}, the model's number of layers")
    base, longer = divmod(num_layers, num_stages)
    cuts, first = [], 0
    for stage in range(num_stages):
        size = base + (stage < longer)
        cuts.append(tuple(range(first, first + size)))
        first += size
    return StagePlan(tuple(cuts))
