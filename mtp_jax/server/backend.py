"""The real engine behind the server: from flags to `mtp_jax.engine`."""

import dataclasses
import logging
import sys

from mtp_jax.engine.build import EngineOptions, construct, draw_blueprint
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.prepare import CACHE_OFF, CacheCounter, prepare_jax
from mtp_jax.progress import Report
from mtp_jax.server.arguments import ServeOptions
from mtp_jax.server.more_flags import LIMIT_FLAGS

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


class EngineBackend:
    """A `Backend` of `mtp_jax.server.launch`."""

    def describe(self, options: ServeOptions) -> str:
        self._prepare(options)
        blueprint = draw_blueprint(engine_options(options))
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
        self._prepare(options)
        blueprint = draw_blueprint(engine_options(options))
        if options.log_format == "json":
            log.info("%s", blueprint.describe())
        else:
            print(blueprint.describe(), file=sys.stderr, flush=True)
        cache = CacheCounter()
        engine = construct(blueprint, report)
        where = options.compile_cache
        log.info("compile cache %s", "is off" if where == CACHE_OFF else f"{where}: {cache.describe()}")
        return engine

    @staticmethod
    def _prepare(options: ServeOptions) -> None:
        config = options.engine
        prepare_jax(config.stages * config.data * config.tensor, options.compile_cache)
