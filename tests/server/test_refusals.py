"""Bad requests: the right status, OpenAI's shape, and the parameter by name."""

import asyncio
import json
import threading
import time

import httpx
import numpy as np
import openai
import pytest

from mtp_jax.loading import resolve_model
from tests.server.running import LocalServer, local_server

COMPLETION = {"prompt": "ab", "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f"}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL = {"id": "c", "function": {"name": "f", "arguments": "[1]"}}
BAD_CALL_PARAM = "messages[0].tool_calls[0].function.arguments"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def _error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 127}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [0x110000]}, "prompt"),
        ({"prompt": "x" * 128}, "prompt"),
        ({"prompt": ["ab", "x" * 513]}, "prompt"),
        ({"prompt": [[97]] * 1025}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1114112": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 0x110000]}, "allowed_token_ids"),
        ({"banned_token_ids": [-1]}, "banned_token_ids"),
        ({"banned_token_ids": [1, 0x110000]}, "banned_token_ids"),
        ({"banned_token_ids": "5"}, "banned_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"wibble": 1}, "wibble"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_bad_completion(http: httpx.Client, change: dict, param: str) -> None:
    error = _error(http.post("/v1/completions", json=COMPLETION | change), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, BAD_CALL_PARAM),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"messages": [{"role": "user", "content": "x" * 128}]}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [STRICT]}, "tools[0].function.strict"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_bad_chat(http: httpx.Client, change: dict, param: str | None) -> None:
    error = _error(http.post("/v1/chat/completions", json=CHAT | change), 400)
    if param is None:
        assert error["param"].startswith("messages[0].content[0].")
    else:
        assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    "neutral",
    [
        {"logprobs": None, "echo": False, "best_of": 1, "suffix": None, "logit_bias": {}, "min_p": 0.0},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "store": True},
        {"metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "stream_options": None},
    ],
)
def test_values_that_change_nothing_are_accepted(http: httpx.Client, neutral: dict) -> None:
    assert http.post("/v1/completions", json=COMPLETION | neutral).status_code == 200


def test_all_unknown_fields_are_named(http: httpx.Client) -> None:
    error = _error(http.post("/v1/completions", json=COMPLETION | {"wibble": 1, "wobble": 2}), 400)
    assert "wibble" in error["message"] and "wobble" in error["message"]
    assert error["code"] == "unknown_parameter"


def test_missing_prompt(http: httpx.Client) -> None:
    error = _error(http.post("/v1/completions", json={}), 400)
    assert error["param"] == "prompt" and error["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ',
        b"[1]",
        b"null",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "list", "null", "empty", "not UTF-8", "deep", "long number"],
)
def test_bodies_that_are_not_json_objects(http: httpx.Client, body: bytes) -> None:
    _error(http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)


def test_numbers_that_json_does_not_have(http: httpx.Client) -> None:
    body = b'{"prompt": "a", "temperature": NaN}'
    error = _error(
        http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400
    )
    assert error["param"] == "temperature"


def test_half_a_surrogate_pair(http: httpx.Client) -> None:
    for path, body in {
        "/v1/completions": b'{"prompt": "\\ud800"}',
        "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "/tokenize": b'{"prompt": "\\ud800"}',
        "/detokenize": b'{"tokens": [], "\\ud800": 1}',
    }.items():
        _error(http.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


def test_content_type_is_asked_for(http: httpx.Client) -> None:
    error = _error(http.post("/v1/completions", content=json.dumps(COMPLETION)), 400)
    assert error["param"] == "Content-Type"


def test_what_only_the_engine_knows(http: httpx.Client) -> None:
    """A prompt beyond the KV pool; the other prompts of the call are not left running."""
    with local_server("--num-pages", "2", "--max-model-len", "128") as small:
        body = {"prompt": ["ab", "x" * 60], "max_tokens": 4}
        error = _error(httpx.post(small.url + "/v1/completions", json=body), 400)
        assert error["param"] == "prompt"
        assert not small.engine.has_work()
        assert small.process.engine.num_live == 0


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_unknown_path_and_method(http: httpx.Client) -> None:
    _error(http.get("/v1/nothing"), 404)
    _error(http.get("/v1/completions"), 405)


def test_body_limit(http: httpx.Client) -> None:
    big = json.dumps({"prompt": "x" * 200_000}).encode()
    headers = {"Content-Type": "application/json"}
    assert _error(http.post("/v1/completions", content=big, headers=headers), 413)["code"] == "body_too_large"

    def pieces():
        for start in range(0, len(big), 10_000):
            yield big[start : start + 10_000]

    answer = http.post("/v1/completions", content=pieces(), headers=headers)
    assert _error(answer, 413)["code"] == "body_too_large"


def test_text_and_ids_beyond_any_context(http: httpx.Client) -> None:
    """Refused before anybody tokenizes or decodes them: 4 bytes a token, 4 contexts of 128 tokens."""
    assert http.post("/tokenize", json={"prompt": "x" * 512}).json()["count"] == 512
    messages = [{"role": "user", "content": "x" * 600}]
    assert _error(http.post("/tokenize", json={"prompt": "x" * 513}), 400)["param"] == "prompt"
    assert _error(http.post("/tokenize", json={"messages": messages}), 400)["param"] == "messages"
    assert _error(http.post("/v1/chat/completions", json={"messages": messages}), 400)["param"] == "messages"
    assert http.post("/detokenize", json={"tokens": [65] * 512}).json() == {"prompt": "A" * 512}
    error = _error(http.post("/detokenize", json={"tokens": [65] * 513}), 400)
    assert error["param"] == "tokens" and "512" in error["message"]


def test_a_default_length_that_does_not_fit_is_nobody_s_mistake(http: httpx.Client) -> None:
    body = {"prompt": ["x" * 122, "ab"], "temperature": 0}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [len(choice["text"]) for choice in choices] == [6, 16]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]


