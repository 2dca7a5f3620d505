"""Anthropic's official client works unchanged; the scripted model says its last message again."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.running import LocalServer, local_server

TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
GREEDY = {"temperature": 0}  # no argument of the client's any more
FLAGS = ("--num-speculative-tokens", "2", "--max-model-len", "2048", "--num-pages", "1024")


class _SaysTheLast:
    """A chat template of one line: the last message's text, behind the others' roles."""

    @staticmethod
    def apply(messages, /, tools=None, add_generation_prompt=True, **variables) -> str:
        seen.append((messages, tools, variables))
        return str(messages[-1]["content"])


seen: list[tuple[Any, Any, Any]] = []


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server(*FLAGS, "--api-key", "secret") as running:
        running.engine.tokenizer.apply_chat_template = _SaysTheLast.apply  # pyright: ignore
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as made:
        yield made


def _say(client: anthropic.Anthropic, text: str, **more: Any) -> Any:
    asked: Any = {"model": "default", "max_tokens": 400, "extra_body": GREEDY} | more
    return client.messages.create(messages=[{"role": "user", "content": text + "!"}], **asked)


def test_text(client: anthropic.Anthropic) -> None:
    answer = _say(client, "Grüezi")
    assert answer.type == "message" and answer.role == "assistant" and answer.model == "scripted"
    assert [(block.type, block.text) for block in answer.content] == [("text", "Grüezi")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == 7
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == 7


def test_limits(client: anthropic.Anthropic) -> None:
    answer = _say(client, "abcdef", max_tokens=3)
    assert answer.content[0].text == "abc" and answer.stop_reason == "max_tokens"
    answer = _say(client, "abcdef", stop_sequences=["xx", "de"])
    assert answer.content[0].text == "abc"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "de")


def test_parts_and_the_way_back(client: anthropic.Anthropic) -> None:
    """Thinking, text and a call; sent back with the result, each reaches the template in its place."""
    answer = _say(client, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", tools=[TOOL])
    thinking, text, call = answer.content
    assert (thinking.thinking, text.text) == ("Hm.", "I look.")
    assert (call.name, call.input) == ("weather", {"city": "Bärn"}) and call.id.startswith("toolu_")
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18 °C!"}]}
    messages: Any = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    again = client.messages.create(
        model="default", max_tokens=20, messages=messages, tools=[TOOL], system=system, extra_body=GREEDY
    )
    assert again.content[0].text == "18 °C"  # pyright: ignore
    told, tools, _ = seen[-1]
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool"]
    assert told[2]["reasoning_content"] == "Hm." and told[2]["content"] == "I look."
    assert told[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bärn"}}
    assert told[3]["tool_call_id"] == call.id == told[2]["tool_calls"][0]["id"]
    assert tools[0]["function"]["parameters"] == TOOL["input_schema"]


@pytest.mark.parametrize(
    "text", ["Hello.", CALL, f"<think>Hm.</think>\nI look.\n{CALL}{CALL}after", "<think>cut", ""]
)
def test_streams_say_the_same(client: anthropic.Anthropic, text: str) -> None:
    whole = _say(client, text, tools=[TOOL])
    asked: Any = {"model": "default", "max_tokens": 400, "extra_body": GREEDY, "tools": [TOOL]}
    with client.messages.stream(messages=[{"role": "user", "content": text + "!"}], **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    unlike = {"id", "signature"}
    blocks = [
        [{k: v for k, v in block.model_dump().items() if k not in unlike} for block in message.content]
        for message in (whole, final)
    ]
    assert blocks[0] == blocks[1]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize(
    ("choice", "text", "called"),
    [
        ({"type": "tool", "name": "weather"}, ' {"city": "Z"}}\n</tool_call>', True),
        ({"type": "any"}, ' "weather", "arguments": {"city": "Z"}}\n</tool_call>', True),
        ({"type": "none"}, CALL, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALL * 2, True),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else None,
)
def test_tool_choice(client: anthropic.Anthropic, choice: Any, text: str, called: bool) -> None:
    answer = _say(client, text, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use" if called else "text"]


def test_thinking_reaches_the_template(client: anthropic.Anthropic) -> None:
    _say(client, "a", thinking={"type": "disabled"})
    assert seen[-1][2] == {"enable_thinking": False, "thinking": False}
    _say(client, "a", thinking={"type": "enabled", "budget_tokens": 1024})
    assert seen[-1][2] == {"enable_thinking": True, "thinking": True}


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="default", messages=[{"role": "user", "content": "abc"}])
    assert counted.input_tokens == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "assistant"),
        ({"tools": [TOOL, TOOL]}, "different names"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "time"}}, "time"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"extra_body": {"container": "x"}}, "container"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_refusals_have_anthropics_shape(client: anthropic.Anthropic, change: dict, words: str) -> None:
    asked: Any = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**(asked | change))
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]


def test_infinity_in_a_call_that_is_sent_back(server: LocalServer) -> None:
    use = '{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1e999}}'
    messages = '[{"role": "assistant", "content": [%s]}, {"role": "user", "content": "x"}]' % use  # noqa: UP031
    text = '{"max_tokens": 4, "messages": %s}' % messages  # noqa: UP031
    headers = {"Content-Type": "application/json", "X-Api-Key": "secret"}
    answer = httpx.post(server.url + "/v1/messages", content=text, headers=headers)
    assert answer.status_code == 400 and "arguments" in answer.text


def test_wrong_key_and_unknown_model(server: LocalServer, client: anthropic.Anthropic) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            _say(stranger, "a")
        assert caught.value.body["error"]["type"] == "authentication_error"  # pyright: ignore
    with pytest.raises(anthropic.NotFoundError):
        _say(client, "a", model="claude")


def test_an_error_in_a_stream(client: anthropic.Anthropic) -> None:
    with (
        local_server(
            "--request-timeout", "0.2", "--max-model-len", "100000", "--num-pages", "9999"
        ) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as other,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        server.engine._step_seconds = 0.02
        asked: Any = {"model": "default", "max_tokens": 5000, "stream": True}
        for _ in other.messages.create(messages=[{"role": "user", "content": "no end"}], **asked):
            pass
    body: Any = caught.value.body
    assert body["error"]["type"] == "timeout_error"
