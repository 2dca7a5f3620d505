"""/v1/responses through the official client; the scripted model says its last message again."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.running import LocalServer, local_server
from tests.server.scripted import ScriptedBackend

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
FLAGS = ("--num-speculative-tokens", "2", "--max-model-len", "2048", "--num-pages", "1024")
seen: list[Any] = []


def _last(messages, /, tools=None, add_generation_prompt=True, **variables) -> str:
    seen.append((messages, tools))
    return str(messages[-1]["content"])


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server(*FLAGS) as running:
        running.engine.tokenizer.apply_chat_template = _last  # pyright: ignore
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def _say(client: openai.OpenAI, says: str, /, **more: Any) -> Any:
    return client.responses.create(**({"model": "default", "input": says + "!", "temperature": 0} | more))


def test_text(client: openai.OpenAI) -> None:
    answer = _say(client, "Grüezi", instructions="Be brief.", metadata={"a": "b"})
    assert answer.output_text == "Grüezi" and answer.status == "completed" and answer.object == "response"
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 7, 14)
    assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"}
    assert [message["role"] for message in seen[-1][0]] == ["system", "user"]


def test_cut_off(client: openai.OpenAI) -> None:
    answer = _say(client, "abcdef", max_output_tokens=3)
    assert answer.output_text == "abc" and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"


def test_parts_and_the_way_back(client: openai.OpenAI) -> None:
    answer = _say(client, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", tools=[TOOL])
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == "Hm." and message.content[0].text == "I look."
    assert call.name == "weather" and json.loads(call.arguments) == {"city": "Bärn"}
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C!"}
    items = [{"role": "user", "content": "weather?"}, *answer.output, result]
    again = _say(client, "", input=items, tools=[TOOL])
    assert again.output_text == "18 °C"
    told, tools = seen[-1]
    assert [item["role"] for item in told] == ["user", "assistant", "tool"]
    assert told[1]["content"] == "I look." and told[1]["reasoning_content"] == "Hm."
    assert told[1]["tool_calls"][0]["id"] == told[2]["tool_call_id"] == call.call_id
    assert tools[0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    "text", ["Hello.", CALL, f"<think>Hm.</think>\nI look.\n{CALL}{CALL}after", "<think>cut", ""]
)
def test_streams_say_the_same(client: openai.OpenAI, text: str) -> None:
    """The client's own accumulator puts the items together from the events."""
    whole = _say(client, text, tools=[TOOL])
    with client.responses.stream(model="default", input=text + "!", temperature=0, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers) and events[0].type == "response.created"
    assert events[-1].type == "response.completed"

    def plain(response: Any) -> list[Any]:
        out = []
        for item in response.output:
            parts = [part.text for part in getattr(item, "content", None) or ()]
            out.append((item.type, item.status, parts, getattr(item, "arguments", None)))
        return out

    assert plain(final) == plain(whole)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in final.output]
    assert final.usage.output_tokens == whole.usage.output_tokens  # pyright: ignore


@pytest.mark.parametrize(
    ("choice", "text", "kind"),
    [
        ({"type": "function", "name": "weather"}, ' {"city": "Z"}}\n</tool_call>', "function_call"),
        ("required", ' "weather", "arguments": {"city": "Z"}}\n</tool_call>', "function_call"),
        ("none", CALL, "message"),
    ],
    ids=["named", "required", "none"],
)
def test_tool_choice(client: openai.OpenAI, choice: Any, text: str, kind: str) -> None:
    answer = _say(client, text, tools=[TOOL], tool_choice=choice)
    assert [item.type for item in answer.output] == [kind]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"temperature": 101}, "temperature"),
        ({"max_output_tokens": 0}, "max"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_refusals(client: openai.OpenAI, change: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _say(client, "x", **change)
    assert (caught.value.param or "").startswith(param)


def test_an_error_in_a_stream() -> None:
    flags = ("--request-timeout", "0.2", "--max-model-len", "100000", "--num-pages", "9999")
    with (
        local_server(*flags, backend=ScriptedBackend(step_seconds=0.02)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        server.engine.tokenizer.apply_chat_template = _last  # pyright: ignore
        stream = _say(client, "", input="no end", stream=True)
        *_, last = list(stream)
    assert last.type == "response.failed" and last.response.error.code == "request_timeout"
    assert last.response.output[0].content[0].text
