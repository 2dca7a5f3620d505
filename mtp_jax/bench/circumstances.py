"""What a number means nothing without: the command, the date, the machine and the versions."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mtp_jax import __version__

_SECRET = "--api-key"


def machine_and_versions(packages: Sequence[str] = ("jax", "jaxlib")) -> dict[str, object]:
    """The circumstances as values for JSON.

    Args:
      packages: distributions whose versions matter; those not installed are left out.
    """
    now = datetime.datetime.now(datetime.UTC)
    versions = {"mtp-jax": __version__, "Python": platform.python_version()}
    versions |= {name: found for name in packages if (found := _version(name)) is not None}
    return {
        "command": command_line(sys.orig_argv),
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def circumstances(device: str | None = None, packages: Sequence[str] = ("jax", "jaxlib")) -> list[str]:
    """Lines to print above a result.

    Args:
      device: the accelerator's name, from those who have JAX running already.
      packages: as above.
    """
    values = machine_and_versions(packages)
    versions = values["versions"]
    assert isinstance(versions, dict)
    lines = [
        f"command   {values['command']}",
        f"date      {values['date']}",
        f"machine   {values['cpu']}, {values['num_cpus']} CPUs",
        f"versions  {', '.join(f'{name} {version}' for name, version in versions.items())}",
    ]
    return lines if device is None else [*lines, f"device    {device}"]


def command_line(argv: Sequence[str]) -> str:
    """The command that this is, without the path of Python and without keys.

    >>> command_line(["/usr/bin/python3", "-m", "x", "--api-key", "secret", "--api-key=too"])
    'python -m x --api-key ... --api-key=...'
    """
    words: list[str] = ["python"]
    for word in argv[1:]:
        hidden = words[-1] == _SECRET
        words.append("..." if hidden else f"{_SECRET}=..." if word.startswith(_SECRET + "=") else word)
    return shlex.join(words)


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
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
