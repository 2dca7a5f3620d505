"""Soak test over HTTP: short requests with random parameters, stops and aborts, many at a time.

Checks that every answer is right, that the same seed gives the same text alone as in the crowd, that
slots and pages go back to idle, that the metrics add up, and (when it starts the server itself) that
the log has no error.

    python benchmarks/http_soak.py                                   # starts a server for the default model
    python benchmarks/http_soak.py -- --model DIR --num-speculative-tokens 2
    python benchmarks/http_soak.py --url http://127.0.0.1:8000       # a server that runs already, and is idle
    python benchmarks/http_soak.py --minutes 10 --requests 1000      # soak after soak on one server

Exit code 0 and one line of figures; 1 and the failures otherwise. Equality of texts is promised in float32.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
# fmt: off
WORDS = [
    "the", "a", "sea", "stone", "of", "and", "river", "small", "tell", "me", "why", "12", "green",
    "is", "are", "light,", "under", "over?", "Paris", "código", "日本", "it's",
]
# fmt: on
STOPS = ("e", "a", ".", "\n", " the", "on", "zzz")
PREFIX = "mtp_jax:"
IDLE_SECONDS = 30.0
REPEATS = 24  # finished requests that are asked again, alone


@dataclasses.dataclass
class Call:
    """One request and what became of it."""

    path: str
    body: dict
    abort_after: int | None  # chunks of the stream after which the client leaves; None: it stays
    texts: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str | None] = dataclasses.field(default_factory=list)
    usage: dict = dataclasses.field(default_factory=dict)
    aborted: bool = False

    @property
    def choices(self) -> int:
        return self.body["n"]


@dataclasses.dataclass(frozen=True)
class SoakReport:
    """Figures of a soak; `failures` is empty if all is well."""

    requests: int
    aborted: int
    completion_tokens: int  # of the requests that were not aborted
    seconds: float
    acceptance_rate: float | None
    failures: tuple[str, ...]

    def __str__(self) -> str:
        acceptance = "" if self.acceptance_rate is None else f", acceptance {self.acceptance_rate:.1%}"
        return (
            f"{self.requests} requests ({self.aborted} aborted), {self.completion_tokens} tokens in "
            f"{self.seconds:.1f} s{acceptance}, {len(self.failures)} failures"
        )


def make_call(rng: random.Random, max_drafts: int, chat: bool) -> Call:
    """A random request; its seed is always given, so that it can be repeated."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
    if rng.random() < 0.4:  # prompts with a common start meet in the prefix cache
        text = "You are a careful writer who answers in short words and never lies to anyone. " + text
    body: dict = {
        "model": "default",
        "max_tokens": rng.randint(1, 24),
        "temperature": rng.choice([0, 0, 0.7, 1.0]),
        "seed": rng.getrandbits(40),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stream": rng.random() < 0.5,
    }
    optional = {
        "top_p": rng.choice([0.5, 0.9, 1.0]),
        "top_k": rng.choice([1, 5, 40]),
        "stop": rng.sample(STOPS, rng.randint(1, 3)),
        "ignore_eos": True,
        "num_speculative_tokens": rng.randint(0, max_drafts),
    }
    body |= {key: value for key, value in optional.items() if rng.random() < 0.35}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if chat and rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": text}]
        path = "/v1/chat/completions"
    else:
        body["prompt"] = text
        path = "/v1/completions"
    return Call(path, body, rng.randint(0, 6) if body["stream"] and rng.random() < 0.3 else None)


async def _stream(client: httpx.AsyncClient, call: Call) -> None:
    seen = 0
    async with client.stream("POST", call.path, json=call.body) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"status {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if call.abort_after is not None and seen >= call.abort_after:
                call.aborted = True
                return
            if not line:
                continue
            assert line.startswith("data: "), line
            if line == "data: [DONE]":
                return
            seen += 1
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
                call.texts[choice["index"]] += delta or ""
                call.reasons[choice["index"]] = choice["finish_reason"]
            call.usage = chunk.get("usage") or call.usage
    raise AssertionError("the stream ended without [DONE]")


