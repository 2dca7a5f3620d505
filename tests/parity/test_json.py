"""Whatever the model and its head, what a JSON schema asks for is what comes."""

import dataclasses
import json
import re

import pytest

from mtp_jax.request import RequestOutput, SamplingParams
from mtp_jax.text.grammar import json_schema
from tests.parity.json_engine import build_json_engine
from tests.parity.rig import Job, RandomSource, renew, rigged_drafts, run_jobs, tokens_of
from tests.parity.scripted_model import do_everything

WORD = {"type": "string", "maxLength": 8}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["a", "bc", 7, None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMAS: list[dict] = [
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
        "required": ["point"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "owner": PERSON,
            "tags": {"type": "array", "items": WORD, "maxItems": 4},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": -9, "maximum": -1}]},
        },
        "required": ["owner", "either"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[0-9]{2}-[a-f]{3}$"},
]
PYTHON = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": int,
}


def is_valid(value: object, schema: dict) -> bool:
    """JSON schema's rules, as far as the schemas above go."""
    if "anyOf" in schema:
        return any(is_valid(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if not isinstance(value, PYTHON[schema["type"]]):
        return False
    match value:
        case bool():
            return schema["type"] == "boolean"
        case int() | float():
            return schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case str():
            fits = re.search(schema.get("pattern", ""), value) is not None
            return fits and len(value) <= schema.get("maxLength", len(value))
        case list():
            fits = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return fits and all(is_valid(item, schema["items"]) for item in value)
        case dict():
            known = set(schema["required"]) <= set(value) <= set(schema["properties"])
            return known and all(is_valid(value[name], schema["properties"][name]) for name in value)
    return False


def jobs(count: int) -> dict[str, Job]:
    """Half of them greedy. Penalties get a random model out of numbers that never end."""
    made = {}
    for index in range(count):
        params = SamplingParams(
            temperature=index // 5 % 2,
            max_tokens=300,
            frequency_penalty=0.4,
            structured_outputs=json_schema(SCHEMAS[index % 5]),
        )
        made[str(index)] = Job((index % 90, 3, 5), params, arrives=index // 4, seed=index)
    return made


def check(outputs: dict[str, list[RequestOutput]]) -> None:
    for name, got in outputs.items():
        text = "".join(output.text for output in got)
        assert got[-1].finish_reason == "stop", (name, text)
        assert is_valid(json.loads(text), SCHEMAS[int(name) % 5]), text


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_answers_fit_their_schemas(count: int) -> None:
    """At temperature 0 and 1; plainly, with a head that is nearly always right, and with a random one."""
    wanted = jobs(count)
    plain = run_jobs(build_json_engine(0), wanted)
    check(plain)
    texts = [[*job.prompt, *tokens_of(plain[name])] for name, job in wanted.items()]
    with rigged_drafts(texts):
        engine = build_json_engine(3)
    good = run_jobs(engine, wanted)
    assert {name: tokens_of(got) for name, got in good.items()} == {
        name: tokens_of(got) for name, got in plain.items()
    }
    before = engine.stats()
    assert before.num_accepted_tokens > 0.5 * before.num_draft_tokens
    # Other seeds draft by the module.
    others = {name: dataclasses.replace(job, seed=1000 + job.seed) for name, job in wanted.items()}
    bad = do_everything(renew(engine, RandomSource(engine.model_config, head_seed=3)))
    check(run_jobs(bad, others))
    assert bad.stats().num_accepted_tokens < 0.5 * bad.stats().num_draft_tokens
