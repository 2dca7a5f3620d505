"""Leaves: the weights of a module, where they lie in a checkpoint and along which axes they are split."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtp_jax.models.scaled import LEAST_GROUP, Weight

Read = Callable[[str], np.ndarray]
Shape = tuple[int, ...]
Make = Callable[[Shape, jnp.dtype], jax.Array]  # how a module makes the arrays of its parameters


@dataclasses.dataclass(frozen=True)
class Stored:
    """One way in which checkpoints store a leaf: tensors (names behind a prefix), how they join and part.

    Names with `{e}` stand for one tensor of each index of the leaf's first axis (an expert): then `join`
    gives one index's part, and whoever needs a few experts reads no others. Where leaves share a tensor,
    `part` gives zeros in the others' places.
    """

    tensors: tuple[tuple[str, Shape], ...]
    join: Callable[[list[np.ndarray]], np.ndarray]
    part: Callable[[np.ndarray], list[np.ndarray]]

    @property
    def by_index(self) -> bool:
        return "{e}" in self.tensors[0][0]

    def names(self, prefix: str, count: int) -> list[tuple[str, Shape]]:
        """Full names and shapes of all its tensors, for a first axis of `count`."""
        indices = range(count) if self.by_index else (0,)
        return [
            (prefix + name.replace("{e}", str(e)), shape) for e in indices for name, shape in self.tensors
        ]


@dataclasses.dataclass(frozen=True)
class ReadScaled:
    """Reads tensors that stay in float8, by their full names."""

    codes: Read
    scales: Read  # every element's, fp32, in the tensor's shape: so they join as codes do


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight of a module: its path there, its shape, its logical axes, and how checkpoints store it."""

    path: tuple[str, ...]
    shape: Shape
    axes: tuple[str | None, ...]
    stored: tuple[Stored, ...]  # the first one whose tensors are there counts
    dtype: jnp.dtype | None = None  # None: the engine's
    keeps_codes: bool = True  # whether it may stay in float8; see `never_float8`

    @property
    def name(self) -> str:
        """Its dotted path, such as `attention.qkv`."""
        return ".".join(self.path)

    def group(self, prefixes: Iterable[str], blocks: Mapping[str, int], shards: int) -> int | None:
        """Columns that share a scale where the leaf stays in float8 (`BlockScaled`); None: it does not.

        It stays if all its tensors are float8, in all modules that are stacked in one array. Where columns
        are grouped into heads, or split, no scale's columns reach over a head's or a shard's end.

        Args:
          prefixes: of the modules' tensors.
          blocks: columns that share a scale, of the checkpoint's float8 tensors.
          shards: devices that the last axis is split over.
        """
        if not self.keeps_codes or len(self.shape) < 2:
            return None
        found, own, parted = [], self.shape[-1], shards > 1
        for prefix in prefixes:
            for name, shape in self.chosen(prefix, blocks).names(prefix, self.shape[0]):
                if name not in blocks:
                    return None
                found.append(min(blocks[name], shape[-1]))
                parted |= shape[-1] != own
        if parted or len(set(found)) > 1:
            found = [math.gcd(own // shards, *found)]
        return found[0] if found and found[0] >= LEAST_GROUP else None

    def chosen(self, prefix: str, names: Collection[str]) -> Stored:
        """How a checkpoint with these tensors stores this leaf; the first way where it has none."""
        for way in self.stored:
            if way.names(prefix, 1)[0][0] in names:
                return way
        return self.stored[0]

    def read(
        self, read: Read, prefix: str, names: Collection[str] = (), indices: range | None = None
    ) -> np.ndarray:
        """The leaf, or these indices of its first axis.

        Args:
          read: gives a tensor by its full name.
          prefix: of the module's tensors.
          names: the checkpoint's tensors, where the leaf is stored in different ways.
          indices: None for the whole leaf.
        """
        way = self.chosen(prefix, names)
        if not way.by_index:
            whole = way.join([read(prefix + name) for name, _ in way.tensors]).reshape(self.shape)
            return whole if indices is None else whole[indices.start : indices.stop]
        parts = []
        for e in range(self.shape[0]) if indices is None else indices:
            part = way.join([read(prefix + name.replace("{e}", str(e))) for name, _ in way.tensors])
            parts.append(part.reshape(self.shape[1:]))
        return np.stack(parts)

    def tensors(self, array: np.ndarray, prefix: str) -> dict[str, np.ndarray]:
        """The leaf as checkpoints store it: the inverse of `read`."""
        way, found = self.stored[0], {}
        for e in range(self.shape[0]) if way.by_index else (None,):
            parts = way.part(array if e is None else array[e])
            for (name, shape), part in zip(way.tensors, parts, strict=True):
                found[prefix + name.replace("{e}", str(e))] = part.reshape(shape)
        return found


def tensors_of(
    leaves: Iterable[Leaf], arrays: Mapping[str, np.ndarray], prefix: str
) -> dict[str, np.ndarray]:
    """A module's leaves, by their dotted paths, as checkpoints store them."""
    found: dict[str, np.ndarray] = {}
    for leaf in leaves:
        for name, part in leaf.tensors(arrays[leaf.name], prefix).items():
            found[name] = found[name] + part if name in found else part
    return found


def plain(
    path: str, shape: Shape, axes: tuple[str | None, ...], name: str, stored_shape: Shape | None = None
) -> Leaf:
    """A leaf that is one tensor, of the leaf's shape or another of the same size."""
    return Leaf((path,), shape, axes, (whole(name, stored_shape or shape),))


def never_float8(leaf: Leaf) -> Leaf:
    """The leaf of a weight that has other uses than products, or columns in another order than stored."""
    return dataclasses.replace(leaf, keeps_codes=False)


def norm(path: str, width: int, name: str, zero_centred: bool) -> Leaf:
    """A norm's weights. Those that are stored as their distance from one are applied in fp32 (`rms_norm`)."""
    if not zero_centred:
        return plain(path, (width,), (None,), name)
    one = np.float32(1)
    stored = Stored(
        ((name, (width,)),),
        lambda parts: parts[0].astype(np.float32) + one,
        lambda array: [array.astype(np.float32) - one],
    )
    return Leaf((path,), (width,), (None,), (stored,), jnp.dtype("float32"))


def whole(name: str, shape: Shape) -> Stored:
    """Stored as one tensor, in the leaf's order."""
    return Stored(((name, shape),), lambda parts: parts[0], lambda array: [array])


def reordered(name: str, shape: Shape, grouped: Shape, axis: int, order: np.ndarray) -> Stored:
    """Stored as one tensor: in the shape `grouped`, the leaf takes `axis` in this order."""
    back = np.argsort(order)
    return Stored(
        ((name, shape),),
        lambda parts: np.take(parts[0].reshape(grouped), order, axis),
        lambda array: [np.take(array.reshape(grouped), back, axis)],
    )


def halves(names: tuple[str, str], shape: Shape) -> Stored:
    """Stored as two tensors of one shape, the leaf's first axis."""
    return Stored(tuple((name, shape) for name in names), np.stack, list)


def inside(path: str, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    """The leaves of a module that is an attribute of another one."""
    return tuple(dataclasses.replace(leaf, path=(path, *leaf.path)) for leaf in leaves)


def structure[M: nnx.Module](build: Callable[[], M]) -> nnx.GraphDef[M]:
    """A module's structure, without arrays."""
    graphdef, _ = nnx.split(nnx.eval_shape(build, graph=False), graph=False)
    return graphdef


def abstract(shape: Shape, dtype: jnp.dtype) -> jax.Array:
    """The `Make` of `structure`."""
    return jnp.zeros(shape, dtype)


def merge[M: nnx.Module](graphdef: nnx.GraphDef[M], leaves: Iterable[Leaf], arrays: Iterable[Weight]) -> M:
    """A module from its structure and its leaves' arrays, inside the jitted program."""
    state: dict = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        *inner, name = leaf.path
        place = state
        for key in inner:
            place = place.setdefault(key, {})
        place[name] = nnx.Param(array)
    return nnx.merge(graphdef, state)