async def run_call(client: httpx.AsyncClient, call: Call) -> None:
    """Sends one request and fills in its answer."""
    call.texts, call.reasons = [""] * call.choices, [None] * call.choices
    if call.body["stream"]:
        await _stream(client, call)
        return
    answer = await client.post(call.path, json=call.body)
    if answer.status_code != 200:
        raise AssertionError(f"status {answer.status_code}: {answer.text}")
    whole = answer.json()
    for choice in whole["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        call.texts[choice["index"]], call.reasons[choice["index"]] = text, choice["finish_reason"]
    call.usage = whole["usage"]


def check_call(call: Call) -> list[str]:
    """What is wrong with a finished answer."""
    body, usage, wrong = call.body, call.usage, []
    completion, most = usage.get("completion_tokens", -1), body["max_tokens"] * call.choices
    if not call.choices <= completion <= most:
        wrong.append(f"{completion} completion tokens of {most}")
    if call.reasons == ["length"] * call.choices and completion != most:
        wrong.append(f"finish_reason length after {completion} of {most} tokens")
    if not set(call.reasons) <= {"stop", "length"}:
        wrong.append(f"finish reasons {call.reasons}")
    if usage.get("total_tokens") != usage.get("prompt_tokens", 0) + completion:
        wrong.append(f"usage {usage}")
    if usage and not 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]:
        wrong.append(f"cached tokens in {usage}")
    for text in call.texts:
        wrong += [f"stop string {stop!r} in {text!r}" for stop in body.get("stop", ()) if stop in text]
    return [f"{call.path} {json.dumps(body)}: {item}" for item in wrong]


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    """Samples of /metrics without prefix and model: `request_success_total{finished_reason="stop"}`."""
    found = {}
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith(PREFIX):
            name, value = line.rsplit(" ", 1)
            name = (
                re.sub(r',?model_name="[^"]*"', "", name.removeprefix(PREFIX))
                .replace("{,", "{")
                .replace("{}", "")
            )
            found[name] = float(value)
    return found


async def _until_idle(client: httpx.AsyncClient) -> dict[str, float]:
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        now = await scrape(client)
        busy = now["num_requests_running"] + now["num_requests_waiting"] + now["kv_cache_usage_perc"]
        if not busy or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.05)


def _grown(before: dict[str, float], after: dict[str, float], name: str) -> int:
    """By how much a counter grew, all its labels together."""
    return int(sum(v - before.get(k, 0.0) for k, v in after.items() if k.split("{")[0] == name))


