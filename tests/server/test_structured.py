"""Structured output over HTTP: every route, streamed or not; a bad grammar is its request's alone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.progress import Report
from mtp_jax.server.arguments import ServeOptions
from tests.parity.json_engine import json_engine
from tests.parity.rig import renew
from tests.parity.scripted_model import do_everything
from tests.server.running import local_server

WORD = {"type": "string", "maxLength": 6}
AGE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {"name": WORD, "age": AGE},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
BASE = {"max_tokens": 60, "temperature": 1, "seed": 3}
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("meet", "part")
]
NAME_OF_TOOL = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}" + NAME_OF_TOOL + "<think>"


class JsonBackend:
    """The real engine over the small random model."""

    def __init__(self) -> None:
        self.engine = do_everything(renew(json_engine(3)))

    def describe(self, options: ServeOptions) -> str:
        return "random model"

    def build(self, options: ServeOptions, report: Report) -> Engine:
        return self.engine


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with local_server(*flags, backend=JsonBackend()) as running:  # type: ignore[arg-type]
        yield running.url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


def check_person(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 99


def completion(http: httpx.Client, **more: object) -> str:
    answer = http.post("/v1/completions", json=BASE | {"prompt": "abc"} | more)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"]


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[0-9]{3}-[ab]+c"}, "[0-9]{3}-[ab]+c"),
        ({"choice": ["yes", "no", "(maybe)"]}, r"yes|no|\(maybe\)"),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, "a[bc]d"),
        ({"json": {"enum": [1, "two"]}}, '1|"two"'),
        ({"json": '{"const": true}'}, "true"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_structured_outputs(http: httpx.Client, asked: dict, pattern: str) -> None:
    for temperature in (0, 1):
        more = {"temperature": temperature, "presence_penalty": 1, "frequency_penalty": 1}
        text = completion(http, structured_outputs=asked, **more)
        assert re.fullmatch(pattern, text), text


def test_response_format(http: httpx.Client) -> None:
    check_person(completion(http, response_format=FORMAT))
    body = BASE | {"prompt": "abc", "response_format": FORMAT, "n": 3}
    texts = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
    assert len(set(texts)) > 1
    for text in texts:
        check_person(text)


def test_a_chat_streams_what_it_answers(url: str) -> None:
    """Reasoning, which the template would begin, is skipped."""
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        more: dict = {"model": "default", "messages": MESSAGES, "response_format": FORMAT, **BASE}
        whole = client.chat.completions.create(**more).choices[0].message
        assert whole.content is not None and "reasoning_content" not in whole.model_dump()
        check_person(whole.content)
        chunks = client.chat.completions.create(stream=True, **more)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.content
        made = client.responses.create(
            model="default",
            input="hi",
            temperature=1,
            max_output_tokens=60,
            text={"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}},
        )
        check_person(made.output_text)


def test_messages(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        made = client.messages.create(
            model="default", max_tokens=60, messages=MESSAGES, extra_body={"output_config": form}
        )
        (block,) = made.content
        assert block.type == "text"
        check_person(block.text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "part"}}], ids=str)
def test_strict_calls(http: httpx.Client, choice: object) -> None:
    body = BASE | {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "n": 3}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    for told in answer.json()["choices"]:
        (call,) = told["message"]["tool_calls"]
        assert told["finish_reason"] == "tool_calls" and told["message"]["content"] is None
        assert call["function"]["name"] in (("meet", "part") if choice == "required" else ("part",))
        check_person(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a\ud800"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "no JSON"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
            "response_format",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grammar_that_is_none_is_refused(http: httpx.Client, change: dict, param: str) -> None:
    content = json.dumps(BASE | {"prompt": "abc"} | change).encode()
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_strict_needs_a_call(http: httpx.Client) -> None:
    """Where the model may answer in words as well, nothing holds it to a schema."""
    for choice, change, param in (
        ("auto", {}, "tools[0].function.strict"),
        ("required", {"response_format": FORMAT}, "tool_choice"),
    ):
        body = BASE | {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice} | change
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_echo_of_the_prompt_alone(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    before = http.get("/metrics").text
    answer = http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["token_logprobs"][2] < 0
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 3
    assert counted(http.get("/metrics").text, "prompt_tokens") == counted(before, "prompt_tokens") + 3
    assert counted(http.get("/metrics").text, "generation_tokens") == counted(before, "generation_tokens")
    longer = http.post("/v1/completions", json=body | {"max_tokens": 2}).json()["choices"][0]
    assert longer["logprobs"]["token_logprobs"][1:3] == pytest.approx(
        choice["logprobs"]["token_logprobs"][1:], abs=2e-4
    )
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as told:
        events = [line.removeprefix("data: ") for line in told.iter_lines() if line]
    (chunk,) = map(json.loads, events[:-1])
    assert chunk["choices"][0]["text"] == "abc" and chunk["choices"][0]["finish_reason"] == "length"


def counted(metrics: str, name: str) -> float:
    found = re.search(rf"^mtp_jax:{name}_total\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])
