"""Reading parts of leaves from a checkpoint, and placing them one by one."""

from collections.abc import Callable

import jax
import numpy as np

from mtp_jax.models.leaves import Leaf, Read, ReadScaled
from mtp_jax.models.scaled import BlockScaled, Weight

ReadPart = Callable[[tuple[slice, ...]], np.ndarray]  # reads the part at these slices of a leaf


class LeafReader:
    """Reads parts of one leaf. A leaf that is stored whole is read once for all devices that share it.

    With a `group`, of what it reads the first of so many columns: a group's scale from those of its elements.
    """

    def __init__(self, leaf: Leaf, read: Read, names: frozenset[str], group: int | None = None):
        self._leaf, self._read, self._names, self._group = leaf, read, names, group
        self._last: tuple[str, np.ndarray] | None = None

    def whole(self, index: tuple[slice, ...]) -> np.ndarray:
        """This part of a leaf whose tensors have whole names."""
        return self.part("", index)

    def part(self, prefix: str, index: tuple[slice, ...]) -> np.ndarray:
        """This part of the leaf; of experts that are stored one by one, only those are read."""
        leaf = self._leaf
        if leaf.chosen(prefix, self._names).by_index:
            first = range(*index[0].indices(leaf.shape[0]))
            return self._some(prefix, first)[(slice(None), *index[1:])]
        if self._last is None or self._last[0] != prefix:
            self._last = prefix, self._some(prefix, None)
        return self._last[1][index]

    def _some(self, prefix: str, indices: range | None) -> np.ndarray:
        found = self._leaf.read(self._read, prefix, self._names, indices)
        return found if self._group is None else found[..., :: self._group].copy()


def place_leaf(
    place: Callable[[ReadPart, jax.Array, jax.Array], jax.Array],
    part_of: Callable[[LeafReader, jax.Array], ReadPart],
    reader: Callable[..., LeafReader],
    reads: tuple[Read, ReadScaled | None],
    like: Weight,
    spec: Weight,
) -> Weight:
    """A leaf's placed array, or codes and scales.

    Args:
      place: places an array like this.
      part_of: makes of a leaf's reader what reads parts of an array like this.
      reader: makes the leaf's reader, of what reads tensors and, for scales, their group.
      reads: what reads tensors as they are in the engine, and what reads those in float8.
    """
    read, scaled = reads
    if not isinstance(like, BlockScaled):
        assert not isinstance(spec, BlockScaled)
        return place(part_of(reader(read), like), like, spec)
    assert isinstance(spec, BlockScaled) and scaled is not None
    return BlockScaled(
        place(part_of(reader(scaled.codes), like.codes), like.codes, spec.codes),
        place(part_of(reader(scaled.scales, group=like.group), like.scales), like.scales, spec.scales),
        like.group,
    )


def padded_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, the added ones zero."""
    missing = count - rows.shape[0]
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows
