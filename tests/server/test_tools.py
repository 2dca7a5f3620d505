"""Tool calls and reasoning through the official client; the scripted model says its last message again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mtp_jax.server.launch import read_template
from mtp_jax.server.messages import ChatMessage, Tool
from mtp_jax.server.turns import Dialect, plan_turn
from mtp_jax.text import Tokenizer
from mtp_jax.text.from_hf import tokenizer_from_directory
from tests.server.running import LocalServer, local_server

GOLDEN = Path(__file__).parents[1] / "golden"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
RAW = {"chat_template_kwargs": {"raw": True}, "ignore_eos": False}
FLAGS = ("--num-speculative-tokens", "2", "--max-model-len", "2048", "--num-pages", "1024")


@pytest.fixture(scope="module")
def tools() -> Iterator[LocalServer]:
    with local_server(*FLAGS) as running:
        yield running


@pytest.fixture
def client(tools: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tools.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def _say(client: openai.OpenAI, text: str, **more: Any) -> Any:
    """The answer of a model that says `text`."""
    messages: Any = [{"role": "user", "content": text + "!"}]
    more = {"tools": [TOOL, OTHER], "extra_body": RAW, "temperature": 0} | more
    return client.chat.completions.create(model="default", messages=messages, **more)


def _streamed(client: openai.OpenAI, text: str, **more: Any) -> dict[str, Any]:
    """What a stream adds up to."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for chunk in _say(client, text, stream=True, **more):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            assert call.id and call.index == len(message["calls"])
            message["calls"][call.index] = (call.function.name, call.function.arguments)
        message["reason"] = choice.finish_reason
    return message


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("Hello.", "", "Hello.", []),
        (CALL, "", None, ["Bärn"]),
        (f"<think>\nWhere?\n</think>\n\nLet me see.\n{CALL}\n{CALL}", "Where?", "Let me see.", ["Bärn"] * 2),
        ("<tool_call>\nno call\n</tool_call>", "", "<tool_call>\nno call\n</tool_call>", []),
        ("<think>Only that", "Only that", "", []),
    ],
    ids=["text", "call", "all", "malformed", "cut reasoning"],
)
def test_parts(
    client: openai.OpenAI, text: str, reasoning: str, content: str | None, calls: list[str]
) -> None:
    whole = _say(client, text).choices[0]
    assert whole.message.content == content
    assert getattr(whole.message, "reasoning_content", "") == reasoning
    made = whole.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in made] == [{"city": city} for city in calls]
    assert len({call.id for call in made}) == len(made)
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    parts = _streamed(client, text)
    assert (parts["content"], parts["reasoning"]) == (content or "", reasoning)
    assert [call.function.arguments for call in made] == [call[1] for call in parts["calls"].values()]
    assert parts["reason"] == whole.finish_reason


