"""Which row of which group each decoding slot sits in."""

from mtp_jax.config import bucket_for

EMPTY = -1


class RowTable:
    """Rows of the Z groups of the ring, of each replica.

    A slot stays in its group for as long as it decodes: its flight leaves the last stage with that
    group only, so a move within the group is safe at any time and a move between groups is not.
    """

    def __init__(self, num_groups: int, rows_per_group: int, num_replicas: int = 1):
        self._num_groups = num_groups
        self._groups = [[EMPTY] * rows_per_group for _ in range(num_replicas * num_groups)]
        self._place_of_slot: dict[int, tuple[int, int]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._place_of_slot

    def __len__(self) -> int:
        return len(self._place_of_slot)

    @property
    def height(self) -> int:
        """Rows that a group needs: one more than the highest row in use."""
        return max((row + 1 for _, row in self._place_of_slot.values()), default=0)

    def place(self, slot: int, replica: int = 0) -> tuple[int, int]:
        """Puts a slot into the lowest free row of the replica's emptiest group; returns (group, row)."""
        assert slot not in self, f"slot {slot} already has a row"
        first = replica * self._num_groups
        group = min(range(first, first + self._num_groups), key=self._count)
        row = self._groups[group].index(EMPTY)
        self._groups[group][row] = slot
        self._place_of_slot[slot] = (group, row)
        return group, row

    def remove(self, slot: int) -> None:
        """Takes a slot out; one that has no row is left alone."""
        if slot in self:
            group, row = self._place_of_slot.pop(slot)
            self._groups[group][row] = EMPTY

    def compact(self, buckets: tuple[int, ...]) -> None:
        """Moves high rows into free low ones of the same group where a smaller bucket then does."""
        target = bucket_for(max(1, *map(self._count, range(len(self._groups)))), buckets)
        if self.height <= target:
            return
        for group, rows in enumerate(self._groups):
            for row in range(target, len(rows)):
                slot = rows[row]
                if slot != EMPTY:
                    low = rows.index(EMPTY)
                    rows[low], rows[row] = slot, EMPTY
                    self._place_of_slot[slot] = (group, low)

    def as_plan(self, num_rows: int) -> tuple[tuple[int, ...], ...]:
        """Z groups of `num_rows` slots, replica by replica."""
        padding = (EMPTY,) * num_rows
        return tuple((*rows[:num_rows], *padding)[:num_rows] for rows in self._groups)

    def _count(self, group: int) -> int:
        return sum(slot != EMPTY for slot in self._groups[group])
