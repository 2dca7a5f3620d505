"""What a number means nothing without: the command, the date, the machine and the versions."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def circumstances(device: str | None = None, packages: Sequence[str] = ("jax", "jaxlib")) -> list[str]:
    """Lines to print above a result.

    Args:
      device: the accelerator's name, from those who have JAX running already.
      packages: distributions whose versions matter; those not installed are left out.
    """
    now = datetime.datetime.now(datetime.UTC)
    command = shlex.join(["python", *sys.argv])
    versions = [f"Python {platform.python_version()}", *filter(None, map(_version, packages))]
    lines = [
        f"command   {command}",
        f"date      {now:%Y-%m-%d %H:%M} UTC",
        f"machine   {cpu_name()}, {len(os.sched_getaffinity(0))} CPUs",
        f"versions  {', '.join(versions)}",
    ]
    return lines if device is None else [*lines, f"device    {device}"]


def cpu_name() -> str:
    """The processor as the kernel names it, or the architecture where it has no name."""
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.machine()


def load_average() -> str:
    """What else the machine was doing: runnable processes over the last minute."""
    return f"load average {os.getloadavg()[0]:.1f}"


def _version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None