def test_usage_counts_what_the_model_wrote(client: openai.OpenAI) -> None:
    usage = _say(client, CALL).usage
    assert usage.completion_tokens == len(CALL) + 1


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    for more in ({"tools": openai.omit}, {"tools": []}, {"tool_choice": "none"}):
        assert _say(client, CALL, **more).choices[0].message.content == CALL


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    choice = _say(client, CALL + CALL, parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_begins_the_turn(client: openai.OpenAI, stream: bool) -> None:
    """The prompt ends with the beginning of the call; the model goes on from there, and again if it may."""
    text = ' {"city": "Z"}}\n</tool_call>'
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    if stream:
        parts = _streamed(client, text, tool_choice=choice)
        assert parts["calls"] == {0: ("weather", '{"city": "Z"}')} and parts["content"] == ""
        return
    answer = _say(client, text, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Z"}')
    assert answer.choices[0].message.content is None
    opening = '<tool_call>\n{"name": "weather", "arguments":'
    assert answer.usage.prompt_tokens == len(text) + 1 + len(opening)


def test_required(client: openai.OpenAI) -> None:
    answer = _say(client, ' "time", "arguments": {}}\n</tool_call>', tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("time", "{}")


def test_reasoning_that_the_prompt_opened(client: openai.OpenAI) -> None:
    """The prompt ends with <think>, so the answer begins inside of it; a forced call leaves it."""
    messages: Any = [{"role": "user", "content": "so\n</think>\n\nYes.!<think>"}]
    more: Any = {"extra_body": RAW, "temperature": 0}
    message = client.chat.completions.create(model="default", messages=messages, **more).choices[0].message
    assert message.content == "Yes." and getattr(message, "reasoning_content", "") == "so"
    forced: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    messages[0]["content"] = ' {"city": "Z"}}\n</tool_call>!<think>'
    message = client.chat.completions.create(model="default", messages=messages, **forced, **more)
    assert message.choices[0].message.tool_calls[0].function.arguments == '{"city": "Z"}'  # pyright: ignore


def test_a_conversation_with_calls(client: openai.OpenAI) -> None:
    """What was answered is sent back with the result; the template gets all of it, tools first."""
    first = _say(client, CALL).choices[0].message
    messages: Any = [{"role": "user", "content": "weather?"}, first]
    messages += [{"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "18 °C!"}]
    answer = client.chat.completions.create(
        model="default",
        messages=messages,
        tools=[TOOL],
        temperature=0,  # pyright: ignore
    )
    expected = "<tool>weather<user>weather?<assistant>None<tool>18 °C"
    assert answer.choices[0].message.content == expected


def test_half_a_surrogate_pair_in_a_call(client: openai.OpenAI) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>'
    (call,) = _say(client, text).choices[0].message.tool_calls
    assert call.function.arguments == '{"city": "\\ud800"}'
    assert _streamed(client, text)["calls"][0][1] == call.function.arguments


@pytest.mark.parametrize(
    ("parser", "special"),
    [("hermes", "<tool_call>"), ("deepseek_v32", "｜DSML｜")],
    ids=["a mark", "a piece of marks"],
)
def test_special_marks_are_shown_to_the_parser(parser: str, special: str) -> None:
    with local_server(*FLAGS, "--tool-call-parser", parser) as server:
        seen = []
        original = server.engine.add_request
        server.engine.add_request = lambda request: (
            seen.append(request.params.skip_special_tokens),
            original(request),
        )[1]
        body = {"messages": [{"role": "user", "content": "a!"}], "tools": [TOOL]}
        for texts in (frozenset(), frozenset({"<|pad|>"}), frozenset({"<|pad|>", special})):
            server.engine.tokenizer.special_texts = texts
            assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200
        assert seen == [True, True, False]


def test_a_template_gets_a_tool_in_the_order_that_models_know() -> None:
    """Templates print it as it comes: the name first, then what it is for, then its parameters."""
    function = Tool.model_validate(TOOL).as_template_tool()["function"]
    assert list(function.items()) == list(TOOL["function"].items())  # pyright: ignore


@pytest.mark.parametrize("end", ["</think>", "<think>"])
def test_a_call_begins_a_paragraph_where_its_format_wants_one(end: str) -> None:
    plan = plan_turn(Dialect(True, "deepseek_v32"), [Tool.model_validate(TOOL)], "required", None)
    text, _ = plan.begin(f"<｜Assistant｜>{end}")
    opened = "<think></think>" if end == "<think>" else "</think>"
    assert text == f'<｜Assistant｜>{opened}\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="'


def test_parsers_can_be_chosen() -> None:
    flags = ("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "none")
    with (
        local_server(*FLAGS, *flags) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        text = "<function=weather>\n<parameter=city>\nZ\n</parameter>\n</function>"
        (call,) = _say(client, text).choices[0].message.tool_calls
        assert call.function.arguments == '{"city": "Z"}'
        assert _say(client, "<think>a</think>b").choices[0].message.content == "<think>a</think>b"


def test_a_model_without_tools_refuses_them() -> None:
    with local_server(*FLAGS, "--tool-call-parser", "none") as server:
        body = {"messages": [{"role": "user", "content": "a!"}], "tools": [TOOL]}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        body["tool_choice"] = "none"
        assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200


def test_the_operators_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    with local_server(*FLAGS, "--chat-template", str(path)) as server:
        assert server.engine.tokenizer.chat_template == path.read_text()
    tokenizer = tokenizer_from_directory(GOLDEN / "tiny_mimo")
    tokenizer.use_chat_template(read_template(str(path)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "[user] x"


@pytest.mark.parametrize("text", [None, "{% if %}"], ids=["missing", "no template"])
def test_a_bad_template_is_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "bad.jinja"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="--chat-template"):
        read_template(str(path))


ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}],
}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ call.function.arguments | tojson }}", '{"a": "é"}'),
        ("{{ '```json\n' + call.function.arguments + '\n```' }}", '```json\n{"a": "é"}\n```'),
        ("{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=é"),
        ("{% if call.function.arguments is mapping %}{{ call.function.arguments }}{% endif %}", '{"a": "é"}'),
    ],
    ids=["tojson", "as text", "items", "printed"],
)
def test_arguments_suit_templates_of_every_kind(template: str, expected: str) -> None:
    tokenizer: Tokenizer = tokenizer_from_directory(GOLDEN / "tiny_mimo")
    tokenizer.use_chat_template("{% set call = messages[0].tool_calls[0] %}" + template)
    message = ChatMessage.model_validate(ASSISTANT).as_template_message()
    assert tokenizer.apply_chat_template([message]) == expected
