"""Memory of the devices that a plan can be made for."""

import dataclasses
import os
from collections.abc import Mapping

MIB, GB = 2**20, 10**9
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX's own setting: the part of a GPU that it takes
DEFAULT_FRACTION = 0.75


@dataclasses.dataclass(frozen=True)
class Device:
    """What JAX calls one device."""

    name: str
    memory: int  # bytes
    is_gpu: bool

    def fraction(self, environment: Mapping[str, str] = os.environ) -> float:
        """The part of its memory that JAX takes: on GPUs three quarters unless told otherwise."""
        if not self.is_gpu:
            return 1.0
        try:
            return float(environment.get(FRACTION) or DEFAULT_FRACTION)
        except ValueError:
            return DEFAULT_FRACTION

    @property
    def usable(self) -> int:
        """Bytes that JAX has, which the engine divides."""
        return int(self.memory * self.fraction())


# GPUs: totals as the driver reports them (nvidia-smi: 81559 MiB, 143771 MiB; 178.35 GiB for a B200), below
# the datasheets' 80, 141 and 180 GB where those mean GiB. TPUs: HBM a chip of Google's documentation, read as
# decimal GB, which is never more than a chip has; a TPU7x chip (192 GB) is two devices to JAX.
DEVICES = {
    device.name: device
    for device in (
        Device("h100", 81559 * MIB, True),
        Device("h200", 143771 * MIB, True),
        Device("b200", int(178.35 * 2**30), True),
        Device("v5e", 16 * GB, False),
        Device("v5p", 95 * GB, False),
        Device("v6e", 32 * GB, False),
        Device("tpu7x", 96 * GB, False),
    )
}
