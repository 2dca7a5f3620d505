"""Settings that every test runs under: 8 CPU devices, strict dtypes, fixed seeds, one compile cache.

They must be in force before JAX's first use, so they stand at module level.
"""

import datetime
import gc
import importlib.metadata
import os
import platform
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

NUM_DEVICES = 8
# XLA:CPU maps the kernels of an executable one by one, and crashes where Linux refuses a process more maps
# than vm.max_map_count, 65,530 as a rule. What CI runs of a file adds some 10,000 at most; slow tests, which
# are many in a file and cache engines for one another, are looked at one by one.
MOST_MAPS = 30_000


def _configure_jax() -> None:
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    # Mixed dtypes are a bug in an engine that promises greedy equality: every cast is written down.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # Programs are keyed by their content, so a second run skips the compiler and changes nothing else.
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mtp_jax" / "tests"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


_configure_jax()

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)


def num_maps() -> int:
    """Mapped regions of this process; 0 where the system does not say."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def forget(module: types.ModuleType) -> None:
    """Empties what its own functions have cached: engines, above all."""
    for value in tuple(vars(module).values()):
        if callable(clear := getattr(value, "cache_clear", None)) and value.__module__ == module.__name__:
            clear()


def forget_everything() -> None:
    for name, module in tuple(sys.modules.items()):
        if name.startswith("tests."):
            forget(module)
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _executables_end_with_their_module(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    forget(request.module)
    gc.collect()
    if num_maps() > MOST_MAPS:  # what modules share is made again, too
        forget_everything()
        assert num_maps() < MOST_MAPS, "something holds executables of modules that have ended"


@pytest.fixture(autouse=True)
def _slow_tests_leave_room(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("slow") is not None and num_maps() > MOST_MAPS:
        forget_everything()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write date, versions and counts of this run to FILE")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Writes the record of a full run (`make test-full`)."""
    if not config.getoption("--record"):
        return
    stats = terminalreporter.stats
    outcomes = ("passed", "failed", "error", "skipped", "xfailed")
    packages = ("jax", "jaxlib", "flax", "numpy", "pytest")
    lines = [
        f"date      {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"machine   {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "versions  " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
        "result    " + ", ".join(f"{len(stats.get(outcome, []))} {outcome}" for outcome in outcomes),
        f"exit      {int(exitstatus)}",
    ]
    for outcome in ("failed", "error", "skipped"):
        for report in stats.get(outcome, []):
            lines.append(f"{outcome:9} {report.nodeid}")
    lines.append("")
    lines.append("slowest")
    calls = [report for report in stats.get("passed", []) if getattr(report, "duration", 0)]
    for report in sorted(calls, key=lambda report: -report.duration)[:15]:
        lines.append(f"{report.duration:7.1f} s {report.nodeid}")
    Path(config.getoption("--record")).write_text("\n".join(lines) + "\n")
