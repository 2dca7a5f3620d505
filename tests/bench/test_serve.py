"""The load generator against servers: one that works, and ones that fail in every way."""

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtp_jax.bench.app import main
from tests.server.running import LocalServer, local_server

FLAGS = "--num-speculative-tokens 2 --max-num-seqs 4 --max-model-len 256 --num-pages 256 --api-key k"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """Drafts are always right. An answer repeats its prompt; `!` in it ends the answer."""
    with local_server(*FLAGS.split()) as running:
        yield running


class Bench:
    """Runs the benchmark, and reads what it wrote."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self._folder, self._capsys = folder, capsys
        self.out = self.err = ""

    def __call__(self, *flags: str) -> int:
        try:
            code = main(["serve", *flags])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else -1
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *flags: str) -> tuple[int, dict]:
        path = self._folder / "result.json"
        code = self(*flags, "--json", str(path))
        return code, json.loads(path.read_text())


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_figures_add_up(server: LocalServer, bench: Bench, endpoint: str) -> None:
    load = "--num-prompts 9 --num-warmups 2 --input-len 12 --output-len 31 --ignore-eos --request-rate 200"
    flags = ["--url", server.url + "/v1/", "--api-key", "k", "--endpoint", endpoint, *load.split()]
    code, found = bench.json(*flags, "--max-concurrency", "3", "--temperature", "0")
    assert code == 0 and "9 completed, 0 failed" in bench.out
    assert found["model"] == "scripted" and found["failures"] == {}
    each = found["per_request"]
    assert [request["output_tokens"] for request in each] == [31] * 9
    assert found["tokens"]["output"] == 9 * 31 and found["tokens"]["from_usage"]
    if endpoint == "completions":
        assert found["tokens"]["prompt"] == 9 * 12
    assert found["throughput"]["output_tokens_per_second"] == pytest.approx(9 * 31 / found["seconds"])
    # Three tokens a round: eleven increments, so ten intervals.
    assert {len(request["intervals"]) for request in each} == {10}
    assert found["latency_seconds"]["inter_token_latency"]["count"] == 90
    for request in each:
        assert 0 < request["time_to_first_token"] <= request["end_to_end"]
        # Up to the last text; the finish reason may come later.
        last_text = request["time_to_first_token"] + sum(request["intervals"])
        assert last_text <= request["end_to_end"] + 1e-9
    sent = [request["sent"] for request in each]
    assert sent == sorted(sent) and sent[0] == 0
    speculation = found["speculation"]  # of the nine alone: eleven rounds each, the last of one token
    assert speculation["num_drafts"] == 9 * 11 and speculation["num_accepted_tokens"] == 9 * 20
    assert speculation["acceptance_per_position"] == pytest.approx([10 / 11, 10 / 11])
    assert speculation["mean_accepted_length"] == pytest.approx(31 / 11)
    assert "k" not in found["settings"].values() and found["settings"]["request_rate"] == 200


def test_prompts_of_a_file(server: LocalServer, bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"stone!"\n{"prompt": "sea", "max_tokens": 5}\n{"prompt": [97, 98, 99, 33]}')
    code, found = bench.json(
        "--url", server.url, "--api-key", "k", "--prompts", str(path), "--temperature", "0"
    )
    assert code == 0
    assert [each["output_tokens"] for each in found["per_request"]] == [6, 5, 4]  # the end is a token
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a!"}]}))
    flags = ("--url", server.url, "--api-key", "k", "--prompts", str(path), "--num-prompts", "2")
    assert bench(*flags, "--endpoint", "chat", "--extra-body", '{"num_speculative_tokens": 0}') == 0
    assert "nothing was drafted" in bench.out
    assert bench(*flags) == 2 and "--endpoint chat" in bench.err and bench.err.count("\n") == 1


def test_concurrency_is_limited(bench: Bench) -> None:
    seen, now, lock = [], [0], threading.Lock()

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        with lock:
            now[0] += 1
            seen.append(now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        send(handler, chunk("a"), chunk("", "stop"), usage(1), DONE)

    with made_server(answer) as url:
        assert bench("--url", url, "--model", "m", "--num-prompts", "12", "--max-concurrency", "3") == 0
        assert len(seen) == 12 and max(seen) == 3
        seen.clear()
        assert bench("--url", url, "--model", "m", "--num-prompts", "12") == 0
        assert max(seen) > 3


DONE = b"data: [DONE]\n\n"


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\r\n\r\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}})


def send(handler: http.server.BaseHTTPRequestHandler, *events: bytes, length: int = 0) -> None:
    """An answer; with a `length` that it does not reach, the connection breaks in the middle."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.send_header("Content-Length", str(length or sum(map(len, events))))
    handler.end_headers()
    for each in events:
        handler.wfile.write(each)
        handler.wfile.flush()
        time.sleep(0.002)  # so that they are chunks of their own


