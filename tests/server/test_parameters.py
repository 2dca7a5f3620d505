"""Every parameter over HTTP: speculation changes no byte of an answer, streamed or not."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.progress import Report
from mtp_jax.server.arguments import ServeOptions
from tests.parity.scripted_model import PIECES, chain, table
from tests.parity.test_scripted import engine_of
from tests.server.running import local_server

LOGPROB_ERROR = 2e-4  # as in tests/parity/test_scripted.py
PROMPT = " one two three"
FULL = {"logprobs": 3, "echo": True, "return_token_ids": True, "prompt_logprobs": 2}
COMPLETIONS: dict[str, dict] = {
    "plain": {},
    "everything": FULL,
    "stop": {"stop": ["x se", "nine"], "logprobs": 0},
    "kept stop": {"stop": ["x se"], "include_stop_str_in_output": True, "logprobs": 1},
    "stop token": {"stop_token_ids": [chain("count")[8]], "return_token_ids": True},
    "end": {"prompt": " the end", "logprobs": 2},
    "min_tokens": {"prompt": " the end", "min_tokens": 5, "logprobs": 2},
    "penalties": {
        "prompt": " red",
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "masks": {"allowed_token_ids": [3, 4, 5], "logit_bias": {"4": 2, "9": 100}, "bad_words": ["one"]},
    "banned": {"prompt": " red", "banned_token_ids": [chain("loop")[1], 4], "logprobs": 2},
    "characters": {"prompt": [chain("bytes")[:1]], "max_tokens": 11, "logprobs": 1, "echo": True},
    "sampled": {"temperature": 0.8, "seed": 3, "n": 3, "min_p": 0.05, "logprobs": 1},
    "ids": {"prompt": [[3, 4], [5]], "n": 2, "temperature": 1.0, "seed": 1, "echo": True},
    "best_of": {"best_of": 6, "n": 2, "temperature": 1.5, "seed": 5, "return_token_ids": True},
    "best_of, logprobs": {"best_of": 3, "n": 1, "temperature": 1.5, "seed": 5, "logprobs": 2},
    "few drafts": {"num_speculative_tokens": 0, "logprobs": 2},
}
CHATS: dict[str, dict] = {
    "plain": {},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 4, "return_token_ids": True},
    "sampled": {"temperature": 1.2, "seed": 4, "n": 2, "logprobs": True, "top_logprobs": 1},
    "prompt": {"prompt_logprobs": 1},
}
NOT_STREAMED = ("prompt_logprobs", "best_of")


class ScriptedModelBackend:
    """The real engine over the scripted model."""

    def __init__(self, k: int, head: str):
        self.engine = engine_of(1, k, head)

    def describe(self, options: ServeOptions) -> str:
        return "scripted model"

    def build(self, options: ServeOptions, report: Report) -> Engine:
        return self.engine


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, httpx.Client]]:
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, k, head in (("plain", 0, "good"), ("alternate", 3, "alternate"), ("good", 3, "good")):
            running = stack.enter_context(local_server(backend=ScriptedModelBackend(k, head)))  # type: ignore[arg-type]
            clients[name] = stack.enter_context(httpx.Client(base_url=running.url, timeout=60))
        yield clients


def post(client: httpx.Client, path: str, body: dict) -> dict:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: httpx.Client, path: str, body: dict) -> list[dict]:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def rounded(value: Any) -> Any:
    """Floats may differ in their last digits: two programs add in different orders."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return pytest.approx(value, abs=LOGPROB_ERROR) if isinstance(value, float) else value


