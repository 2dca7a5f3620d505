"""Requests made up from the server's own OpenAPI document: right ones, nearly right ones, and junk."""

from typing import Any

from hypothesis import strategies as st

Json = Any
TEXTS = [
    "",
    "a",
    "ab!",
    "default",
    "scripted",
    "user",
    "assistant",
    "auto",
    "none",
    "é𝄞\u200b",
    "\x00",
    "\ud800",
]
TEXTS += [
    "<think>a</think>b!",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>!',
    "x" * 300,
    "{{ 7 }}",
]
INTEGERS = [-(2**63) - 1, -1, 0, 1, 2, 3, 4, 16, 63, 64, 65, 127, 128, 2**31, 2**63, 10**30]
NUMBERS = [-1.0, 0.0, 0.5, 1.0, 1e-300, 100.0, 1e308]
JUNK: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.sampled_from(INTEGERS) | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=8,
)


# Requests that work; half of those that are made change a field or two of them.
CHAT = {"messages": [{"role": "user", "content": "ab!"}]}
WORKING: dict[str, Json] = {
    "/v1/completions": {"prompt": ["ab!", "c"], "max_tokens": 5},
    "/v1/chat/completions": CHAT | {"max_tokens": 20},
    "/v1/messages": CHAT | {"max_tokens": 20},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "ab!", "max_output_tokens": 20},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
}


def posts(document: Json) -> st.SearchStrategy[tuple[str, Json]]:
    """(path, body) of some POST of the document."""
    paths = sorted(path for path, methods in document["paths"].items() if "post" in methods)
    return st.one_of([st.tuples(st.just(path), _body(document, path)) for path in paths])


def _body(document: Json, path: str) -> st.SearchStrategy[Json]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"]
    changes = st.lists(st.sampled_from(sorted(properties)), max_size=2, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values(document, properties[name], 1) for name in names})
    )
    changed = st.tuples(changes, st.booleans()).map(
        lambda drawn: (
            WORKING[path] | drawn[0] | ({"stream": True} if drawn[1] and "stream" in properties else {})
        )
    )
    return changed | values(document, schema)


def values(document: Json, schema: Json, depth: int = 0) -> st.SearchStrategy[Json]:
    """Values of a schema, and now and then something else."""
    right = st.deferred(lambda: _right(document, schema, depth))
    return st.integers(0, 19).flatmap(lambda dice: JUNK if dice == 0 else right)


def _right(document: Json, schema: Json, depth: int) -> st.SearchStrategy[Json]:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return _right(document, document["components"]["schemas"][name], depth)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return st.one_of([values(document, option, depth) for option in schema[word]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "string":
            return st.sampled_from(TEXTS)
        case "integer":
            return st.sampled_from(INTEGERS)
        case "number":
            return st.sampled_from(NUMBERS)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array" if depth < 5:
            return st.lists(values(document, schema.get("items", {}), depth + 1), max_size=3)
        case "object" if depth < 5:
            return _object(document, schema, depth)
    return JUNK


def _object(document: Json, schema: Json, depth: int) -> st.SearchStrategy[Json]:
    properties: dict[str, Json] = schema.get("properties", {})
    required = [name for name in properties if name in schema.get("required", ())]
    optional = [name for name in properties if name not in required]
    if not properties:
        return st.dictionaries(st.sampled_from(TEXTS), JUNK, max_size=2)
    chosen = st.lists(st.sampled_from(optional), max_size=4, unique=True) if optional else st.just([])

    def build(names: list[str]) -> st.SearchStrategy[Json]:
        fields = {name: values(document, properties[name], depth + 1) for name in (*required, *names)}
        return st.fixed_dictionaries(fields)

    return chosen.flatmap(build)