@contextlib.contextmanager
def made_server(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server whose every completion is made by `answer`; it has nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


BROKEN = {
    "dies": (lambda h: send(h, chunk("a"), length=10**6), "RemoteProtocolError"),
    "ends early": (lambda h: send(h, chunk("a"), chunk("b")), "ended without [DONE]"),
    "has no choices": (lambda h: send(h, usage(3), DONE), "no choices"),
    "fails inside": (lambda h: send(h, chunk("a"), event({"error": {"message": "oh no"}}), DONE), "oh no"),
    "is no JSON": (lambda h: send(h, b"data: nonsense\n\n", DONE), "no JSON object: nonsense"),
    "is a list": (lambda h: send(h, event([1]), DONE), "no JSON object: [1]"),
    "refuses": (lambda h: h.send_error(418), "HTTP 418"),
    "hangs": (lambda h: (send(h, chunk("a"), length=10**6), time.sleep(0.6)), "no end within 0.5 s"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_a_failure(bench: Bench, name: str) -> None:
    calls = []
    answer, part = BROKEN[name]

    def sometimes(handler: http.server.BaseHTTPRequestHandler) -> None:
        calls.append(1)
        if len(calls) == 2:
            answer(handler)
        else:
            send(handler, chunk("a"), chunk("b"), chunk("", "stop"), usage(2), DONE)

    with made_server(sometimes) as url:
        flags = ["--url", url, "--model", "m", "--num-prompts", "3", "--max-concurrency", "1"]
        code, found = bench.json(*flags, "--timeout", "0.5" if name == "hangs" else "30")
    assert code == 1
    assert found["requests"] == {"completed": 2, "failed": 1}
    assert found["tokens"]["output"] == 4  # of the two that are whole
    ((reason, count),) = found["failures"].items()
    assert part in reason and count == 1 and f"failed: 1 x {reason}" in bench.out
    assert found["per_request"][1]["error"] == reason
    assert found["speculation"] is None and "does not say" in bench.out


def test_a_server_without_usage(bench: Bench) -> None:
    with made_server(lambda h: send(h, chunk("a"), chunk("b"), chunk("c", "stop"), DONE)) as url:
        code, found = bench.json("--url", url, "--model", "m", "--num-prompts", "2")
    assert code == 0 and "sends no usage" in bench.out
    assert found["tokens"] == {"prompt": 0, "output": 6, "from_usage": False}


def test_refusals_are_counted_by_reason(server: LocalServer, bench: Bench) -> None:
    flags = ("--url", server.url, "--num-prompts", "3", "--input-len", "20")
    code, found = bench.json(*flags, "--api-key", "k", "--output-len", "300")
    assert code == 1 and list(found["failures"].values()) == [3]
    assert "HTTP 400: max_tokens: got 300" in bench.out
    assert bench(*flags, "--model", "scripted") == 1 and "failed: 3 x HTTP 401" in bench.out  # no key
    assert bench(*flags) == 1 and "HTTP 401" in bench.err and bench.err.count("\n") == 1


def test_nobody_listens(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert bench("--url", url, "--model", "m", "--num-prompts", "4") == 1
        assert "failed: 4 x cannot connect" in bench.out
        assert bench("--url", url) == 1 and "cannot connect" in bench.err


def test_an_engine_that_dies_in_the_middle(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("CRASH\n")
    with local_server() as server:
        code, found = bench.json("--url", server.url, "--model", "scripted", "--prompts", str(path))
    assert code == 1 and found["requests"] == {"completed": 0, "failed": 1}
    (reason,) = found["failures"]
    assert "500" in reason or "error in the stream" in reason or "503" in reason


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--url", "localhost:8000"], "--url: got 'localhost:8000'"),
        (["--request-rate", "0"], "above 0, or inf"),
        (["--num-prompts", "0"], "--num-prompts: got '0'; expected an integer of at least 1"),
        (["--endpoint", "embeddings"], "--endpoint"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--promts", "x"], "did you mean --prompts?"),
        (["--prompts", "/nowhere"], "--prompts: got '/nowhere'"),
        (["--json", "/nowhere/x"], "--json: got '/nowhere/x'"),
        (["--model"], "--model"),
        (["--url", "http://user:key@localhost"], "--api-key"),
    ],
)
def test_wrong_flags_are_one_line(bench: Bench, flags: list[str], part: str) -> None:
    assert bench(*flags) == 2
    assert part in bench.err and bench.err.count("\n") == 1 and not bench.out


def test_modes_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["train"]) == 2
    assert main(["--help"]) == 0 and "offline" in capsys.readouterr().out
    for mode in ("serve", "offline"):
        with pytest.raises(SystemExit) as caught:
            main([mode, "--help"])
        assert caught.value.code == 0 and "inter-token latency" in capsys.readouterr().out
