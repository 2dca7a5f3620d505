"""What an assistant's turn consists of, and how a call is read from the JSON or XML that models write."""

import dataclasses
import json
from collections.abc import Mapping

# Name of a function -> JSON schema of its arguments; for formats that do not say what is text.
Schemas = Mapping[str, Mapping[str, object]]


@dataclasses.dataclass(frozen=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    text: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Part = Reasoning | Content | Call


def load_json(text: str) -> object:
    """Strict JSON. Raises ValueError for anything else, however odd."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def dump_json(value: object) -> str:
    """JSON text that UTF-8 can carry. Raises ValueError for infinity, which `1e999` becomes when read."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may say as an escape
        return json.dumps(value, allow_nan=False)
    return text


def make_call(name: object, arguments: object) -> Call | None:
    """A call from values; None where they are none. Arguments may be JSON in a string."""
    try:
        if isinstance(arguments, str):
            arguments = load_json(arguments)
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
            return None
        name.encode()
        return Call(name.strip(), dump_json(arguments))
    except (ValueError, RecursionError):
        return None


def call_from_object(value: object) -> Call | None:
    """A call from `{"name": ..., "arguments": {...}}`; `parameters` is another word for arguments."""
    if not isinstance(value, dict) or not {"arguments", "parameters"} & value.keys():
        return None  # an answer in JSON may have a name as well
    return make_call(value.get("name"), value.get("arguments", value.get("parameters")))


def typed(text: str, name: str, key: str, schemas: Schemas) -> object:
    """An argument that was written as bare text, as the type that the function's schema asks for.

    Text stays text where the schema allows a string, or where it is no JSON.
    """
    properties = schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(schema, Mapping) and "string" in _types(schema):
        return text
    try:
        return load_json(text)
    except ValueError:
        return text


def _types(schema: Mapping[str, object]) -> set[object]:
    """The types that a schema names, those of its alternatives and of its enumerated values included."""
    kind = schema.get("type")
    found: set[object] = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    values = schema.get("enum")
    if isinstance(values, list) and any(isinstance(value, str) for value in values):
        found.add("string")
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, Mapping):
                found |= _types(option)
    return found
