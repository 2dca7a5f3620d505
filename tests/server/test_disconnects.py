"""A client that goes away frees its slot, its pages and its place in the queue."""

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.server.running import LocalServer, local_server, until
from tests.server.scripted import ScriptedBackend

BODY = {"prompt": "abc", "max_tokens": 400, "temperature": 0}


@pytest.fixture
def slow() -> Iterator[LocalServer]:
    """One slot, 20 ms a token."""
    flags = ("--max-num-seqs", "1", "--max-model-len", "512")
    with local_server(*flags, backend=ScriptedBackend(step_seconds=0.02)) as running:
        yield running


def _send(server: LocalServer, body: dict) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(data)}", "", ""))
    connection.sendall(head.encode() + data)
    return connection


def _metric(server: LocalServer, name: str) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"mtp_jax:{name}"))


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(slow: LocalServer, stream: bool) -> None:
    connection = _send(slow, BODY | {"stream": stream, "n": 3})
    until(lambda: _metric(slow, "num_requests_running") == 1 and _metric(slow, "num_requests_waiting") == 2)
    connection.close()
    until(lambda: not slow.engine.has_work(), 3)
    until(lambda: _metric(slow, "kv_cache_usage_perc") == 0 and _metric(slow, "num_requests_running") == 0)
    assert _metric(slow, 'request_success_total{finished_reason="abort"') == 3
    assert slow.process.engine.num_live == 0
    answer = httpx.post(slow.url + "/v1/completions", json=BODY | {"max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "ab"


def test_others_are_untouched(slow: LocalServer) -> None:
    connection = _send(slow, BODY | {"stream": True})
    until(lambda: _metric(slow, "num_requests_running") == 1)
    other = _send(slow, BODY | {"max_tokens": 5})
    until(lambda: _metric(slow, "num_requests_waiting") == 1)
    connection.close()
    answer = b""
    while b"}]" not in answer and (more := other.recv(4096)):
        answer += more
    other.close()
    assert b'"text": "abcab"' in answer
