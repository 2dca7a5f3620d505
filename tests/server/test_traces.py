"""Spans reach a collector over HTTP, one tree for each request; without the flag nothing is imported."""

import gzip
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mtp_jax.server.traces import otlp_provider
from tests.server.running import ROOT, local_server, until
from tests.server.scripted import ScriptedBackend

BODY = {"prompt": "ab", "max_tokens": 6, "temperature": 0.5, "top_p": 0.9}


class _Collector(http.server.BaseHTTPRequestHandler):
    received: list

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.received.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list]]:
    spans: list = []
    handler = type("Handler", (_Collector,), {"received": spans})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


def _value(value) -> object:
    return getattr(value, value.WhichOneof("value"))


def test_phases_of_requests(collector: tuple[str, list]) -> None:
    """Two requests for one slot: the second waits; the third is abandoned in the queue."""
    url, spans = collector
    flags = ("--max-num-seqs", "1", "--num-speculative-tokens", "2", "--otlp-traces-endpoint", url)
    with local_server(*flags, backend=ScriptedBackend(step_seconds=0.05)) as server:
        first = threading.Thread(
            target=lambda: httpx.post(server.url + "/v1/completions", json=BODY | {"max_tokens": 90})
        )
        first.start()
        until(lambda: server.engine.stats().num_running == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=BODY | {"prompt": "xyz"}, timeout=0.1)
        assert httpx.post(server.url + "/v1/completions", json=BODY).status_code == 200
        first.join()
    requests = [span for span in spans if span.name == "llm_request"]
    assert len(requests) == 3
    by_tokens = {}
    for span in requests:
        attributes = {item.key: _value(item.value) for item in span.attributes}
        children = [child for child in spans if child.parent_span_id == span.span_id]
        assert all(child.trace_id == span.trace_id for child in children)
        lasted = {
            child.name: (child.end_time_unix_nano - child.start_time_unix_nano) / 1e9 for child in children
        }
        by_tokens[attributes["gen_ai.usage.completion_tokens"]] = (attributes, lasted, span)
    long, short, gone = by_tokens[90], by_tokens[6], by_tokens[0]
    assert set(long[1]) == set(short[1]) == {"queue", "prefill", "decode"} and set(gone[1]) == {"queue"}
    assert short[1]["queue"] > long[1]["queue"]
    # 29 steps of 50 ms follow the first; a step cannot take less.
    assert long[1]["decode"] >= 29 * 0.05 * 0.99
    for attributes, lasted, span in (long, short):
        whole = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert abs(sum(lasted.values()) - whole) < 1e-3  # the phases follow each other
        assert abs(attributes["gen_ai.latency.time_in_queue"] - lasted["queue"]) < 1e-3
        assert attributes["mtp_jax.finish_reason"] == "length"
        assert attributes["gen_ai.request.model"] == "scripted"
        assert attributes["gen_ai.request.top_p"] == 0.9
        assert attributes["mtp_jax.num_accepted_tokens"] == attributes["mtp_jax.num_draft_tokens"] > 0
    assert gone[0]["mtp_jax.finish_reason"] == "abort"


def test_nothing_is_imported_unless_asked_for() -> None:
    script = "import mtp_jax.server.launch, sys; print('opentelemetry.sdk' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr


def test_without_the_extra_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint.*mtp-jax\[otel\]"):
        otlp_provider("http://127.0.0.1:1", "0")


@pytest.mark.parametrize("mode", ["summary", "detailed"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_tells_its_speculation(mode: str, stream: bool) -> None:
    flags = ("--num-speculative-tokens", "2", "--per-request-spec-decode-metrics", mode)
    with local_server(*flags) as server:
        body = {"prompt": "abc", "max_tokens": 7, "temperature": 0, "stream": stream}
        if stream:
            plain = httpx.post(server.url + "/v1/completions", json=body).text.splitlines()
            *chunks, _done = [line.removeprefix("data: ") for line in plain if line]
            assert all(json.loads(chunk)["choices"] for chunk in chunks), "nobody asked for one without"
            body["stream_options"] = {"include_usage": True}
        answer = httpx.post(server.url + "/v1/completions", json=body)
        if stream:
            *_, last, _done = [line for line in answer.text.splitlines() if line]
            told = json.loads(last.removeprefix("data: "))["metrics"]["speculative_decoding"]
        else:
            told = answer.json()["metrics"]["speculative_decoding"]
    rounds = told.pop("per_step_accepted", None)
    assert rounds == ([2, 2, 0] if mode == "detailed" else None)
    assert told["acceptance_histogram"] == [1, 0, 2] and told["num_spec_steps"] == 3
