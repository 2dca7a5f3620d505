"""What the GPUs did during a call, by JAX's profiler: for the benchmarks in this folder."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import jax


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One run of a kernel (or copy) on a GPU: microseconds, from the profiler's own zero."""

    name: str
    start_us: float
    us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def profile(call: Callable[[], object]) -> list[Kernel]:
    """Everything that the streams of the first GPU ran during `call`, in order of its start.

    `call` has to wait for its results.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        kernels = [
            Kernel(event.name, event.start_ns / 1e3, event.duration_ns / 1e3)
            for path in Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            if plane.name == "/device:GPU:0"
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def busy_us(kernels: Iterable[Kernel], start_us: float, end_us: float) -> float:
    """Time within [start_us, end_us] in which at least one of `kernels` (in order of their start) ran."""
    busy, free = 0.0, start_us
    for kernel in kernels:
        begin, end = max(kernel.start_us, free), min(kernel.end_us, end_us)
        if end > begin:
            busy, free = busy + end - begin, end
    return busy
