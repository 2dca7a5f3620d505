"""Start, drain, signals and death of the process."""

import json
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from tests.server.running import ROOT, Subprocess, local_server, until
from tests.server.scripted import ScriptedBackend

BODY = {"prompt": "abc", "max_tokens": 60, "temperature": 0}


def test_http_is_up_while_the_model_loads() -> None:
    with local_server(backend=ScriptedBackend(load_seconds=1.5), wait=False) as loading:
        until(lambda: httpx.get(loading.url + "/ready").json()["percent"] > 0)
        assert httpx.get(loading.url + "/health").status_code == 200
        assert httpx.get(loading.url + "/metrics").status_code == 200
        answer = httpx.post(loading.url + "/v1/completions", json=BODY)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "not_ready"
        seen = []
        until(lambda: seen.append(r := httpx.get(loading.url + "/ready")) or r.status_code == 200)
        percents = [answer.json()["percent"] for answer in seen]
        assert percents == sorted(percents) and percents[-1] == 100
        assert all(answer.status_code == 503 for answer in seen[:-1])
        assert httpx.post(loading.url + "/v1/completions", json=BODY).status_code == 200
    assert loading.code == 0


def test_the_printed_curl_line_works() -> None:
    with Subprocess("--port", "0") as server:
        server.address()
        line = next(line for line in server.stderr.splitlines() if line.startswith("curl "))
        answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=20)
        assert '"completion_tokens": 40' in answer.stdout  # it samples, so the text varies


def test_sigterm_drains() -> None:
    with Subprocess("--port", "0", step_seconds=0.03) as server:
        url = server.address()
        answers: list[httpx.Response] = []
        worker = threading.Thread(
            target=lambda: answers.append(httpx.post(url + "/v1/completions", json=BODY, timeout=30))
        )
        with httpx.stream("POST", url + "/v1/completions", json=BODY | {"stream": True}) as stream:
            worker.start()
            lines = stream.iter_lines()
            next(lines)
            until(lambda: _running(url) == 2)
            server.signal(signal.SIGTERM)
            until(lambda: httpx.get(url + "/ready").json()["status"] == "draining")
            refused = httpx.post(url + "/v1/completions", json=BODY)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert httpx.get(url + "/health").status_code == 200
            rest = [line for line in lines if line]
        worker.join(20)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert server.wait() == 0
        assert "Traceback" not in server.stderr


def _running(url: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("mtp_jax:num_requests_running")).split()[-1])


def test_drain_time_is_bounded() -> None:
    with Subprocess("--port", "0", "--drain-timeout", "0.3", step_seconds=0.2) as server:
        url = server.address()
        with httpx.stream("POST", url + "/v1/completions", json=BODY | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "server_stopping" in rest[-2]
        assert server.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_is_immediate(number: signal.Signals) -> None:
    with Subprocess("--port", "0", step_seconds=0.2) as server:
        url = server.address()
        with httpx.stream("POST", url + "/v1/completions", json=BODY | {"stream": True}) as stream:
            next(stream.iter_lines())
            server.signal(number)
            until(lambda: "draining" in server.stderr)
            server.signal(number)
            assert server.wait(5) == 128 + number


def test_sigterm_while_loading() -> None:
    with Subprocess("--port", "0", load_seconds=60) as server:
        until(lambda: "reading" in server.stderr, 30)
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_a_dead_engine_is_loud() -> None:
    with Subprocess("--port", "0", step_seconds=0.02) as server:
        url = server.address()
        with httpx.stream("POST", url + "/v1/completions", json=BODY | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            answer = httpx.post(url + "/v1/completions", json=BODY | {"prompt": "CRASH"})
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
            rest = [line for line in lines if line]
        assert "engine_dead" in rest[-2]
        assert httpx.get(url + "/health").status_code == 503
        assert httpx.get(url + "/ready").status_code == 503
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 503
        assert server.wait() == 1
        assert "the script says CRASH" in server.stderr


def test_watchdog() -> None:
    with local_server("--watchdog-timeout", "1") as server:
        assert httpx.get(server.url + "/health").status_code == 200
        worker = threading.Thread(
            target=lambda: httpx.post(
                server.url + "/v1/completions", json=BODY | {"prompt": "HANG"}, timeout=30
            )
        )
        worker.start()
        until(lambda: httpx.get(server.url + "/health").status_code == 503)
        server.engine.release.set()
        worker.join(10)
        assert httpx.get(server.url + "/health").status_code == 200


def test_port_in_use_is_one_line_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Subprocess("--port", port, load_seconds=60) as server:
            assert server.wait(20) == 2
            assert server.stderr.count("\n") == 1 and "--port" in server.stderr and port in server.stderr


def test_loading_errors_are_one_line() -> None:
    with Subprocess("--port", "0", "--model", "/nowhere") as server:
        assert server.wait(20) == 2
        assert server.stderr.count("\n") == 1 and "--model" in server.stderr and "/nowhere" in server.stderr


def test_check_loads_nothing() -> None:
    with Subprocess("--check", "--stages", "2", load_seconds=60) as server:
        assert server.wait(20) == 0
        assert server.popen.stdout is not None and "stages=2" in server.popen.stdout.read()


def test_json_logs() -> None:
    with Subprocess("--port", "0", "--log-format", "json") as server:
        until(lambda: "ready" in server.stderr and "http://" in server.stderr, 30)
        url = "http://" + server.stderr.split("http://")[1].split(" ")[0]
        httpx.post(url + "/v1/completions", json=BODY, headers={"X-Request-Id": "r-77"})
        until(lambda: "r-77" in server.stderr)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        records = [json.loads(line) for line in server.stderr.splitlines()]
    finished = next(record for record in records if record.get("request_id") == "r-77")
    assert "3 prompt + 60 completion tokens" in finished["message"]


@pytest.mark.parametrize(
    "command", [["-m", "mtp_jax.serve"], ["-m", "mtp_jax", "serve"]], ids=lambda command: command[1]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_imported(command: list[str], number: signal.Signals) -> None:
    arguments = [sys.executable, "-X", "importtime", *command, "--port", "0"]
    with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # each module as its import is over
            if line.endswith(" uvicorn.config\n"):
                break
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(30) == 128 + number
    assert "Traceback" not in rest and "KeyboardInterrupt" not in rest
    assert "mtp_jax.server.launch" not in rest  # still importing


def test_the_module_itself_is_the_command() -> None:
    command = [sys.executable, "-m", "mtp_jax.serve", "--stages", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "mtp_jax.serve: --stages: got 'x'; expected 'auto' or an integer of at least 0\n"
