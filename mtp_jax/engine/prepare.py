"""What must be set in JAX before its first use: the compile cache and the number of CPU devices.

JAX itself is imported inside, so that the command line can name the defaults without it.
"""

import contextlib
import os
from pathlib import Path

CACHE_OFF = "off"
_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


def default_compile_cache() -> str:
    """Where compiled programs are kept: below XDG_CACHE_HOME or ~/.cache."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp_jax" / "xla")


def prepare_jax(num_devices: int, compile_cache: str, num_processes: int = 1) -> None:
    """Configures JAX for an engine.

    Args:
      num_devices: devices of the mesh; where there is no accelerator, as many CPU devices are made.
      compile_cache: a folder, or `off`. JAX keys entries by version, back end, program and options.
      num_processes: that the devices belong to; each makes its share of CPU devices.
    """
    import jax

    num_devices = -(-num_devices // num_processes)
    if num_devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX runs already: its devices are what there is
            if jax.config.jax_num_cpu_devices < num_devices:  # pyright: ignore[reportAttributeAccessIssue]
                jax.config.update("jax_num_cpu_devices", num_devices)
    if compile_cache == CACHE_OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(compile_cache).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class CacheCounter:
    """Counts hits and misses of the compile cache from now on."""

    def __init__(self):
        import jax.monitoring

        self.hits = self.misses = 0
        jax.monitoring.register_event_listener(self._on_event)

    def _on_event(self, event: str, **_: str | int) -> None:
        self.hits += event == _HIT
        self.misses += event == _MISS

    def describe(self) -> str:
        """`3 programs from the cache, 1 compiled`."""
        return f"{self.hits} programs from the cache, {self.misses} compiled"
