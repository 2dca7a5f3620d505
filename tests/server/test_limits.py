"""What one client does, however much or slowly it sends or reads, costs it its own request only."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.server.bodies import json_depth
from tests.server.running import LocalServer, local_server, until
from tests.server.scripted import ScriptedBackend

BODY = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
FLAGS = "--max-num-seqs 1 --max-queued-requests 2 --max-header-kib 4 --max-json-depth 6 --client-timeout 0.5"


@pytest.fixture(scope="module")
def small() -> Iterator[LocalServer]:
    """One slot, two places in the queue, half a second of patience; every chunk has 4 KB of a name."""
    name = ("--served-model-name", "x" * 4000)
    with local_server(*FLAGS.split(), *name, "--max-model-len", "100000", "--num-pages", "99999") as running:
        yield running


@pytest.fixture(autouse=True)
def _as_it_was(small: LocalServer) -> Iterator[None]:
    yield
    until(lambda: small.process.engine.num_live == 0 and not small.engine.has_work())
    small.engine._step_seconds = 0.0
    answer = httpx.post(small.url + "/v1/completions", json=BODY)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "abab"


def _error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def _connect(server: LocalServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(10)
    return connection


def _head(length: int, path: str = "/v1/completions") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    while more := connection.recv(65536):
        data += more
    return data


def test_what_is_beyond_the_queue_is_told_to_come_again(small: LocalServer) -> None:
    small.engine._step_seconds = 0.02
    with httpx.stream("POST", small.url + "/v1/completions", json=BODY | {"max_tokens": 500, "stream": True}):
        until(lambda: small.process.engine.num_live == 1)
        answer = httpx.post(small.url + "/v1/completions", json=BODY | {"n": 3})
        error = _error(answer, 429)
        assert error["type"] == "rate_limit_error" and error["code"] == "server_overloaded"
        assert int(answer.headers["retry-after"]) > 0
    never = httpx.post(small.url + "/v1/completions", json=BODY | {"n": 4})
    assert _error(never, 400)["param"] == "n"  # not even an idle server has so many places


def test_calls_are_counted_from_the_moment_they_begin(small: LocalServer) -> None:
    """Three calls whose bodies are still on their way fill the server; health does not care."""
    waiting = [_connect(small) for _ in range(3)]
    for connection in waiting:
        connection.sendall(_head(10))
    until(lambda: httpx.get(small.url + "/v1/models").status_code == 429, 0.45)
    assert httpx.get(small.url + "/health").status_code == 200
    for connection in waiting:
        connection.close()
    until(lambda: httpx.get(small.url + "/v1/models").status_code == 200)


def test_a_body_that_does_not_come(small: LocalServer) -> None:
    with _connect(small) as connection:
        connection.sendall(_head(10) + b'{"')
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer


@pytest.mark.parametrize("start", [b"", b"POST /v1/completions HT"], ids=["nothing", "half a line"])
def test_a_head_that_does_not_come(small: LocalServer, start: bytes) -> None:
    with _connect(small) as connection:
        connection.sendall(start)
        assert _read_all(connection) == b""  # closed


def test_half_a_second_request(small: LocalServer) -> None:
    body = json.dumps(BODY).encode()
    with _connect(small) as connection:
        connection.sendall(_head(len(body)) + body)
        time.sleep(0.2)
        connection.sendall(b"POST /v1/comp")
        started = time.monotonic()
        assert _read_all(connection).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - started < 4  # uvicorn's own timer, for idle connections, takes 5


def test_header_limit(small: LocalServer) -> None:
    for size in (5_000, 300_000):  # read in one piece; longer than any piece
        with _connect(small) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: ")
            try:
                connection.sendall(b"x" * size + b"\r\nConnection: close\r\n\r\n")
                answer = _read_all(connection)
            except ConnectionError:  # it was closed while we still sent
                assert size == 300_000
                continue
        assert answer.startswith(b"HTTP/1.1 431"), answer[:80]
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "header_too_large"


def test_what_is_no_http_gets_the_usual_shape(small: LocalServer) -> None:
    with _connect(small) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]


def test_nesting_limit(small: LocalServer) -> None:
    headers = {"Content-Type": "application/json"}
    for depth, status in ((6, 400), (7, 400), (50_000, 400)):
        nested = b'{"prompt": "a", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
        answer = httpx.post(small.url + "/v1/completions", content=nested, headers=headers)
        code = _error(answer, status)["code"]
        assert code == ("unknown_parameter" if depth <= 6 else "json_too_deep")
    quoted = {"prompt": "[{" * 50, "max_tokens": 1}
    assert httpx.post(small.url + "/v1/completions", json=quoted).status_code == 200


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


_JSON = st.recursive(
    st.none() | st.text(st.sampled_from('[]{}"\\a\u20ac'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.sampled_from('[{"\\')), inner, max_size=3)
    ),
)


@given(_JSON)
def test_depth_is_that_of_the_value(value: object) -> None:
    assert json_depth(json.dumps(value, ensure_ascii=False).encode()) == _depth(value)


def test_a_client_that_stops_reading_is_let_go_and_others_go_on(small: LocalServer) -> None:
    """Its answer fills every buffer on the way; after the client's patience it is aborted."""
    body = json.dumps(BODY | {"max_tokens": 90_000, "stream": True}).encode()
    with _connect(small) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(_head(len(body)) + body)
        until(lambda: small.engine.stats().num_running == 1)
        answers: list[int] = []
        other = threading.Thread(
            target=lambda: answers.append(
                httpx.post(small.url + "/v1/completions", json=BODY, timeout=30).status_code
            )
        )
        other.start()
        until(lambda: small.process.engine.num_live <= 1, 20)  # the one slot is free for the other
        other.join(20)
        assert answers == [200]
    text = httpx.get(small.url + "/metrics").text
    aborted = next(line for line in text.splitlines() if 'finished_reason="abort"' in line)
    assert float(aborted.split()[-1]) >= 1


