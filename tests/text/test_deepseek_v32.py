"""The prompt format of DeepSeek-V3.2, which its publisher gives as a program: written out by hand here."""

import json
import shutil
from pathlib import Path

import pytest

from mtp_jax.errors import InvalidRequestError
from mtp_jax.text import Tokenizer, from_hf
from mtp_jax.text.from_hf import tokenizer_from_directory
from mtp_jax.text.turn.choose import reasoning_parser, tool_call_parser

CHECKPOINT = Path(__file__).parents[1] / "golden" / "tiny_deepseek_v32"
BOS, EOS, USER, REPLY = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"was": {"type": "string"}}}},
}
# Paragraphs are apart by an empty line each, as in the outputs that are published beside the program.
ABOUT_TOOLS = """

## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

"""  # noqa: E501 - the model's own lines
FUNCTIONS = (
    "Here are the functions available in JSONSchema format:\n<functions>\n"
    '{"name": "find", "parameters": {"type": "object", "properties": {"was": {"type": "string"}}}}\n'
    "</functions>\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat template, as it is published."""
    folder = tmp_path_factory.mktemp("published")
    shutil.copy(CHECKPOINT / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_from_directory(folder, "deepseek_v32")


def message(role: str, content: str | None, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


TALK = [
    message("system", "Be brief."),
    message("user", "one?"),
    message("assistant", "1", reasoning_content="It is one."),
    message("user", "two?"),
]
CALLS = [
    message("user", "where?"),
    message(
        "assistant",
        "Let me look.",
        reasoning_content="Look.",
        tool_calls=[call("find", was='a "b"', n=2, all=[1, "é"]), call("find")],
    ),
    message("tool", "here", tool_call_id="find"),
    message("tool", "there", tool_call_id="find"),
]
CALLS_TEXT = (
    "Let me look.\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="find">\n'
    '<｜DSML｜parameter name="was" string="true">a "b"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="all" string="false">[1, "é"]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="find">\n\n</｜DSML｜invoke>\n'
    f"</｜DSML｜function_calls>{EOS}"
    "\n\n<function_results>\n<result>here</result>\n<result>there</result>\n</function_results>"
)


@pytest.mark.parametrize(
    ("messages", "variables", "text"),
    [
        (TALK[:2], {}, f"{BOS}Be brief.{USER}one?{REPLY}</think>"),
        (TALK[:2], {"thinking": True}, f"{BOS}Be brief.{USER}one?{REPLY}<think>"),
        (TALK[:2], {"enable_thinking": True}, f"{BOS}Be brief.{USER}one?{REPLY}<think>"),
        (TALK[:2], {"add_generation_prompt": False}, f"{BOS}Be brief.{USER}one?"),
        (TALK, {}, f"{BOS}Be brief.{USER}one?{REPLY}</think>1{EOS}{USER}two?{REPLY}</think>"),
        # What was thought before the last question is left out, and its turn opens as if nobody had thought.
        (TALK, {"thinking": True}, f"{BOS}Be brief.{USER}one?{REPLY}</think>1{EOS}{USER}two?{REPLY}<think>"),
        (
            TALK[:3],
            {"thinking": True, "add_generation_prompt": False},
            f"{BOS}Be brief.{USER}one?{REPLY}<think>It is one.</think>1{EOS}",
        ),
        (CALLS, {}, f"{BOS}{USER}where?{REPLY}</think>{CALLS_TEXT}\n\n</think>"),
        (
            CALLS,
            {"thinking": True},
            f"{BOS}{USER}where?{REPLY}<think>Look.</think>{CALLS_TEXT}\n\n<think>",
        ),
        (
            [*CALLS, message("assistant", "There."), message("user", "sure?")],
            {"thinking": True},
            f"{BOS}{USER}where?{REPLY}</think>{CALLS_TEXT}\n\n</think>There.{EOS}{USER}sure?{REPLY}<think>",
        ),
    ],
)
def test_prompts(
    tokenizer: Tokenizer, messages: list[dict[str, object]], variables: dict[str, bool], text: str
) -> None:
    assert tokenizer.apply_chat_template(messages, **variables) == text  # pyright: ignore


@pytest.mark.parametrize("system", [True, False])
def test_tools(tokenizer: Tokenizer, system: bool) -> None:
    """They are told of behind the system's message, or before everything where there is none."""
    text = tokenizer.apply_chat_template(TALK[0:2] if system else TALK[1:2], tools=[TOOL, TOOL])
    before = BOS + ("Be brief." if system else "")
    functions = FUNCTIONS.replace("\n</functions>", f"\n{json.dumps(TOOL['function'])}\n</functions>")
    assert text == f"{before}{ABOUT_TOOLS}{functions}{USER}one?{REPLY}</think>"


@pytest.mark.parametrize(
    "messages",
    [CALLS[:3], [CALLS[0], CALLS[2]], [*CALLS, CALLS[3]], [message("critic", "no")]],
    ids=["too few results", "no call", "too many results", "role"],
)
def test_what_cannot_be_written_is_refused(tokenizer: Tokenizer, messages: list[dict[str, object]]) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        tokenizer.apply_chat_template(messages)


def test_its_parsers_follow(tokenizer: Tokenizer, folder: Path) -> None:
    template = tokenizer.chat_template
    assert reasoning_parser("deepseek_v32", template) == "think"
    assert tool_call_parser("deepseek_v32", template) == "deepseek_v32"
    for name in ("deepseek_v3", None):
        assert not tokenizer_from_directory(folder, name).has_chat_template


def test_every_template_has_a_model() -> None:
    from mtp_jax.models.registry import FAMILIES

    assert {path.stem for path in from_hf._TEMPLATES.iterdir()} <= set(FAMILIES)
