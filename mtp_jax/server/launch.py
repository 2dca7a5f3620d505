"""The life of a server process: bind, load, serve, drain, exit.

Exit codes: 0 after a drain, 1 when the engine died, 2 for a mistake in flags, files or models,
128 + signal when a second signal cut the drain short.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import uvicorn

from mtp_jax import __version__
from mtp_jax.errors import EngineDeadError, InvalidValueError, UnsupportedHereError
from mtp_jax.progress import Report
from mtp_jax.server.app import allow_origins, create_app
from mtp_jax.server.arguments import ServeOptions, fail, parse_options
from mtp_jax.server.async_engine import AsyncEngine, State
from mtp_jax.server.connection import patient_protocol
from mtp_jax.server.interface import EngineCore
from mtp_jax.server.logs import Progress, configure_logging, curl_line
from mtp_jax.server.metrics import ServerMetrics, describe_load
from mtp_jax.server.middleware import GateOptions
from mtp_jax.server.signals import exit_on_signals
from mtp_jax.server.traces import Observers, TraceObserver, otlp_provider
from mtp_jax.server.turns import ParserOptions
from mtp_jax.text.chat import check_template

log = logging.getLogger(__name__)

LOAD_LOG_SECONDS = 10.0
FAIL_SECONDS = 8.0  # within which a server ends whose engine cannot
FLUSH_SECONDS = 5.0  # for answers that are written when the server stops


class Backend(Protocol):
    """Where engines come from."""

    def describe(self, options: ServeOptions) -> str:
        """What would run: checks everything that can be checked without loading weights."""
        ...

    def build(self, options: ServeOptions, report: Report) -> EngineCore: ...


class OtherProcesses(Protocol):
    """Those that serve together with this one: what the server has to do with them."""

    def watch(self, on_trouble: Callable[[str], None], on_stop: Callable[[str], None]) -> None:
        """Has the server told, from some thread, that one is gone or failed, or was asked to stop."""
        ...

    def abandon(self, reason: str, code: int) -> None:
        """Ends them at once with this exit code, unless they have ended in good order."""
        ...


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: draining needs the server to go on answering."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(
    argv: Sequence[str] | None = None, backend: Backend | None = None, prog: str = "mtp-jax serve"
) -> int:
    """Serves until told to stop; returns the exit code."""
    options = parse_options(sys.argv[1:] if argv is None else argv, prog)
    configure_logging(options.log_level, options.log_format)
    if backend is not None:
        return _serve(options, backend, prog)
    # These import jax: --help and bad flags need none.
    from mtp_jax.engine.cluster import find_cluster
    from mtp_jax.server.backend import EngineBackend
    from mtp_jax.server.follow import FollowerProcess

    try:
        cluster = find_cluster(options.coordinator, options.num_processes, options.process_id)
    except (InvalidValueError, UnsupportedHereError) as error:
        return fail(prog, error)
    if cluster is not None and cluster.process_id > 0:
        return FollowerProcess(options, cluster, prog).run()
    ours = EngineBackend(cluster)
    return _serve(options, ours, prog, ours)


def _serve(options: ServeOptions, source: Backend, prog: str, others: OtherProcesses | None = None) -> int:
    """The life of a server with this backend; the exit code."""
    try:
        if options.check:
            print(source.describe(options), flush=True)
            return 0
        listener = bind_listener(options.host, options.port)
        process = ServerProcess(options, source, listener, prog)
        if others is not None:
            others.watch(process.fail, process.ask_to_stop)
    except (InvalidValueError, UnsupportedHereError) as error:
        if others is not None:
            others.abandon(f"process 0 stopped: {error}", 2)
        return fail(prog, error)
    with asyncio.Runner(loop_factory=process.http.config.get_loop_factory()) as runner:
        code = runner.run(process.run())
    exit_on_signals()  # the loop has put Python's own handlers back
    if process.engine.state is not State.STOPPED:
        if others is not None:
            failure = process.engine.failure
            reason = "process 0 has stopped" if failure is None else f"process 0 failed: {failure!r}"
            others.abandon(reason, code)
        # Some thread may be inside a compiler, which must not have the interpreter torn down under it.
        sys.stderr.flush()
        os._exit(code)
    return code


def read_template(path: str) -> str:
    """The chat template of a file. Raises InvalidValueError where there is none in it."""
    flag = "--chat-template"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InvalidValueError(flag, path, f"a readable file ({reason})") from None
    check_template(text, f"{flag} {path}")
    return text


def _build(backend: Backend, options: ServeOptions, template: str | None, report: Report) -> EngineCore:
    engine = backend.build(options, report)
    if template is not None:
        engine.tokenizer.use_chat_template(template)
    return engine


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow happens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidValueError("--host", host, f"an address of this machine ({error.strerror})") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        legal = f"a free port of {host}, or 0 for any ({error.strerror})"
        raise InvalidValueError("--port", port, legal) from None
    return listener


class ServerProcess:
    """One server: the engine's thread, the HTTP server and the signals that end them."""

    def __init__(self, options: ServeOptions, backend: Backend, listener: socket.socket, prog: str):
        self.options, self.prog = options, prog
        template = None if options.chat_template is None else read_template(options.chat_template)
        self.listener = listener
        self.metrics = ServerMetrics()
        endpoint = options.otlp_traces_endpoint
        providers = [] if endpoint is None else [otlp_provider(endpoint, __version__)]
        self.traces = [TraceObserver(provider) for provider in providers]
        self.progress = Progress(structured=options.log_format == "json")
        self.engine = AsyncEngine(
            functools.partial(_build, backend, options, template),
            observer=Observers([self.metrics, *self.traces]),
            on_progress=self.progress,
            watchdog_seconds=options.watchdog_timeout,
            max_queued=options.max_queued_requests,
            request_seconds=options.request_timeout,
        )
        gate = GateOptions(
            options.api_key,
            max_body_bytes=int(options.max_body_mib * 2**20),
            max_header_bytes=int(options.max_header_kib * 2**10),
            body_seconds=options.client_timeout,
        )
        identity = f"{options.model} {options.mtp_head} {options.dtype} {options.engine}"
        self.parsers = parsers = ParserOptions(options.reasoning_parser, options.tool_call_parser)
        app = create_app(
            self.engine,
            self.metrics,
            gate,
            __version__,
            identity,
            parsers,
            options.per_request_spec_decode_metrics,
        )
        app.state.max_json_depth = options.max_json_depth
        allow_origins(app, options.allowed_origins)
        config = uvicorn.Config(
            app,
            http=patient_protocol(options.client_timeout),
            h11_max_incomplete_event_size=gate.max_header_bytes + 2**12,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=int(FLUSH_SECONDS),
        )
        self.http = _HttpServer(config)

    async def run(self, handle_signals: bool = True) -> int:
        """Serves until `stop` is set, by a signal or a caller in this loop; the exit code."""
        self.stop = asyncio.Event()
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if handle_signals else ():
            loop.add_signal_handler(number, self._on_signal, number)
        self.engine.start()
        serving = asyncio.create_task(self.http.serve(sockets=[self.listener]))
        reporter = asyncio.create_task(self._report_load())
        try:
            return await self._until_stopped(serving)
        finally:
            reporter.cancel()
            self.http.should_exit = True
            await serving
            for observer in self.traces:
                await asyncio.to_thread(observer.close)

    def fail(self, reason: str) -> None:
        """Another process is gone: clients get an error, and the server ends. From any thread."""
        self.engine.fail(EngineDeadError(reason))
        # The loop may have no chance: a thread can hold the interpreter in a call that never returns.
        backstop = threading.Timer(FAIL_SECONDS, os._exit, (1,))
        backstop.daemon = True
        backstop.start()

    def ask_to_stop(self, reason: str) -> None:
        """Drains as SIGTERM does. From any thread."""
        log.info("%s", reason)
        self._loop.call_soon_threadsafe(self.stop.set)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            print(f"{self.prog}: second signal: stopping at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.stop.set()

    async def _until_stopped(self, serving: asyncio.Task[None]) -> int:
        await _first(self.engine.loaded.wait(), self.stop.wait(), serving)
        self.progress.close()
        if self.engine.state is State.DEAD:
            return self._loading_failed()
        if self.engine.state is State.READY and not self.stop.is_set():
            self._announce()
            await _first(self.engine.ended.wait(), self.stop.wait(), serving)
        if self.engine.state is State.LOADING:
            log.info("stopped while loading")
            return 0
        if self.engine.state is State.DEAD:
            return await self._engine_died()
        return await self._drain()

    def _loading_failed(self) -> int:
        error = self.engine.failure
        if isinstance(error, InvalidValueError | UnsupportedHereError):
            return fail(self.prog, error)
        if isinstance(error, EngineDeadError):  # another process, which says more
            log.critical("loading failed: %s", error)
            return 1
        log.critical("loading failed", exc_info=error)
        return 1

    async def _engine_died(self) -> int:
        log.critical("the engine died (%r); stopping", self.engine.failure)
        await asyncio.sleep(1.0)  # /health says 503 for a moment, and waiting clients get their answer
        return 1

    async def _drain(self) -> int:
        seconds = self.options.drain_timeout
        log.info("draining: %d requests have %g s to finish", self.engine.num_live, seconds)
        if not await self.engine.drain(seconds):
            log.warning("drain time is over: the remaining requests were cut off")
        if self.engine.state is State.DEAD:
            return await self._engine_died()
        self.engine.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.engine.ended.wait(), FLUSH_SECONDS)
        log.info("stopped")
        return 0

    def _announce(self) -> None:
        bound, port = str(self.listener.getsockname()[0]), self.listener.getsockname()[1]
        host: str = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        core = self.engine.engine
        chat = getattr(core.tokenizer, "has_chat_template", True)
        dialect = self.parsers.resolve(core)
        thinks = "is told apart" if dialect.reasoning else "is not looked for"
        log.info("reasoning %s; tool calls: %s", thinks, dialect.tools or "not for this chat template")
        ready = f"ready: {core.model_name} on {address} after {self.progress.seconds:.1f} s"
        curl = curl_line(address, chat, self.options.api_key is not None)
        if self.options.log_format == "json":
            log.info("%s", ready)
        else:
            print(f"{ready}\n{curl}", file=sys.stderr, flush=True)

    async def _report_load(self) -> None:
        """A line of load every few seconds while there is any."""
        before, tokens = self.engine.latest_stats, 0
        while True:
            await asyncio.sleep(LOAD_LOG_SECONDS)
            now, delivered = self.engine.latest_stats, self.metrics.delivered_tokens
            if self.engine.num_live or delivered != tokens:
                log.info("%s", describe_load(before, now, delivered - tokens, LOAD_LOG_SECONDS))
            before, tokens = now, delivered


async def _first(*awaitables: Coroutine | asyncio.Task) -> None:
    """Waits for the first of them; tasks that were passed in go on, coroutines are cancelled."""
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, given in zip(tasks, awaitables, strict=True):
        if task is not given:
            task.cancel()
