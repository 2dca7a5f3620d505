"""The real engine behind the server: from flags to `mtp_jax.engine`."""

import dataclasses
import logging
import sys

from mtp_jax.engine.build import Blueprint, construct
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.hosts import draw_together, lead
from mtp_jax.engine.leader import Leader, Told, end_process
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.prepare import CACHE_OFF, CacheCounter, prepare_jax
from mtp_jax.progress import Report
from mtp_jax.server.arguments import ServeOptions
from mtp_jax.server.more_flags import LIMIT_FLAGS
from sharding.hosts import Cluster

log = logging.getLogger(__name__)


def engine_options(options: ServeOptions) -> EngineOptions:
    """The engine's part of the server's options."""
    return EngineOptions(
        model=options.model,
        served_model_name=options.served_model_name,
        mtp_head=options.mtp_head,
        dtype=options.dtype,
        kv_cache_gib=options.kv_cache_gib,
        overrides=options.overrides,
    )


def prepare(options: ServeOptions, cluster: Cluster | None) -> None:
    """Configures JAX; before its first use."""
    config, num_processes = options.engine, 1 if cluster is None else cluster.num_processes
    prepare_jax(config.stages * config.data * config.tensor, options.compile_cache, num_processes)


class EngineBackend:
    """A `Backend` of `mtp_jax.server.launch`, in process 0.

    Args:
      cluster: the processes that serve together; None where this one is alone.
    """

    def __init__(self, cluster: Cluster | None = None):
        self.cluster = cluster
        self._on_trouble: Told = end_process
        self._on_stop: Told | None = None
        self._leader: Leader | None = None

    def watch(self, on_trouble: Told, on_stop: Told) -> None:
        """Says who is told of another process that is gone, or was asked to stop; before `build`."""
        self._on_trouble, self._on_stop = on_trouble, on_stop

    def abandon(self, reason: str, code: int) -> None:
        """Ends the other processes at once with this exit code, unless they have ended in good order."""
        if self._leader is not None:
            self._leader.fail(reason, code)

    def _draw(self, options: ServeOptions) -> Blueprint:
        prepare(options, self.cluster)
        if self.cluster is not None:
            self._leader = lead(self.cluster, self._on_trouble, self._on_stop)
        return draw_together(engine_options(options), self._leader)

    def describe(self, options: ServeOptions) -> str:
        blueprint = self._draw(options)
        if self._leader is not None:
            self._leader.end()
        lines = [blueprint.describe(), "", "engine"]
        values = dataclasses.asdict(blueprint.config)
        lines += [f"  {name:<24}{value}" for name, value in values.items()]
        lines += ["server", f"  {'address':<24}http://{options.host}:{options.port}"]
        names = (
            "compile_cache",
            "drain_timeout",
            "watchdog_timeout",
            *LIMIT_FLAGS,
            "log_level",
            "log_format",
        )
        lines += [f"  {name:<24}{getattr(options, name)}" for name in names]
        lines += [f"  {'api_key':<24}{'set' if options.api_key is not None else 'none: open to all'}"]
        return "\n".join(lines)

    def build(self, options: ServeOptions, report: Report) -> Engine:
        blueprint = self._draw(options)
        if options.log_format == "json":
            log.info("%s", blueprint.describe())
        else:
            print(blueprint.describe(), file=sys.stderr, flush=True)
        cache = CacheCounter()
        engine = construct(blueprint, report, self._leader)
        where = options.compile_cache
        log.info("compile cache %s", "is off" if where == CACHE_OFF else f"{where}: {cache.describe()}")
        return engine
