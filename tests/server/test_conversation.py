"""How messages become a prompt: open ends, results of tools, switches of templates, tools that are allowed.

The scripted server's template writes `<role>content` for each message, and `<assistant>` at the end.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from mtp_jax.server.anthropic_body import MessagesBody
from mtp_jax.server.conversation import OpenEnd, PromptFields, in_order_of_calls
from mtp_jax.server.errors import ApiError
from mtp_jax.server.messages import AllowedTools, ChatMessage, Tool
from mtp_jax.server.turns import Dialect, plan_turn
from tests.server.running import LocalServer, local_server

USER = {"role": "user", "content": "Write."}
PREFILL = {"role": "assistant", "content": "Once "}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time", "news")]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server() as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def prompt(http: httpx.Client, messages: list[dict], **more: object) -> str:
    """What chat makes of messages; /tokenize says the same."""
    body = {"messages": messages, "max_completion_tokens": 1, "return_token_ids": True} | more
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    told = http.post("/tokenize", json={"messages": messages, **more})
    assert told.json()["tokens"] == ids, told.text
    return "".join(map(chr, ids))


def refused(http: httpx.Client, param: str, path: str = "/v1/chat/completions", **body: object) -> str:
    answer = http.post(path, json={"messages": [USER], **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(param)
    return error["message"]


def test_the_last_message_goes_on(http: httpx.Client) -> None:
    assert prompt(http, [USER]) == "<user>Write.<assistant>"
    assert prompt(http, [USER], add_generation_prompt=False) == "<user>Write."
    going_on = prompt(http, [USER, PREFILL], continue_final_message=True)
    assert going_on == "<user>Write.<assistant>Once "  # with its white space
    more: dict[str, object] = {"continue_final_message": True, "add_generation_prompt": False, "tools": TOOLS}
    assert prompt(http, [USER, PREFILL], **more) == "<tool>weather<tool>time<tool>news" + going_on


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, {"role": "assistant", "content": " "}],
        [
            USER,
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [{"id": "1", "function": {"name": "time", "arguments": "{}"}}],
            },
        ],
    ],
)
def test_what_cannot_go_on(http: httpx.Client, messages: list[dict]) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        refused(http, "continue_final_message", path, messages=messages, continue_final_message=True)


def test_one_end_or_the_other(http: httpx.Client) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True, "messages": [USER, PREFILL]}
    refused(http, "continue_final_message", **both)


def test_a_template_that_hides_the_end(http: httpx.Client) -> None:
    """A template that cuts the message off, or shows it twice, leaves no end to go on from."""
    end = OpenEnd([ChatMessage.model_validate(PREFILL)])
    shown = end.messages[-1].text or ""
    assert end.cut(f"<a>{shown}</a>") == "<a>Once "
    for text in ("<a>Once</a>", shown + shown):
        with pytest.raises(ApiError, match="continue_final_message"):
            end.cut(text)


@pytest.mark.parametrize(
    ("said", "text", "reasoning", "content"),
    [
        ("Once", " upon", "", " upon"),
        ("Once", " <think>no</think>", "", " <think>no</think>"),
        ("<think>I am", " here</think>\n\nYes", " here", "Yes"),
        ("<think>I am</think>\n\nNo", " way", "", " way"),
    ],
)
def test_the_rest_of_a_turn(said: str, text: str, reasoning: str, content: str) -> None:
    begun, plan = plan_turn(Dialect(reasoning=True), (), None, None).begin(f"<user>a<assistant>{said}", said)
    assert begun.endswith(said)
    for cuts in (text, [text]):  # character by character, and at once
        turn = plan.turn()
        for piece in cuts:
            turn.push(piece, is_last=False)
        turn.push("", is_last=True)
        assert (turn.reasoning, turn.content) == (reasoning, content)


def result(call: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": "tool", "tool_call_id": call, "content": f"of {call}"})


def calling(*calls: str) -> ChatMessage:
    made = [{"id": call, "function": {"name": "time", "arguments": "{}"}} for call in calls]
    return ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": made})


def test_results_come_in_the_order_of_calls() -> None:
    user = ChatMessage.model_validate(USER)
    first, second = calling("a", "b", "c"), calling("a", "d")
    given = [user, first, result("c"), result("a"), result("b"), second, result("d"), result("a"), user]
    ordered = in_order_of_calls(given)
    wanted = [None, None, "a", "b", "c", None, "a", "d", None]
    assert [message.tool_call_id for message in ordered] == wanted
    assert in_order_of_calls([first, result("b")]) == [first, result("b")]


def test_a_result_of_no_call(http: httpx.Client) -> None:
    lone = result("x").model_dump(exclude_none=True)
    turn = calling("a").model_dump(exclude_none=True)
    assert "'x'" in refused(http, "messages", messages=[USER, lone])
    assert "'a'" in refused(http, "messages", messages=[USER, turn, lone])
    refused(http, "messages", messages=[turn, result("a").model_dump(exclude_none=True), USER, lone])


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "thinking": True}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "depth": "2"}},
            {"enable_thinking": True, "thinking": False, "depth": "2"},
        ),
    ],
)
def test_variables_of_the_template(fields: dict[str, Any], variables: dict[str, object]) -> None:
    effort = {name: fields[name] for name in ("reasoning_effort",) if name in fields}
    expected = {"add_generation_prompt": True, **effort, **variables}
    assert PromptFields.model_validate(fields).template_variables == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("switch", ["thinking", "enable_thinking"])
@pytest.mark.parametrize("value", ["false", "true", 0, []])
def test_a_switch_is_no_text(http: httpx.Client, path: str, switch: str, value: object) -> None:
    """Every template would take the text "false" for true."""
    message = refused(http, "chat_template_kwargs", path, chat_template_kwargs={switch: value})
    assert switch in message and repr(value) in message


def test_unknown_effort(http: httpx.Client) -> None:
    refused(http, "reasoning_effort", reasoning_effort="a lot")


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("mode", "opening"), [("auto", ""), ("required", '<tool_call>\n{"name":')])
def test_some_tools_are_allowed(mode: str, opening: str) -> None:
    choice = AllowedTools.model_validate(allowed(mode, "news", "time"))
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    plan = plan_turn(Dialect(tools="hermes"), tools, choice, None)
    assert [tool["function"]["name"] for tool in plan.tools or ()] == ["time", "news"]  # type: ignore[index]
    assert plan.opening == opening


def test_tools_that_are_not_there(http: httpx.Client) -> None:
    refused(http, "tool_choice", tools=TOOLS, tool_choice=allowed("auto", "time", "stocks"))
    refused(http, "tool_choice", tool_choice=allowed("auto", "time"))
    empty = allowed("auto")
    assert http.post("/v1/chat/completions", json={"messages": [USER], "tools": TOOLS, "tool_choice": empty}
                     ).status_code == 400  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_may_have_usage(http: httpx.Client, path: str) -> None:
    own: dict = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [USER]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = own | {"max_tokens": 7, "n": 2, "stream": True, "stream_options": options}
    lines = http.post(path, json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    seen = {0: [0], 1: [0]}
    for chunk in chunks[:-1]:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
        for choice in chunk["choices"]:
            seen[choice["index"]].append(usage["completion_tokens"])
    for counts in seen.values():
        assert counts == sorted(counts) and counts[-1] == 7 and len(set(counts)) > 2
    assert chunks[-1]["usage"]["completion_tokens"] == 14 and not chunks[-1]["choices"]
    alone = own | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    error = http.post(path, json=alone).json()["error"]
    assert error["param"] == "stream_options.continuous_usage_stats"


def test_responses_say_how_much_to_think(http: httpx.Client) -> None:
    body = {"input": "a", "max_output_tokens": 1, "reasoning": {"effort": "low"}}
    answer = http.post("/v1/responses", json=body | {"chat_template_kwargs": {"thinking": False}})
    assert answer.status_code == 200 and answer.json()["reasoning"] == {"effort": "low", "summary": None}
    wrong = http.post("/v1/responses", json=body | {"chat_template_kwargs": {"thinking": "no"}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "chat_template_kwargs"
    wrong = http.post("/v1/responses", json=body | {"reasoning": {"effort": "lots"}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "reasoning.effort"
    output = [{"type": "function_call_output", "call_id": "x", "output": "y"}]
    wrong = http.post("/v1/responses", json={"input": output})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input"
    tools = [{"type": "function", "name": "time"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "news"}]}
    wrong = http.post("/v1/responses", json={"input": "a", "tools": tools, "tool_choice": choice})
    assert wrong.status_code == 400 and "'news'" in wrong.json()["error"]["message"]


def test_a_prefill_in_anthropics_words(server: LocalServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        messages: Any = [USER, PREFILL]
        count = client.messages.count_tokens(model="default", messages=messages)
        assert count.input_tokens == len("<user>Write.<assistant>Once ")
        answer = client.messages.create(model="default", messages=messages, max_tokens=5)
        cached = answer.usage.cache_read_input_tokens or 0  # by the tests before
        assert answer.usage.input_tokens + cached == count.input_tokens
        used: Any = {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}],
        }
        with pytest.raises(anthropic.BadRequestError, match="text alone"):
            client.messages.create(model="default", messages=[*messages[:1], used], max_tokens=5)


def test_a_tools_error_is_told() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}

    def told(**block: object) -> str | None:
        blocks = [{"type": "tool_result", "tool_use_id": "1", **block}]
        messages = [USER, use, {"role": "user", "content": blocks}]
        body = MessagesBody.model_validate({"max_tokens": 1, "messages": messages})
        return body.as_chat().messages[-1].text

    assert told(content="404") == "404"
    assert told(content="404", is_error=True) == "Error: 404"
    assert told(content="Error 404", is_error=True) == "Error 404"
    assert told(content=[{"type": "text", "text": "no"}], is_error=True) == "Error: no"


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_that_is_repeated(http: httpx.Client, stream: bool) -> None:
    """/v1/responses answers with what it was asked: also what UTF-8 cannot carry."""
    tool = {"type": "function", "name": "time", "description": "\ud800"}
    body = {"input": "a", "metadata": {"a": "\udfff"}, "tools": [tool], "tool_choice": "none"}
    content = json.dumps(body | {"max_output_tokens": 2, "stream": stream})
    answer = http.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
    told = json.loads(last)["response"] if stream else json.loads(last)
    assert told["metadata"] == {"a": "\udfff"} and told["tools"][0]["description"] == "\ud800"