def check_metrics(before: dict[str, float], after: dict[str, float], calls: list[Call]) -> list[str]:
    """What does not add up over `calls`, between two scrapes of an otherwise idle server."""
    wrong = []
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if after[name]:
            wrong.append(f"{name} is {after[name]:g} on an idle server")
    finished = [call for call in calls if not call.aborted]
    aborted = [call for call in calls if call.aborted]
    completion = sum(call.usage["completion_tokens"] for call in finished)
    surplus = sum(call.body["max_tokens"] * call.choices for call in aborted)
    got = _grown(before, after, "generation_tokens_total")
    if not completion <= got <= completion + surplus:
        wrong.append(
            f"generation_tokens grew by {got}; usage says {completion} and at most {surplus} aborted"
        )
    prompt, got = (
        sum(call.usage["prompt_tokens"] for call in finished),
        _grown(before, after, "prompt_tokens_total"),
    )
    if got < prompt or (not aborted and got != prompt):
        wrong.append(f"prompt_tokens grew by {got}; usage says {prompt}")
    choices, got = sum(call.choices for call in calls), _grown(before, after, "request_success_total")
    if got != choices:
        wrong.append(f"request_success grew by {got}; there were {choices} choices")
    drafted, accepted, by_position = (
        _grown(before, after, f"spec_decode_num_{name}_total")
        for name in ("draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    if not accepted <= drafted or accepted != by_position:
        wrong.append(f"drafted {drafted}, accepted {accepted}, {by_position} by position")
    if _grown(before, after, "prefix_cache_hits_total") > _grown(before, after, "prefix_cache_queries_total"):
        wrong.append("more prefix cache hits than queries")
    return [f"metrics: {item}" for item in wrong]


async def _fit(client: httpx.AsyncClient, call: Call, context: int) -> None:
    """Shortens the prompt until it leaves room for the completion."""
    messages = call.body.get("messages")
    while True:
        asked = {"messages": messages} if messages else {"prompt": call.body["prompt"]}
        count = (await client.post("/tokenize", json=asked)).json()["count"]
        if count + call.body["max_tokens"] <= context:
            return
        text = messages[0]["content"] if messages else call.body["prompt"]
        if len(text) < 2:
            raise AssertionError(f"a context of {context} tokens is too short for this soak")
        if messages:
            messages[0]["content"] = text[len(text) // 2 :]
        else:
            call.body["prompt"] = text[len(text) // 2 :]


async def _all(client: httpx.AsyncClient, calls: list[Call], concurrency: int) -> list[str]:
    gate = asyncio.Semaphore(concurrency)

    async def one(call: Call) -> list[str]:
        async with gate:
            try:
                await run_call(client, call)
            except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
                return [f"{call.path} {json.dumps(call.body)}: {error!r}"]
        return [] if call.aborted else check_call(call)

    return [failure for failures in await asyncio.gather(*map(one, calls)) for failure in failures]


async def _repeat(client: httpx.AsyncClient, calls: list[Call]) -> tuple[list[Call], list[str]]:
    """Asks again for finished requests, one at a time: the text must be the same."""
    again, failures = [], []
    for call in calls:
        body = {key: value for key, value in call.body.items() if key != "stream_options"} | {"stream": False}
        alone = Call(call.path, body, None)
        failures += await _all(client, [alone], 1)
        if alone.texts != call.texts:
            failures.append(f"{call.path} {json.dumps(body)}: {alone.texts} alone, {call.texts} in the crowd")
        again.append(alone)
    return again, failures


async def _soak(url: str, count: int, concurrency: int, seed: int) -> SoakReport:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=concurrency + 1)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        before = await _until_idle(client)
        drafts = sum(name.startswith("spec_decode_num_accepted_tokens_per_pos_total") for name in before)
        probe = {"messages": [{"role": "user", "content": "hi"}]}
        chat = (await client.post("/tokenize", json=probe)).status_code == 200
        calls = [make_call(rng, drafts, chat) for _ in range(count)]
        context = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        for call in calls:
            await _fit(client, call, context)
        started = time.monotonic()
        failures = await _all(client, calls, concurrency)
        seconds = time.monotonic() - started
        middle = await _until_idle(client)
        if not failures:  # a failed request has no usage to add up
            failures += check_metrics(before, middle, calls)
        finished = [call for call in calls if not call.aborted and call.usage]
        repeated, unlike = await _repeat(client, rng.sample(finished, min(REPEATS, len(finished))))
        failures += unlike
        if not unlike:
            failures += check_metrics(middle, await _until_idle(client), repeated)
    drafted = _grown(before, middle, "spec_decode_num_draft_tokens_total")
    accepted = _grown(before, middle, "spec_decode_num_accepted_tokens_total")
    return SoakReport(
        requests=count,
        aborted=sum(call.aborted for call in calls),
        completion_tokens=sum(call.usage["completion_tokens"] for call in finished),
        seconds=seconds,
        acceptance_rate=accepted / drafted if drafted else None,
        failures=tuple(failures),
    )


def soak(url: str, count: int = 200, concurrency: int = 16, seed: int = 0) -> SoakReport:
    """Runs the soak against a server that is ready, idle and used by nobody else."""
    return asyncio.run(_soak(url, count, concurrency, seed))


def soak_for(url: str, minutes: float, count: int, concurrency: int, seed: int) -> list[SoakReport]:
    """Soak after soak, each with requests of its own, until the time is over; one at least."""
    deadline = time.monotonic() + 60 * minutes
    reports: list[SoakReport] = []
    while not reports or time.monotonic() < deadline:
        reports.append(soak(url, count, concurrency, seed + len(reports)))
        print(reports[-1], flush=True)
    return reports


def resident_mib(process: subprocess.Popen) -> float:
    """Memory that a process holds, MiB; 0 where the system does not tell."""
    status = Path(f"/proc/{process.pid}/status")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else 0.0


def log_errors(text: str) -> list[str]:
    """Lines of a server's log that should not be there."""
    return [
        f"log: {line}"
        for line in text.splitlines()
        if re.search(r"\b(ERROR|CRITICAL|Traceback|Exception)\b", line)
    ]


@contextlib.contextmanager
def started_server(flags: list[str], log: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server with `flags` on a free port: its address and process. Its stderr goes to `log`."""
    command = [sys.executable, "-m", "mtp_jax.serve", "--port", "0", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)
    try:
        while not (ready := re.search(r"^ready: .* on (http://\S+)", log.read_text(), re.MULTILINE)):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with code {process.returncode}:\n{log.read_text()}")
            time.sleep(0.2)
        yield ready[1], process
    finally:
        if process.poll() is None:
            process.terminate()
        if process.wait(60) != 0:
            raise SystemExit(f"the server ended with code {process.returncode}:\n{log.read_text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak test over HTTP.")
    parser.add_argument("--url", help="a running server; without it, one is started")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=0, help="repeat the soak for so long")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="after --: flags of the server to start")
    given = parser.parse_args()
    logged: list[str] = []
    if given.url:
        reports = soak_for(given.url, given.minutes, given.requests, given.concurrency, given.seed)
    else:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "server.log"
            with started_server(given.flags, log) as (url, process):
                reports = soak_for(url, 0, given.requests, given.concurrency, given.seed)
                first = resident_mib(process)
                if given.minutes:
                    later = (given.minutes, given.requests, given.concurrency, given.seed + 1)
                    reports += soak_for(url, *later)
                    print(f"server: {first:.0f} MiB after the first soak, then {resident_mib(process):.0f}")
            logged = log_errors(log.read_text())
    failures = [*(failure for report in reports for failure in report.failures), *logged]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
