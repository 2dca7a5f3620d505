"""Trees that describe arrays: PartitionSpecs or shapes in the places where arrays will be."""

from typing import cast

import jax
from jax.sharding import PartitionSpec


def stand_in(leaf: PartitionSpec | jax.ShapeDtypeStruct) -> jax.Array:
    """The leaf itself, typed as the array that it describes.

    So one dataclass serves for the arrays, their shapes and their specs, and the three cannot drift.
    """
    return cast(jax.Array, leaf)


def spec_of(leaf: jax.Array) -> PartitionSpec:
    """A leaf of a tree of specs, typed as what it is."""
    return cast(PartitionSpec, leaf)
