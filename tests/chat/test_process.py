"""The real command: at a pseudo-terminal, and in a pipe."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from mtp_jax.chat.terminal import ACCEPTED, RESET
from tests.chat.checkpoint import ENGINE, write_chat_model
from tests.house.source import ROOT

CACHE = str(jax.config.jax_compilation_cache_dir)  # pyright: ignore
FLAGS = (*ENGINE, "--compile-cache", CACHE, "--temperature", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "tiny_chat")


class Screen:
    """The other end of a pseudo-terminal."""

    def __init__(self, master: int):
        self._master = master
        self.text = ""
        self._done = 0  # characters that `until` has passed
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how Linux says that the last process left
            while data := os.read(self._master, 4096):
                self.text += data.decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, pattern: str, seconds: float = 240.0) -> str:
        """Waits for new text that matches; everything up to it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.compile(pattern).search(self.text, self._done):
                passed, self._done = self.text[self._done : found.end()], found.end()
                return passed
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {self.text[self._done :]!r}")

    def interrupt(self, process: subprocess.Popen) -> None:
        """Ctrl-C at the prompt, once the chat waits for keys.

        CPython's readline loses a signal that comes after it has shown the prompt and before its `select`:
        microseconds, or longer on a machine with more processes than cores.
        """
        state = Path(f"/proc/{process.pid}/stat")
        while state.exists() and state.read_text().rpartition(") ")[2][0] != "S":
            time.sleep(0.02)
        self.type("\x03")

    def close(self) -> None:
        self._reader.join(10)
        os.close(self._master)


@contextlib.contextmanager
def at_terminal(model: Path) -> Iterator[tuple[subprocess.Popen, Screen]]:
    """The chat at a terminal of its own, which sends it signals for Ctrl-C."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "mtp_jax.chat", "--model", str(model), *FLAGS]
    # A session leader that opens a terminal gets it as its own.
    script = 'exec "$@" <"$TTY" >"$TTY" 2>&1'
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", *command],
        cwd=ROOT,
        env=clean | {"TTY": os.ttyname(slave), "TERM": "xterm", "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )
    screen = Screen(master)
    time.sleep(0.5)  # the shell opens the terminal before our own end of it is closed
    try:
        yield process, screen
    finally:
        os.close(slave)
        if process.poll() is None:
            process.kill()
        process.wait(10)
        screen.close()


def test_a_conversation_at_a_terminal(model: Path) -> None:
    with at_terminal(model) as (process, screen):
        screen.until("accepted drafts is .*green")
        screen.until("> ")
        screen.type("/set max_tokens=20\r")
        screen.until("max_tokens=20")
        screen.until("> ")
        screen.type("helo\x1b[Dl\r")  # the arrow key edits the line
        answer = screen.until(
            r"\[20 tokens, [\d.]+ tokens/s, .*accepted length [\d.]+, acceptance [\d.]+ %\]"
        )
        assert answer.count(ACCEPTED) > 3 and answer.count(ACCEPTED) == answer.count(RESET)
        screen.until("> ")
        screen.type("half a li")
        screen.until("half a li")
        screen.interrupt(process)
        screen.until("Ctrl-C again, Ctrl-D or /quit leaves")
        screen.until("> ")
        screen.type("\x1b[A\x1b[A\x01\x0b/set max_tokens=none\r")  # history, then all of the line is cut
        screen.until("max_tokens=none")
        screen.until("> ")
        screen.type("long\r")
        screen.until(re.escape(ACCEPTED))
        screen.type("\x03")
        stopped = screen.until(r"\[stopped, (\d+) tokens.*\]")
        assert 0 < int(re.findall(r"stopped, (\d+)", stopped)[0]) < 230
        screen.until("> ")
        screen.interrupt(process)
        screen.until(r"\[total of 2: ")
        assert process.wait(30) == 0
    assert "Traceback" not in screen.text


def test_a_pipe(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtp_jax", "chat", "--model", str(model), *FLAGS, "--max-tokens", "6"],
        cwd=ROOT,
        input="one\n/set\ntwo",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[6 tokens") == 2 and "[total of 2: 12 tokens" in done.stderr
    assert "\x1b" not in done.stdout and "tokens" not in done.stdout and "> " not in done.stdout
