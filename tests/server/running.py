"""Servers for tests: in this process (a thread) and as a subprocess."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from mtp_jax.server.arguments import parse_options
from mtp_jax.server.launch import ServerProcess as Process
from mtp_jax.server.launch import bind_listener
from tests.server.scripted import ScriptedBackend

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from mtp_jax.server.launch import main
from tests.server.scripted import ScriptedBackend
sys.exit(main(sys.argv[3:], ScriptedBackend(float(sys.argv[1]), float(sys.argv[2])), prog="mtp-jax serve"))
"""


class LocalServer:
    """A server in a thread of this process, with the whole life cycle but signals."""

    def __init__(self, process: Process, backend: ScriptedBackend):
        self.process, self.backend = process, backend
        host, port = process.listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self.code: int | None = None

    @property
    def engine(self):
        assert self.backend.engine is not None
        return self.backend.engine


@contextlib.contextmanager
def local_server(
    *flags: str, backend: ScriptedBackend | None = None, wait: bool = True
) -> Iterator[LocalServer]:
    backend = backend or ScriptedBackend()
    options = parse_options(["--port", "0", "--log-format", "json", *flags])
    process = Process(options, backend, bind_listener(options.host, options.port), "test")
    server = LocalServer(process, backend)
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def run() -> int:
        loop.call_soon(started.set)
        return await process.run(handle_signals=False)

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            server.code = runner.run(run())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    try:
        if wait:
            until(lambda: httpx.get(server.url + "/ready").status_code == 200)
        yield server
    finally:
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop ended by itself
                loop.call_soon_threadsafe(process.stop.set)
        thread.join(20)
        assert not thread.is_alive()


def until(condition, seconds: float = 10.0) -> None:
    """Waits for `condition()` to be true; an assertion error when it takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        time.sleep(0.01)
    raise AssertionError(f"not true after {seconds} s")


class Subprocess:
    """`mtp-jax serve` in a process of its own over the scripted engine."""

    def __init__(self, *flags: str, step_seconds: float = 0.0, load_seconds: float = 0.0):
        command = [sys.executable, "-c", SCRIPT, str(step_seconds), str(load_seconds), *flags]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._lines.append(line)

    @property
    def stderr(self) -> str:
        return "".join(self._lines)

    def address(self) -> str:
        """The URL that the ready line names."""
        until(lambda: "curl http" in self.stderr, 30)
        return self.stderr.split(" on ", 1)[1].split(" ", 1)[0]

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        code = self.popen.wait(seconds)
        self._reader.join(5)
        return code

    def __enter__(self) -> "Subprocess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(10)
        self._reader.join(5)
        for pipe in (self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()
