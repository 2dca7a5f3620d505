"""The one mesh of the engine: axes `stage`, `data`, `tensor`, in this order, size 1 or more."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

STAGE, DATA, TENSOR = "stage", "data", "tensor"
AXES = (STAGE, DATA, TENSOR)


def make_mesh(stages: int, data: int = 1, tensor: int = 1, devices: Sequence | None = None) -> Mesh:
    """The engine's mesh over the first `stages * data * tensor` devices.

    Raises:
      ValueError: fewer devices than the mesh needs; its text says what would be legal.
    """
    devices = jax.devices() if devices is None else devices
    need = stages * data * tensor
    if need > len(devices):
        raise ValueError(
            f"stages x data x tensor ({stages} x {data} x {tensor} = {need}) up to {len(devices)}, "
            "the devices of this process"
        )
    grid = np.array(devices[:need]).reshape(stages, data, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(stages: int, data: int = 1, tensor: int = 1) -> AbstractMesh:
    """The engine's mesh of any size, without devices: enough to know every array's shards."""
    return AbstractMesh((stages, data, tensor), AXES, axis_types=(AxisType.Auto,) * 3)
