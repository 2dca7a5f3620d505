"""Load on a server for some minutes: many streams, a client that freezes, and SIGTERM in the middle.

    python benchmarks/http_load.py --minutes 10                        # the default model
    python benchmarks/http_load.py --minutes 1 --streams 16 -- --model DIR

Every stream asks again when its answer is over. A third of the way in, a client that was reading its stream
is stopped (`kill -STOP`) and never goes on. When the time is over the server gets SIGTERM: what it accepted
must end with a finish reason or an explicit error, what comes later must be refused, and its exit code must
be 0. All the while another process asks for /health, ten times a second.

Exit code 0 and a few lines of figures; 1 and the failures otherwise.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.http_soak import WORDS, log_errors, started_server  # noqa: E402

HEALTH_EVERY = 0.1  # seconds
MAX_HEALTH_P99 = 0.1  # seconds
DRAINED_SECONDS = 60.0  # after SIGTERM; the server's own limit is 30


@dataclasses.dataclass
class LoadReport:
    """What a load came to; `failures` is empty if all is well."""

    answers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tokens: int = 0
    seconds: float = 0.0
    health: list[float] = dataclasses.field(default_factory=list)  # seconds of each answer
    failures: list[str] = dataclasses.field(default_factory=list)

    def health_percentile(self, percent: float) -> float:
        ordered = sorted(self.health)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.answers.items()))
        p50, p99 = (1e3 * self.health_percentile(percent) for percent in (50, 99))
        return (
            f"{sum(self.answers.values())} answers ({ends}), {self.tokens} tokens in {self.seconds:.0f} s\n"
            f"/health: {len(self.health)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
            f"worst {1e3 * max(self.health):.1f} ms\n{len(self.failures)} failures"
        )


def make_body(rng: random.Random) -> dict:
    return {
        "prompt": " ".join(rng.choices(WORDS, k=rng.randint(2, 40))),
        "max_tokens": rng.randint(8, 96),
        "temperature": rng.choice([0, 1]),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(client: httpx.AsyncClient, body: dict, report: LoadReport) -> str:
    """One stream to its end: the finish reason, `error`, or `refused`."""
    reason: str | None = None
    usage: dict | None = None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            if answer.status_code not in (429, 503):
                report.failures.append(f"status {answer.status_code}: {answer.text[:300]}")
            return "refused"
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                break
            if not line:
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                reason = "error"
                continue
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                reason = choice["finish_reason"] or reason
        else:
            report.failures.append("a stream ended without [DONE]")
    if reason is None:
        report.failures.append("a stream ended without a reason")
    if reason == "length" and (usage or {}).get("completion_tokens") != body["max_tokens"]:
        report.failures.append(f"{usage} where {body['max_tokens']} tokens were asked for")
    report.tokens += (usage or {}).get("completion_tokens", 0)
    return reason or "nothing"


async def keep_asking(
    client: httpx.AsyncClient, rng: random.Random, stopping: asyncio.Event, report: LoadReport
) -> None:
    while True:
        try:
            end = await ask(client, make_body(rng), report)
        except httpx.HTTPError as error:
            if not stopping.is_set() or not isinstance(error, httpx.ConnectError):
                report.failures.append(f"{'after' if stopping.is_set() else 'before'} SIGTERM: {error!r}")
            return
        report.answers[end] += 1
        if stopping.is_set():
            return
        if end == "refused":
            await asyncio.sleep(0.2)


async def load(url: str, server: subprocess.Popen, seconds: float, streams: int) -> LoadReport:
    """Runs the load; the server has ended afterwards."""
    report, stopping = LoadReport(), asyncio.Event()
    began = time.monotonic()
    limits = httpx.Limits(max_connections=streams + 1)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        rngs = [random.Random(index) for index in range(streams)]
        tasks = [asyncio.create_task(keep_asking(client, rng, stopping, report)) for rng in rngs]
        with child("--freeze", url) as frozen, child("--health", url) as health:
            await asyncio.sleep(seconds / 3)
            frozen.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds * 2 / 3)
            health.send_signal(signal.SIGINT)
            out, _ = await asyncio.to_thread(health.communicate, timeout=30)
            report.health = json.loads(out)
            if server.poll() is not None:
                report.failures.append(f"the server ended by itself with code {server.returncode}")
            stopping.set()
            server.send_signal(signal.SIGTERM)
            _, late = await asyncio.wait(tasks, timeout=DRAINED_SECONDS)
            if late:
                report.failures.append(f"{len(late)} streams did not end after SIGTERM")
                for task in late:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            code = await asyncio.to_thread(server.wait, DRAINED_SECONDS)
    report.seconds = time.monotonic() - began
    if code != 0:
        report.failures.append(f"the server's exit code is {code}")
    if report.health_percentile(99) > MAX_HEALTH_P99:
        report.failures.append(f"/health took {report.health_percentile(99):.3f} s at p99")
    return report


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen]:
    """This script in a process of its own; killed at the end, frozen or not."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def watch_health(url: str) -> None:
    """Asks until SIGINT; prints the seconds that each answer took."""
    taken: list[float] = []
    with contextlib.suppress(KeyboardInterrupt), httpx.Client(base_url=url, timeout=30) as client:
        while True:
            began = time.perf_counter()
            client.get("/health").raise_for_status()
            taken.append(time.perf_counter() - began)
            time.sleep(max(0.0, HEALTH_EVERY - taken[-1]))
    print(json.dumps(taken))


def read_slowly(url: str) -> None:
    """Streams answers, until somebody stops this process."""
    body = make_body(random.Random(0)) | {"max_tokens": 512, "n": 4}
    while True:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=None) as answer:
            for _ in answer.iter_lines():
                time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description="Load on a server for some minutes.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--health", help=argparse.SUPPRESS)
    parser.add_argument("--freeze", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="after --: flags of the server to start")
    given = parser.parse_args()
    if given.health:
        watch_health(given.health)
        return 0
    if given.freeze:
        read_slowly(given.freeze)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with started_server(given.flags, log) as (url, server):
            report = asyncio.run(load(url, server, 60 * given.minutes, given.streams))
        report.failures += log_errors(log.read_text())
    for failure, count in collections.Counter(report.failures).items():
        print(f"{count} times: {failure}", file=sys.stderr)
    print(f"{os.cpu_count()} CPUs, {given.streams} streams")
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
