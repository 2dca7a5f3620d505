"""From the start of the server's process to its being ready, with an empty and with a warm compile cache.

    python benchmarks/startup.py                       # the default model
    python benchmarks/startup.py -- --model DIR --num-speculative-tokens 1

Ready is when /ready answers 200. The warm start uses the cache that the empty one left behind.
The operating system has read all files before: `serve --check` runs first.
"""

import argparse
import dataclasses
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mtp_jax.bench.circumstances import circumstances, load_average

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1  # often enough for what is measured in seconds
STOP_SECONDS = 120.0  # a server that is told to stop may finish a compile first


@dataclasses.dataclass(frozen=True)
class Start:
    """Seconds from the start of the process."""

    listening: float  # /health answers
    ready: float


def answers(url: str) -> bool:
    """Whether the address answers with a status of 200."""
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(flags: list[str], cache: Path, limit: float) -> Start:
    """Starts a server, waits until it is ready, and stops it.

    Raises:
      SystemExit: it ended by itself, or was not ready within `limit` seconds; with what it said.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "mtp_jax.serve",
        "--port",
        str(port),
        "--compile-cache",
        str(cache),
        *flags,
    ]
    with tempfile.TemporaryFile("w+") as log:
        began, listening = time.monotonic(), None
        process = subprocess.Popen(command, cwd=ROOT, stderr=log)
        try:
            while True:
                seconds = time.monotonic() - began
                if listening is None and answers(f"http://127.0.0.1:{port}/health"):
                    listening = seconds
                if listening is not None and answers(f"http://127.0.0.1:{port}/ready"):
                    return Start(listening, time.monotonic() - began)
                if process.poll() is not None or seconds > limit:
                    log.seek(0)
                    why = (
                        f"not ready after {seconds:.0f} s"
                        if process.returncode is None
                        else "the server ended"
                    )
                    raise SystemExit(f"{why}:\n{log.read()}")
                time.sleep(POLL_SECONDS)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def describe(flags: list[str]) -> str:
    """What would be served, in the server's own words; it reads every file that a start reads."""
    command = [sys.executable, "-m", "mtp_jax.serve", "--check", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return run.stdout.partition("\n\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=1, help="pairs of an empty and a warm start")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one start may take")
    parser.add_argument("flags", nargs="*", help="after --: flags of the server")
    args = parser.parse_args()
    print(*circumstances(), "", describe(args.flags), "", sep="\n", flush=True)
    print("| compile cache | listening s | ready s | machine |\n|---|---|---|---|", flush=True)
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "warm"):
                start = start_server(args.flags, Path(cache), args.limit)
                print(
                    f"| {state} | {start.listening:.1f} | {start.ready:.1f} | {load_average()} |", flush=True
                )


if __name__ == "__main__":
    main()