def joined(chunks: list[dict], index: int, kind: str) -> dict:
    """One choice of a stream, put together again."""
    made: dict = {"text": "", "token_ids": [], "logprobs": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in (c for c in chunk["choices"] if c["index"] == index):
            made["text"] += choice["text"] if kind == "completion" else choice["delta"].get("content") or ""
            made["token_ids"] += choice.get("token_ids", [])
            for name, values in (choice["logprobs"] or {}).items():
                made["logprobs"].setdefault(name, []).extend(values or [])
            made["finish_reason"] = choice["finish_reason"] or made["finish_reason"]
    return made


def check_stream(client: httpx.Client, path: str, body: dict, whole: dict, kind: str) -> None:
    chunks = streamed(client, path, body)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        got = joined(chunks, choice["index"], kind)
        text = choice["text"] if kind == "completion" else choice["message"]["content"]
        assert got["text"] == text
        assert got["token_ids"] == choice.get("token_ids", [])
        assert got["finish_reason"] == choice["finish_reason"]
        logprobs = {name: values or [] for name, values in (choice["logprobs"] or {}).items()}
        assert got["logprobs"] == rounded(logprobs)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(servers: dict[str, httpx.Client], name: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | COMPLETIONS[name]
    plain = post(servers["plain"], "/v1/completions", body)
    for server in servers.values():
        assert same(post(server, "/v1/completions", body)) == rounded(same(plain))
        streaming = {key: value for key, value in body.items() if key not in NOT_STREAMED}
        if body.get("best_of", 1) == 1:
            check_stream(server, "/v1/completions", streaming, plain, "completion")


def same(answer: dict) -> dict:
    """What two answers to one request have in common."""
    return {k: v for k, v in answer.items() if k not in ("id", "created", "system_fingerprint")}


@pytest.mark.parametrize("name", CHATS)
def test_chats(servers: dict[str, httpx.Client], name: str) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0} | CHATS[name]
    plain = post(servers["plain"], "/v1/chat/completions", body)
    for server in servers.values():
        assert same(post(server, "/v1/chat/completions", body)) == rounded(same(plain))
        streaming = {key: value for key, value in body.items() if key not in NOT_STREAMED}
        check_stream(server, "/v1/chat/completions", streaming, plain, "chat")


# What the answers say


def log_softmax(token: int) -> np.ndarray:
    row = table()[token].astype(np.float64)
    return row - np.log(np.exp(row).sum())


def test_echo(servers: dict[str, httpx.Client]) -> None:
    """The prompt's tokens and the completion's in one list, with offsets into the text that is answered."""
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0} | FULL
    (choice,) = post(servers["alternate"], "/v1/completions", body)["choices"]
    count, logprobs = chain("count"), choice["logprobs"]
    assert choice["text"] == " one two three four five six"
    assert choice["prompt_token_ids"] == count[:3] and choice["token_ids"] == count[3:6]
    assert logprobs["tokens"] == [" one", " two", " three", " four", " five", " six"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [
        choice["text"][at:].startswith(token)
        for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == [True] * 6
    wanted = [log_softmax(before)[token] for before, token in itertools.pairwise(count[:6])]
    assert logprobs["token_logprobs"] == [None, *(pytest.approx(p, abs=LOGPROB_ERROR) for p in wanted)]
    assert logprobs["top_logprobs"][0] is None and all(len(top) == 3 for top in logprobs["top_logprobs"][1:])
    assert choice["prompt_logprobs"][0] is None
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [2, 2]
    assert choice["prompt_logprobs"][1][str(count[1])]["decoded_token"] == " two"


def test_bytes_of_a_character(servers: dict[str, httpx.Client]) -> None:
    body = {"prompt": [chain("bytes")[:1]], "max_tokens": 3, "temperature": 0, "logprobs": 0}
    (choice,) = post(servers["good"], "/v1/completions", body)["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe2"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


def test_best_of_answers_the_likeliest(servers: dict[str, httpx.Client]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 2.0, "seed": 11, "logprobs": 0}
    every = post(servers["plain"], "/v1/completions", body | {"n": 8})
    means = [np.mean(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]]
    best = post(servers["alternate"], "/v1/completions", body | {"n": 2, "best_of": 8})
    ranked = [every["choices"][i]["text"] for i in np.argsort(means)[::-1][:2]]
    assert [choice["text"] for choice in best["choices"]] == ranked
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"] == every["usage"]


def test_masks_that_leave_nothing(servers: dict[str, httpx.Client]) -> None:
    """Only the engine knows; the request is refused, and the others go on."""
    word = PIECES[5].decode()
    nothing = (
        {"bad_words": [word.strip()]},
        {"banned_token_ids": [4, 5]},
        {"min_tokens": 2, "stop_token_ids": [5]},
    )
    for more in nothing:
        body = {"prompt": PROMPT, "max_tokens": 4, "allowed_token_ids": [5], "temperature": 0} | more
        answer = servers["good"].post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "allowed_token_ids"
    answer = servers["good"].post("/v1/completions", json={"prompt": PROMPT, "bad_words": [" one" * 17]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "bad_words"
