"""The one mesh of the engine: axes `stage`, `data`, `tensor`, in this order, size 1 or more."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

STAGE, DATA, TENSOR = "stage", "data", "tensor"
AXES = (STAGE, DATA, TENSOR)


def make_mesh(stages: int, data: int = 1, tensor: int = 1, devices: Sequence | None = None) -> Mesh:
    """The engine's mesh over the first `stages * data * tensor` devices.

    Raises:
      ValueError: fewer devices than the mesh needs; names the flags and the counts.
    """
    devices = jax.devices() if devices is None else devices
    need = stages * data * tensor
    if need > len(devices):
        raise ValueError(
            f"--stages {stages} x --data {data} x --tensor {tensor} needs {need} devices; "
            f"this process sees {len(devices)}"
        )
    grid = np.array(devices[:need]).reshape(stages, data, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)
