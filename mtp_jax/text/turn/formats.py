"""How model families write tool calls."""

import dataclasses
import json
import re
from collections.abc import Callable

from mtp_jax.request import GrammarSpec
from mtp_jax.text.grammar import JSON_OPTIONS
from mtp_jax.text.turn.parts import Call, Schemas, call_from_object, load_json, make_call, typed


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to write a call.

    Attributes:
      start, end: what surrounds a call.
      read: the call between them, or None where it is malformed.
      opening: how a call begins, of this function or (None) of any; to put words into a model's mouth.
      quotes: within these `end` is part of an argument. A pair of equal ones is JSON's string.
      wrappers: marks around calls that are dropped.
      needs_end: False where a call that lacks only `end`, because the text is over, is whole.
    """

    start: str
    end: str
    read: Callable[[str, Schemas], Call | None]
    opening: Callable[[str | None], str]
    quotes: tuple[str, str]
    wrappers: tuple[str, ...] = ()
    needs_end: bool = True


JSON_STRING = ('"', '"')


def _read_hermes(text: str, schemas: Schemas) -> Call | None:
    try:
        return call_from_object(load_json(text))
    except ValueError:
        return None


def _open_json(name: str | None, arguments: str) -> str:
    known = "" if name is None else f" {json.dumps(name, ensure_ascii=False)}, {json.dumps(arguments)}:"
    return '{"name":' + known


HERMES = Format(
    start="<tool_call>",
    end="</tool_call>",
    read=_read_hermes,
    opening=lambda name: "<tool_call>\n" + _open_json(name, "arguments"),
    quotes=JSON_STRING,
    needs_end=False,
)

_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read_qwen3_coder(text: str, schemas: Schemas) -> Call | None:
    name, found, rest = text.partition(">")
    return _read_pairs(name.strip(), rest, _PARAMETER, schemas) if found else None


def _read_pairs(name: str, text: str, pattern: re.Pattern[str], schemas: Schemas) -> Call | None:
    """A call whose arguments are a sequence of `pattern` (key, value) and nothing else."""
    arguments: dict[str, object] = {}
    position = 0
    while (match := pattern.match(text, position)) is not None:
        key = match[1].strip()
        arguments[key] = typed(match[2], name, key, schemas)
        position = match.end()
    return make_call(name, arguments) if not text[position:].strip() else None


QWEN3_CODER = Format(
    start="<function=",
    end="</function>",
    read=_read_qwen3_coder,
    opening=lambda name: "<tool_call>\n<function=" + ("" if name is None else f"{name}>\n"),
    quotes=("<parameter=", "</parameter>"),
    wrappers=("<tool_call>", "</tool_call>"),
)

_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_glm(text: str, schemas: Schemas) -> Call | None:
    name, mark, rest = text.partition("<arg_key>")
    name = name.strip()
    return None if "\n" in name or "<" in name else _read_pairs(name, mark + rest, _ARGUMENT, schemas)


GLM = Format(
    start="<tool_call>",
    end="</tool_call>",
    read=_read_glm,
    opening=lambda name: "<tool_call>" + ("" if name is None else f"{name}\n"),
    quotes=("<arg_value>", "</arg_value>"),
)

_SEPARATOR = "<｜tool▁sep｜>"


def _read_deepseek(text: str, schemas: Schemas) -> Call | None:
    """`function SEP name, fenced JSON` of V3 and R1, or `name SEP JSON` of V3.1."""
    name, found, arguments = text.partition(_SEPARATOR)
    before, fence, inside = arguments.strip().partition("```")  # no regex: its time must be that of the text
    inside = inside.removeprefix("json").strip()
    if fence and inside.endswith("```"):
        name, arguments = before.strip(), inside.removesuffix("```").strip()
    return make_call(name, arguments) if found else None


def _open_deepseek(name: str | None, kind: str, after: str) -> str:
    call = "" if name is None else f"{name}{after}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{kind}{call}"


DEEPSEEK_V3 = Format(
    start="<｜tool▁call▁begin｜>",
    end="<｜tool▁call▁end｜>",
    read=_read_deepseek,
    opening=lambda name: _open_deepseek(name, "function" + _SEPARATOR, "\n```json\n"),
    quotes=JSON_STRING,
    wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V31 = dataclasses.replace(DEEPSEEK_V3, opening=lambda name: _open_deepseek(name, "", _SEPARATOR))

_DSML = "｜DSML｜"
_DSML_NAME = re.compile(r'\s+name="([^"]*)"\s*>')
_DSML_PARAMETER = re.compile(
    rf'\s*<{_DSML}parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>(.*?)</{_DSML}parameter>',
    re.DOTALL,
)


def _read_deepseek_v32(text: str, schemas: Schemas) -> Call | None:
    head = _DSML_NAME.match(text)
    if head is None:
        return None
    arguments: dict[str, object] = {}
    position = head.end()
    while (match := _DSML_PARAMETER.match(text, position)) is not None:
        key, kind, value = match.groups()
        try:
            known = {"true": lambda value: value, "false": load_json}.get(kind)
            arguments[key] = known(value) if known else typed(value, head[1], key, schemas)
        except ValueError:
            return None
        position = match.end()
    return make_call(head[1], arguments) if not text[position:].strip() else None


DEEPSEEK_V32 = Format(
    start=f"<{_DSML}invoke",
    end=f"</{_DSML}invoke>",
    read=_read_deepseek_v32,
    opening=lambda name: (
        f'\n\n<{_DSML}function_calls>\n<{_DSML}invoke name="' + ("" if name is None else f'{name}">\n')
    ),
    quotes=(f"<{_DSML}parameter", f"</{_DSML}parameter>"),
    wrappers=(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
)

# `json` has no marks: the whole answer is a call, or several; see `calls.JsonCalls`.
JSON = "json"
FORMATS: dict[str, Format] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
}


def opening(parser: str, name: str | None) -> str:
    """How a call begins in the format of this tool call parser."""
    return _open_json(name, "parameters") if parser == JSON else FORMATS[parser].opening(name)


# Parsers of calls whose arguments are JSON -> the word for these.
JSON_CALLS = {"hermes": "arguments", JSON: "parameters"}


def call_grammar(parser: str, schemas: Schemas, *, named: bool) -> GrammarSpec:
    """What follows `opening` where one of these functions is called, each with the schema of its arguments.

    The call is the whole rest of the turn. With `named` there is one function, which `opening` has named.
    """
    rules, starts = [], []
    for index, (name, schema) in enumerate(schemas.items()):
        words = [] if named else [f"{json.dumps(name)},", f"{json.dumps(JSON_CALLS[parser])}:"]
        parts = [*map(json.dumps, words), f"arguments{index}"]
        starts.append(" ".join(f"/[ ]?/ {part}" for part in parts) + ' "}"')
        held = {"type": "object", **schema, "x-guidance": JSON_OPTIONS}
        rules.append(f"arguments{index}: %json {json.dumps(held)}")
    return GrammarSpec("ebnf", "\n".join([f"start: {' | '.join(starts)}", *rules]), "tools")
