"""Which kernels the devices of this process can run."""

import jax

SM_90 = "9.0"  # the kernels are wgmma and TMA: Hopper's own instructions, which later chips do not have


class NotHereError(NotImplementedError):
    """No kernel for these shapes, dtypes or this device: the caller takes its XLA path."""


def on_hopper() -> bool:
    """Whether this process computes on Hopper GPUs."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", None) == SM_90


def on_tpu() -> bool:
    """Whether this process computes on TPUs."""
    return jax.default_backend() == "tpu"
