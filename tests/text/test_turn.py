"""Reasoning and tool calls out of text, in every format, however the text is cut into pieces."""

import itertools
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_jax.text.turn.choose import TOOL_CALL_PARSERS, reasoning_parser, tool_call_parser
from mtp_jax.text.turn.formats import opening
from mtp_jax.text.turn.parser import TurnParser
from mtp_jax.text.turn.parts import Call, Content, Part, Reasoning

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "zip": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "unit": {"enum": ["C", "F"]},
            "where": {"type": "object"},
        },
    }
}


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of a kind made one."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Content | Reasoning) and type(last) is type(part):
            assert isinstance(last, Content | Reasoning)
            out[-1] = type(part)(last.text + part.text)
        else:
            out.append(part)
    return out


def parse(text: str, pieces: list[str] | None = None, **options) -> list[Part]:
    parser = TurnParser(schemas=SCHEMAS, **options)
    parts = [part for piece in ([text] if pieces is None else pieces) for part in parser.push(piece)]
    assert not any(isinstance(part, Content | Reasoning) and not part.text for part in parts)
    return joined(parts + parser.finish())


ARGUMENTS = {"city": 'A "q" </tool_call> \\ { é𝄞', "days": 3}
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nTwo\nlines </function>\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=zip>\n01\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Two\nlines </function></arg_value>\n"
    "<arg_key>days</arg_key><arg_value>3</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>01</arg_value>\n</tool_call>"
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Two\nlines </function></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="zip">01</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
HERMES = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>' % AS_JSON  # noqa: UP031
BARE = json.dumps({"name": "weather", "parameters": ARGUMENTS}, ensure_ascii=False)
LINES = {"city": "Two\nlines </function>", "days": 3, "zip": "01"}
# Format -> one call as the model writes it, and its arguments.
ONE = {
    "hermes": (HERMES, ARGUMENTS),
    "qwen3_coder": (CODER, LINES),
    "glm": (GLM, LINES),
    "deepseek_v3": (DEEPSEEK.format(V3.format(AS_JSON)), ARGUMENTS),
    "deepseek_v31": (DEEPSEEK.format(V31.format(AS_JSON)), ARGUMENTS),
    "deepseek_v32": (DSML, LINES),
    "json": (BARE, ARGUMENTS),
}


def test_every_parser_is_tried() -> None:
    assert set(ONE) == set(TOOL_CALL_PARSERS)


@pytest.mark.parametrize("tools", ONE)
def test_one_call(tools: str) -> None:
    text, arguments = ONE[tools]
    (call,) = parse(text, tools=tools)
    assert isinstance(call, Call) and call.name == "weather"
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("tools", ONE)
def test_without_tools_the_text_is_untouched(tools: str) -> None:
    text = ONE[tools][0]
    assert parse(text) == [Content(text)]


@pytest.mark.parametrize("tools", ONE)
def test_reasoning_content_and_two_calls(tools: str) -> None:
    text, _ = ONE[tools]
    words = "" if tools == "json" else "I shall look. "
    turn = f"<think>\nwhere <tool_call> is it?\n</think>\n\n{words}\n{text}\n{text}\n"
    reasoning, *rest = parse(turn, reasoning=True, tools=tools)
    assert reasoning == Reasoning("where <tool_call> is it?")
    if words:
        assert rest.pop(0) == Content("I shall look.")
    assert [type(part) for part in rest] == [Call, Call]
    first, *more = parse(turn, reasoning=True, tools=tools, only_one=True)[-1:]
    assert isinstance(first, Call) and not more


TAGS = [
    *(word for text, _ in ONE.values() for word in (text, text[:-3], text[5:])),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=x>\n"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜DSML｜invoke",
        "<arg_value>",
    ),
    *(
        ' "',
        "\\",
        '{"name": "a", "arguments": {}}',
        "\n",
        " ",
        "é",
        "𝄞",
        "<",
        "</",
        "<think",
        "x",
        "{",
        "[",
        ";",
    ),
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "a", "arguments": {"x": 1e999}}',
    '{"name": "a", "arguments": {"x": NaN, "y": "\\ud800"}}',
]
TEXTS = st.lists(st.sampled_from(TAGS), max_size=7).map("".join)


def _split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


OPTIONS = st.fixed_dictionaries(
    {
        "tools": st.sampled_from([None, *TOOL_CALL_PARSERS]),
        "reasoning": st.booleans(),
        "only_one": st.booleans(),
    }
).flatmap(
    lambda options: st.booleans().map(
        lambda inside: options | {"inside_reasoning": inside and options["reasoning"]}
    )
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS, st.lists(st.integers(0, 2000), max_size=12), OPTIONS)
def test_cutting_changes_nothing(text: str, cuts: list[int], options: dict) -> None:
    """Any text made of pieces of calls and tags, cut anywhere; and cut into single characters."""
    whole = parse(text, **options)
    assert parse(text, _split(text, cuts), **options) == whole
    assert parse(text, list(text), **options) == whole
    for part in whole:
        if isinstance(part, Call):
            assert isinstance(json.loads(part.arguments), dict)
            (part.name + part.arguments).encode()


