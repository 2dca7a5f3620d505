"""End to end over the real engine: a tiny random checkpoint with an MTP module, and the real command."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.http_soak import log_errors, soak, started_server
from tests.server.running import ROOT

MODEL = ROOT / "tests" / "golden" / "tiny_mimo"
FLAGS = f"--model {MODEL} --served-model-name tiny --num-speculative-tokens 2 --max-num-seqs 4 --num-pages 48"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "stderr"


@pytest.fixture(scope="module")
def url(log: Path) -> Iterator[str]:
    with started_server(FLAGS.split(), log) as (address, _):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_soak(url: str, log: Path) -> None:
    report = soak(url, count=60)
    assert report.failures == () and report.acceptance_rate is not None
    assert log_errors(log.read_text()) == []


def test_start_up_says_what_runs(url: str, log: Path) -> None:
    text = log.read_text()
    for part in (
        "mesh",
        "memory",
        "reading",
        "placing",
        "compiling",
        f"ready: tiny on {url}",
        "compile cache",
    ):
        assert part in text
    line = next(line for line in text.splitlines() if line.startswith("curl "))
    answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert json.loads(answer.stdout)["object"] == "chat.completion"


def test_drafts_do_not_change_greedy_text(client: openai.OpenAI) -> None:
    texts = set()
    for drafts in (0, 1, 2):
        answer = client.completions.create(
            model="tiny",
            prompt=list(range(3, 40)),
            max_tokens=24,
            temperature=0,
            extra_body={"num_speculative_tokens": drafts, "ignore_eos": True, "include_metrics": True},
        )
        texts.add(answer.choices[0].text)
        assert answer.usage is not None and answer.usage.completion_tokens == 24
        stats = answer.model_dump()["metrics"]["speculative_decoding"]
        assert (stats["num_draft_tokens"] > 0) == (drafts > 0)
    assert len(texts) == 1


def test_a_stream_is_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    arguments: dict = {"model": "tiny", "prompt": "stone", "max_tokens": 24, "seed": 5, "n": 2}
    whole = client.completions.create(**arguments)
    texts = ["", ""]
    for chunk in client.completions.create(stream=True, **arguments):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and texts[0] != texts[1]


def test_a_second_prompt_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    cached = []
    for _ in range(2):
        usage = client.completions.create(model="tiny", prompt=[7] * 70, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 64]


def test_a_request_beyond_the_context_is_refused(url: str) -> None:
    answer = httpx.post(url + "/v1/completions", json={"prompt": [7] * 120, "max_tokens": 9})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


def test_check_and_bad_models(tmp_path: Path) -> None:
    def serve(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mtp_jax.serve", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    checked = serve("--check", *FLAGS.split(), "--stages", "3")
    assert checked.returncode == 0
    assert "stage 3 x data 1 x tensor 1" in checked.stdout and "memory" in checked.stdout
    (tmp_path / "empty").mkdir()
    (tmp_path / "not.gguf").write_bytes(b"nonsense")
    refused = {
        "/nowhere": "--model",
        str(tmp_path / "empty"): "config.json",
        str(tmp_path / "not.gguf"): "not.gguf",
    }
    for model, part in refused.items():
        done = serve("--model", model, "--port", "0")
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and part in done.stderr
    done = serve("--check", *FLAGS.split(), "--max-model-len", "100000")
    assert done.returncode == 2 and "--max-model-len" in done.stderr and done.stderr.count("\n") == 1


def test_sigterm_drains(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with started_server(FLAGS.split(), log) as (address, process):
        body = {"prompt": [9] * 20, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", address + "/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        process.wait(60)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert process.returncode == 0 and "stopped" in log.read_text()
