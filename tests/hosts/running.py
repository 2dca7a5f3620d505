"""Several real processes that serve one model on this machine, as the command line starts them on hosts."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx
import jax

from tests.server.running import ROOT

MODEL = ROOT / "tests" / "golden" / "tiny_mimo"
SIZES = "--num-speculative-tokens 1 --max-num-seqs 2 --max-model-len 128 --page-size 128 --prefill-chunk 16"
START_SECONDS = 480  # with an empty compile cache, on a busy machine
END_SECONDS = 10  # after a process has died: what users are promised
STOP_SECONDS = 60  # in good order: draining, and interpreters that take themselves apart


def free_port() -> int:
    """A port that is free and whose successor is, too."""
    while True:
        with socket.create_server(("", 0)) as one:
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError), socket.create_server(("", port + 1)):
                return port


def compile_cache() -> str:
    """The tests' own."""
    return str(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]


class Launch:
    """`count` processes with the same flags but for --process-id. Process 0 serves at `url`.

    `more` has flags of single processes, which users should not give.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        coordinator: int,
        flags: Sequence[str],
        more: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ):
        self.coordinator = coordinator
        self.logs = [folder / f"process{i}.log" for i in range(count)]
        self.http_port = free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.processes = [self._start(i, count, [*flags, *more.get(i, ())]) for i in range(count)]

    def _start(self, index: int, count: int, flags: Sequence[str]) -> subprocess.Popen:
        command = [sys.executable, "-m", "mtp_jax.serve", "--model", str(MODEL), *SIZES.split()]
        command += ["--port", str(self.http_port), "--compile-cache", compile_cache(), *flags]
        command += ["--coordinator", f"127.0.0.1:{self.coordinator}", "--num-processes", str(count)]
        command += ["--process-id", str(index)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        with self.logs[index].open("w") as stderr:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr)

    def log(self, index: int) -> str:
        return self.logs[index].read_text(errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not re.search(r"^ready: ", self.log(0), re.MULTILINE):
            ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, self.report()
            time.sleep(0.1)

    def wait_ended(self, seconds: float = END_SECONDS) -> list[int]:
        """Exit codes of all processes; an assertion error where one goes on."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        assert all(process.poll() is not None for process in self.processes), self.report()
        return [process.returncode for process in self.processes]

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        self.processes[index].send_signal(number)

    def complete(self, prompt: list[int], **body: object) -> dict:
        """The whole answer to a completion."""
        fields = {"model": "default", "prompt": prompt, "max_tokens": 24, "ignore_eos": True} | body
        answer = httpx.post(self.url + "/v1/completions", json=fields, timeout=120)
        assert answer.status_code == 200, answer.text + self.report()
        return answer.json()

    def report(self) -> str:
        """What every process has said, for a failure."""
        states = [f"process {i}: exit code {p.poll()}\n{self.log(i)}" for i, p in enumerate(self.processes)]
        return "\n" + "\n".join(states)


@contextlib.contextmanager
def launched(folder: Path, count: int, coordinator: int, *flags: str) -> Iterator[Launch]:
    """A launch that is ready to answer, and that is killed at the end where it has not ended."""
    launch = Launch(folder, count, coordinator, flags)
    try:
        launch.wait_ready()
        yield launch
    finally:
        for process in launch.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