@pytest.mark.parametrize("tools", ONE)
def test_every_single_cut(tools: str) -> None:
    text = "<think>é\n</think>\n" + ("" if tools == "json" else "So: ") + ONE[tools][0] + "\n"
    whole = parse(text, reasoning=True, tools=tools)
    assert isinstance(whole[-1], Call)
    for cut in range(len(text) + 1):
        assert parse(text, [text[:cut], text[cut:]], reasoning=True, tools=tools) == whole


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from([None, *TOOL_CALL_PARSERS]), st.booleans())
def test_nothing_is_lost_but_white_space_and_marks(text: str, tools: str | None, reasoning: bool) -> None:
    """All that is shown is in the text, in order; without tags the text comes through as it is."""
    at = 0
    for part in parse(text, tools=tools, reasoning=reasoning):
        if isinstance(part, Content | Reasoning):
            for character in "".join(part.text.split()):  # a mark may stand inside of a word
                at = text.index(character, at) + 1
    plain = text.replace("<", "").replace("{", "").replace("[", "")
    assert "".join(part.text for part in parse(plain, tools=tools, reasoning=reasoning)) == plain


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("\n<think>\n a \n</think>\n\n b \n", "a", "b \n"),
        ("a</think>b", "", "a</think>b"),
        ("<think>a", "a", ""),
        ("<think>a</thin", "a</thin", ""),
        ("<think></think>b", "", "b"),
        ("b <think>a</think>", "", "b <think>a</think>"),
        (" \n", "", " \n"),
        ("<thin", "", "<thin"),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    parts = ([Reasoning(reasoning)] if reasoning else []) + ([Content(content)] if content else [])
    assert parse(text, reasoning=True) == parts


def test_reasoning_that_the_prompt_has_opened() -> None:
    parts = parse("\na\n</think>\n\nb", reasoning=True, inside_reasoning=True)
    assert parts == [Reasoning("a"), Content("b")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "a"',
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>words</tool_call>",
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": ' + "[" * 5000 + "</tool_call>",
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(text, tools="hermes") == [Content(text)]


def test_a_call_that_lacks_only_its_end() -> None:
    (call,) = parse(HERMES.removesuffix("\n</tool_call>"), tools="hermes")
    assert isinstance(call, Call)
    cut = GLM.removesuffix("</tool_call>")  # there may have been more arguments
    assert parse(cut, tools="glm") == [Content(cut)]


def test_types_follow_the_schema() -> None:
    pairs = {"zip": "07", "days": "7", "unit": "C", "where": '{"a": [1]}', "other": "true", "more": "so so"}
    written = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs.items())
    (call,) = parse(f"<tool_call>weather{written}</tool_call>", tools="glm")
    assert isinstance(call, Call)
    expected = {"zip": "07", "days": 7, "unit": "C", "where": {"a": [1]}, "other": True, "more": "so so"}
    assert json.loads(call.arguments) == expected


@pytest.mark.parametrize("tools", ONE)
@pytest.mark.parametrize("name", ["weather", None])
def test_a_turn_that_was_begun_for_the_model_can_be_finished(tools: str, name: str | None) -> None:
    """The opening is the beginning of a call: what the formats write after it makes one."""
    rest = {
        "hermes": ' "weather", "arguments":' if name is None else "",
        "json": ' "weather", "parameters":' if name is None else "",
        "qwen3_coder": "weather>\n" if name is None else "",
        "glm": "weather\n" if name is None else "",
        "deepseek_v3": "weather\n```json\n" if name is None else "",
        "deepseek_v31": "weather<｜tool▁sep｜>" if name is None else "",
        "deepseek_v32": 'weather">\n' if name is None else "",
    }[tools]
    end = {
        "hermes": ' {"city": "B"}}\n</tool_call>',
        "json": ' {"city": "B"}}',
        "qwen3_coder": "<parameter=city>\nB\n</parameter>\n</function>\n</tool_call>",
        "glm": "<arg_key>city</arg_key>\n<arg_value>B</arg_value>\n</tool_call>",
        "deepseek_v3": '{"city": "B"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "deepseek_v31": '{"city": "B"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "deepseek_v32": (
            '<｜DSML｜parameter name="city" string="true">B</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>"
        ),
    }[tools]
    begun = opening(tools, name)
    # A function's name cannot go on after an opening that names it.
    assert name is None or begun[-1] in ":\n>"
    assert parse(begun + rest + end, tools=tools) == [Call("weather", '{"city": "B"}')]


@pytest.mark.parametrize(
    ("model_type", "template", "thinks", "tools"),
    [
        ("qwen3", "{% if tools %}<tool_call>{'name'...}{% endif %}</think>", "think", "hermes"),
        ("qwen3_5", "{% if tools %}<tool_call>\n<function=x>{% endif %}</think>", "think", "qwen3_coder"),
        ("glm4_moe", "{% if tools %}<tool_call>{n}<arg_key>{% endif %}</think>", "think", "glm"),
        ("deepseek_v3", "{{tools}}<｜tool▁sep｜>'```json'</think>", "think", "deepseek_v3"),
        ("deepseek_v3", "{{tools}}<｜tool▁sep｜></think>", "think", "deepseek_v31"),
        ("llama", "{% for message in messages %}{% endfor %}", None, None),
        ("llama", "{{ tools | tojson }}", None, "json"),
        ("qwen2", "{{ tools | tojson }}", None, "hermes"),
        ("qwen3", None, "think", None),
        ("other", None, None, None),
    ],
)
def test_choice(model_type: str, template: str | None, thinks: str | None, tools: str | None) -> None:
    assert reasoning_parser(model_type, template) == thinks
    assert tool_call_parser(model_type, template) == tools


def test_an_answer_in_json_is_no_call() -> None:
    text = '{"name": "Bob", "age": 3}'
    assert parse(text, tools="json") == [Content(text)]


def test_a_call_of_white_space_takes_the_time_of_its_length() -> None:
    """A pattern that tries every split of it would take hours."""
    text = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + "\n" * 50_000 + "<｜tool▁call▁end｜>"
    started = time.perf_counter()
    parse(text, tools="deepseek_v3")
    assert time.perf_counter() - started < 5