def test_long_work_leaves_the_event_loop() -> None:
    """All prompts of a call are tokenized at once, off the loop's thread; so is detokenizing."""
    with local_server() as watched:
        tokenizer, calls = watched.engine.tokenizer, []
        for name in ("encode_batch", "decode_batch", "apply_chat_template"):
            original = getattr(tokenizer, name)

            def recorded(*arguments, work=original, name=name, **more):
                on_loop = asyncio._get_running_loop() is not None
                calls.append((name, len(arguments[0]), on_loop))
                return work(*arguments, **more)

            setattr(tokenizer, name, recorded)

        def post(path: str, **body: object) -> list[tuple[str, int, bool]]:
            calls.clear()
            assert httpx.post(watched.url + path, json=body).status_code == 200
            return list(calls)

        many = ["some prompt"] * 256
        assert post("/v1/completions", prompt=many, max_tokens=1) == [("encode_batch", 256, False)]
        assert post("/v1/completions", prompt="short", max_tokens=1) == [("encode_batch", 1, True)]
        messages = [{"role": "user", "content": "x"}] * 60
        chat = [("apply_chat_template", 60, False), ("encode_batch", 1, True)]
        assert post("/v1/chat/completions", messages=messages, max_tokens=1) == chat
        pieces = post("/tokenize", prompt="ab" * 600, return_token_strs=True)
        assert pieces == [("encode_batch", 1, False), ("decode_batch", 1200, False)]
        assert post("/detokenize", tokens=[65] * 2000) == [("decode_batch", 1, False)]


def test_health_answers_while_a_long_text_is_tokenized() -> None:
    with local_server("--max-model-len", "100000", "--num-pages", "8") as busy:
        busy.engine.tokenizer = resolve_model(None).tokenizer()
        words = np.random.default_rng(0).integers(97, 123, 400_000).astype(np.uint8)
        words[::9] = ord(" ")
        body = {"prompt": words.tobytes().decode()}
        answers: list[httpx.Response] = []
        worker = threading.Thread(
            target=lambda: answers.append(httpx.post(busy.url + "/tokenize", json=body, timeout=60))
        )
        worker.start()
        slowest, count = 0.0, 0
        with httpx.Client(base_url=busy.url) as client:
            while worker.is_alive():
                started = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest, count = max(slowest, time.monotonic() - started), count + 1
        assert answers[0].json()["count"] > 100_000
        assert count > 5 and slowest < 0.5, (count, slowest)


def test_a_bug_is_answered_with_the_request_s_id() -> None:
    with local_server() as broken:

        def encode_batch(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
            raise RuntimeError("a bug")

        broken.engine.tokenizer.encode_batch = encode_batch
        headers = {"X-Request-Id": "r-5"}
        answer = httpx.post(broken.url + "/v1/completions", json=COMPLETION, headers=headers)
        assert _error(answer, 500)["code"] == "internal_error"
        assert answer.headers.get_list("x-request-id") == ["r-5"]


def test_api_key() -> None:
    with local_server("--api-key", "sésame") as locked:
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(locked.url + path).status_code == 200
        refused = [{}, {"Authorization": "Bearer x"}, {"Authorization": "Basic sésame".encode()}]
        for headers in refused:
            answer = httpx.get(locked.url + "/v1/models", headers=headers)
            assert _error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer sésame".encode()}
        assert httpx.get(locked.url + "/v1/models", headers=right).status_code == 200
        client = openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong")
        with client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_the_server_is_as_it_was(server: LocalServer) -> None:
    assert server.process.engine.num_live == 0
    assert httpx.get(server.url + "/ready").status_code == 200