def test_unread_outputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patient server still does not keep more than so many outputs for a reader; the end is explicit."""
    monkeypatch.setattr("mtp_jax.server.async_engine.MAX_UNREAD", 5)
    with local_server(backend=ScriptedBackend()) as server:
        engine = server.process.engine
        original = engine._deliver

        def burst(outputs, now):  # the loop is busy elsewhere, and then gets many steps at once
            kept.extend(outputs)
            if len(kept) >= 20:
                for output in kept:
                    original([output], now)
                kept.clear()

        kept: list = []
        engine._deliver = burst
        body = BODY | {"max_tokens": 40, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and "client_too_slow" in lines[-2]
        assert len(lines) == 6 + 2
        assert engine.num_live == 0
        until(lambda: not server.engine.has_work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_s_time_is_limited(stream: bool) -> None:
    with local_server("--request-timeout", "0.3", backend=ScriptedBackend(step_seconds=0.02)) as server:
        body = BODY | {"max_tokens": 500, "stream": stream}
        answer = httpx.post(server.url + "/v1/completions", json=body)
        if stream:
            lines = [line for line in answer.text.splitlines() if line]
            assert len(lines) > 4 and lines[-1] == "data: [DONE]"
            error = json.loads(lines[-2].removeprefix("data: "))["error"]
        else:
            error = _error(answer, 408)
        assert error["code"] == "request_timeout" and "0.3" in error["message"]
        until(lambda: not server.engine.has_work())
        assert httpx.post(server.url + "/v1/completions", json=BODY).status_code == 200


def test_cors() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    flags = ("--allowed-origins", "https://a.example, http://localhost:3000", "--api-key", "k")
    with local_server(*flags) as server:
        preflight = httpx.options(server.url + "/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        other = httpx.options(server.url + "/v1/completions", headers=asked | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = httpx.get(server.url + "/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401  # and a page may read why
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_without_the_flag_no_page_may_call(small: LocalServer) -> None:
    answer = httpx.get(small.url + "/v1/models", headers={"Origin": "https://a.example"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_key_in_anthropics_header() -> None:
    with local_server("--api-key", "secret") as locked:
        for key, status in (("secret", 200), ("secreT", 401), ("secret2", 401), ("", 401)):
            answer = httpx.get(locked.url + "/v1/models", headers={"X-Api-Key": key})
            assert answer.status_code == status
        both = {"X-Api-Key": "secret", "Authorization": "Bearer wrong"}
        assert httpx.get(locked.url + "/v1/models", headers=both).status_code == 401
