"""The mesh that `auto` stands for: how many stages, shards and replicas suit the devices there are."""

import dataclasses
from collections.abc import Callable, Mapping

from mtp_jax.config import AUTO
from mtp_jax.errors import InvalidValueError

AXES = ("stages", "tensor", "data")
A_HOST = 8  # devices of a host where nobody says how many: beyond it a sum in every layer is slow


@dataclasses.dataclass(frozen=True)
class Devices:
    """What a mesh may be made of. `a_host`: devices of one host, the most that shards of a layer go over."""

    total: int
    a_host: int = A_HOST


class NothingFitsError(InvalidValueError):
    """No layout of these devices holds the model."""


@dataclasses.dataclass(frozen=True)
class Merit:
    """What speaks against a layout that works."""

    without_room: int  # of `max_num_seqs` requests of full length, all replicas together
    whole_axes: int  # axes of weights that its mesh does not divide


Judge = Callable[[Mapping[str, int]], Merit | None]  # of a layout, as fields of EngineConfig; None: it fails


def wants_layout(overrides: Mapping[str, object]) -> bool:
    """Whether one of the mesh's axes is left to `fill_layout`."""
    return any(overrides.get(axis) == AUTO for axis in AXES)


def fill_layout(
    overrides: Mapping[str, object], devices: Devices, most_stages: int, judge: Judge
) -> dict[str, int]:
    """The best layout that `judge` accepts, with the axes that are given as they are.

    All devices before fewer; then room for as many requests as the engine has slots; then as many replicas
    as can be, for they ask nothing of one another; then, within a replica, axes that divide; then shards
    before stages, which do as much together but answer a single request later.

    Args:
      overrides: fields of EngineConfig that were given; axes that are not there are 1.
      devices: what there is.
      most_stages: layers of the model.
      judge: says of a layout whether it works.

    Raises:
      NothingFitsError: none works.
    """
    for total in range(devices.total, 0, -1):
        best: tuple[tuple[int, ...], dict[str, int]] | None = None
        for data in _values(overrides, "data", total, total):
            for tensor in _values(overrides, "tensor", total // data, devices.a_host):
                for stages in _values(overrides, "stages", total // data // tensor, most_stages):
                    layout = {"stages": stages, "tensor": tensor, "data": data}
                    if stages * tensor * data != total or (merit := judge(layout)) is None:
                        continue
                    order = (merit.without_room, -data, merit.whole_axes, stages)
                    best = min(best or (order, layout), (order, layout), key=lambda one: one[0])
        if best is not None:
            return best[1]
    flag = next(f"--{axis}" for axis in AXES if overrides.get(axis) == AUTO)
    raise NothingFitsError(flag, AUTO, f"a layout of up to {devices.total} devices; none holds this model")


def _values(overrides: Mapping[str, object], axis: str, product: int, most: int) -> list[int]:
    """Sizes of an axis, the largest first, that divide `product`: the given one, or any up to `most`."""
    given = overrides.get(axis, 1)
    sizes = range(min(product, most), 0, -1) if given == AUTO else [given]
    return [size for size in sizes if isinstance(size, int) and size > 0 and product % size == 0]
