"""Masks of grammars: exactly the tokens that can go on, for every row of a round; compiling is bounded."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.errors import InvalidRequestError
from mtp_jax.text import grammar
from mtp_jax.text.from_hf import tokenizer_from_directory
from mtp_jax.text.grammar import GrammarCompiler, GrammarSpec, Matcher, choice, json_object, json_schema

TOKENIZER = tokenizer_from_directory(Path(__file__).parents[1] / "golden" / "tiny_mimo")
VOCAB = TOKENIZER.vocab_size + 37  # the model's table is padded
EOS = [TOKENIZER.encode(text, add_special_tokens=False)[0] for text in sorted(TOKENIZER.special_texts)][:2]
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, EOS)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["é", 'a"b', 3]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "more": {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False},
    },
    "required": ["kind"],
    "additionalProperties": False,
}
SPECS = {
    "regex": GrammarSpec("regex", r"(ab|a[0-9]{2,3}|é+)x?", "regex"),
    "choice": choice(["yes", "yesterday", "no", "a.b (c)"], "choice"),
    "schema": json_schema(SCHEMA),
    "lark": GrammarSpec("ebnf", 'start: "(" start? ")" | DIGIT+\nDIGIT: /[0-9]/', "grammar"),
    "gbnf": GrammarSpec("ebnf", 'root ::= "a" ("b" | "c")+', "grammar"),
}


def bits(mask: np.ndarray) -> set[int]:
    """Tokens whose bit is set."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def can_follow(matcher: Matcher, token: int) -> bool:
    """Whether the state takes this token: the slow way, by trying."""
    if token in EOS:
        return matcher.may_end
    return matcher.state.deep_copy().try_consume_tokens([token]) == 1


def walk(matcher: Matcher, choose: np.random.Generator, most: int = 60) -> list[int]:
    """Tokens of a random completion, each drawn from its mask."""
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = sorted(bits(matcher.mask()))
        ends = [token for token in allowed if token in EOS]
        token = int(choose.choice(ends if ends and choose.random() < 0.3 else allowed))
        matcher.accept([token])
        tokens.append(token)
        if token in EOS:
            break
    return tokens


@pytest.mark.parametrize("name", SPECS)
def test_a_mask_is_what_can_follow(name: str) -> None:
    """Against trying every single token, along a random completion; padding and specials never."""
    matcher = COMPILER.compile(SPECS[name]).matcher()
    for token in walk(COMPILER.compile(SPECS[name]).matcher(), np.random.default_rng(3), most=12):
        allowed = bits(matcher.mask())
        assert allowed == {t for t in range(TOKENIZER.vocab_size) if can_follow(matcher, t)}
        assert bool(allowed & set(EOS)) == matcher.may_end
        matcher.accept([token])


@pytest.mark.parametrize("seed", range(25))
def test_completions_fit(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for name, spec in SPECS.items():
        matcher = COMPILER.compile(spec).matcher()
        tokens = walk(matcher, draw)
        if tokens[-1] not in EOS:
            continue  # too long; it was right so far
        assert matcher.ended and bits(matcher.mask()) <= set(EOS)
        text = TOKENIZER.decode(tokens)
        match name:
            case "regex":
                assert re.fullmatch(spec.source, text)
            case "choice":
                assert text in ("yes", "yesterday", "no", "a.b (c)")
            case "schema":
                value = json.loads(text)
                assert value["kind"] in ("é", 'a"b', 3) and set(value) <= set(SCHEMA["properties"])
                assert len(value.get("name", "")) <= 5 and len(value.get("tags", [])) <= 2
            case "lark":
                assert re.fullmatch(r"\(*[0-9]*\)*", text) and text.count("(") == text.count(")")
            case "gbnf":
                assert re.fullmatch("a[bc]+", text)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SPECS)), st.integers(0, 2**32), st.integers(0, 8), st.integers(0, 5), st.data())
def test_rows_of_a_round_are_the_masks_along_the_drafts(
    name: str, seed: int, length: int, num_drafts: int, data: st.DataObject
) -> None:
    """Good drafts, bad ones and ends, anywhere: the state afterwards is the state before."""
    draw = np.random.default_rng(seed)
    made = COMPILER.compile(SPECS[name])
    matcher, other = made.matcher(), made.matcher()
    prefix = walk(matcher, draw, most=length)
    other.accept(prefix)
    ahead = [] if set(prefix) & set(EOS) else walk(other, draw, most=num_drafts)
    spoilt = data.draw(st.none() | st.integers(0, max(0, len(ahead) - 1)))
    drafts = list(ahead)
    if spoilt is not None and drafts:
        drafts[spoilt] = data.draw(st.integers(0, VOCAB - 1))
    before = matcher.mask().copy()
    rows = matcher.masks(drafts)
    assert rows.shape == (len(drafts) + 1, -(-VOCAB // 32)) and rows.dtype == np.uint32
    step = made.matcher()
    step.accept(prefix)
    for row, token in zip(rows, [*drafts, None], strict=True):
        assert (row == step.mask()).all()
        if token is None or token not in bits(row):
            break
        step.accept([token])
    np.testing.assert_array_equal(matcher.mask(), before)
    assert all(row.any() for row in rows)  # no distribution is empty


def test_a_token_that_no_mask_allowed_is_noticed() -> None:
    matcher = COMPILER.compile(json_object()).matcher()
    matcher.accept(TOKENIZER.encode('{"a": [1, true]}', add_special_tokens=False) + EOS[:1])
    assert matcher.ended and matcher.fits and not matcher.failed
    other = COMPILER.compile(json_object()).matcher()
    other.accept([TOKENIZER.encode("x", add_special_tokens=False)[0]])
    assert other.failed and not other.fits
    assert bits(other.mask()) == set(EOS)


@pytest.mark.parametrize("rule", ["x[max_tokens=9]: /.*/", 'x[stop="Q"]: /[^Z]*/', "x: /[a-z]*/"], ids=str)
def test_drafts_under_rules_that_cannot_be_taken_back(rule: str) -> None:
    """The library refuses to go back over tokens of such rules; masks along drafts are those of the steps."""
    spec = GrammarSpec("ebnf", f'start: x "END"\n{rule}', "grammar")
    drafts = TOKENIZER.encode("abcdefg", add_special_tokens=False)
    matcher, step = COMPILER.compile(spec).matcher(), COMPILER.compile(spec).matcher()
    for done in range(len(drafts)):
        for row, token in zip(matcher.masks(drafts[done:]), [*drafts[done:], None], strict=True):
            np.testing.assert_array_equal(row, step.mask())
            if token is not None:
                step.accept([token])
        matcher.accept([drafts[done]])
        step = COMPILER.compile(spec).matcher()
        step.accept(drafts[: done + 1])
        assert not matcher.failed


def test_limits_behind_drafts_mean_nothing_before_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose steps grow: looking ahead never ends a text that plain decoding goes on with."""
    monkeypatch.setitem(grammar._LIMITS, "step_max_items", 100)  # it is exceeded after 18 tokens
    compiler = GrammarCompiler(TOKENIZER, VOCAB, EOS)
    spec = GrammarSpec("ebnf", 'start: s\ns: s s | s s s | /[a-z ]/ | ""', "grammar")
    token = TOKENIZER.encode("a", add_special_tokens=False)[0]
    plain, drafted = compiler.compile(spec).matcher(), compiler.compile(spec).matcher()
    for length in range(40):
        rows = drafted.masks([token] * 8)
        assert (rows[0] == plain.mask()).all() and plain.failed == drafted.failed, length
        if plain.failed:
            break
        plain.accept([token])
        drafted.accept([token])
    assert plain.failed and plain.fits, "the limits are there, and what stood before them fits"


@pytest.mark.parametrize("rule", ["<[*]>* ", "<[^5]>* "])
def test_ranges_of_tokens_end_no_text(rule: str) -> None:
    """They name end-of-sequence tokens too, which are allowed where the text may end and nowhere else."""
    matcher = COMPILER.compile(GrammarSpec("ebnf", f'start: {rule}"b"', "grammar")).matcher()
    assert not bits(matcher.mask()) & set(EOS)
    walk(matcher, np.random.default_rng(1), most=20)
    assert matcher.fits and not matcher.failed


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_choices_are_taken_literally(texts: list[str]) -> None:
    matcher = COMPILER.compile(choice(texts, "choice")).matcher()
    tokens = TOKENIZER.encode(texts[0], add_special_tokens=False)
    if TOKENIZER.decode(tokens) == texts[0]:  # the tiny vocabulary cannot write everything
        matcher.accept(tokens)
        assert matcher.may_end


def test_white_space_is_bounded() -> None:
    matcher = COMPILER.compile(json_object()).matcher()
    matcher.accept(TOKENIZER.encode("{", add_special_tokens=False))
    space = TOKENIZER.encode("\n", add_special_tokens=False)
    count = 0
    while space[0] in bits(matcher.mask()):
        matcher.accept(space)
        count += 1
    assert 0 < count <= 20


@pytest.mark.parametrize(
    "spec",
    [
        json_schema({"type": "objekt"}),
        json_schema({"$ref": "#/nowhere"}),
        json_schema({"type": "string", "pattern": "("}),
        json_schema({"type": "integer", "minimum": 5, "maximum": 4}),
        json_schema({"enum": ["x" * 70_000]}),
        GrammarSpec("regex", "(", "regex"),
        GrammarSpec("regex", "[a-", "regex"),
        GrammarSpec("ebnf", "start: nothing", "grammar"),
        GrammarSpec("ebnf", "root ::= (", "grammar"),
        GrammarSpec("ebnf", "", "grammar"),
        GrammarSpec("ebnf", f'start: <[{EOS[0]}]> "b"', "grammar"),
    ],
    ids=lambda spec: spec.source[:30],
)
def test_what_is_no_grammar_is_the_request_s_mistake(spec: GrammarSpec) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.compile(spec)
    assert caught.value.field == spec.field
    assert COMPILER.compile(json_object()).matcher().mask().any()  # others are served


@pytest.mark.parametrize("texts", [[], [""], ["a"] * 1025], ids=len)
def test_no_choice(texts: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="choice"):
        choice(texts, "choice")


def _large() -> dict[str, GrammarSpec]:
    options = [{"properties": {f"a{j}": {"type": "number"} for j in range(i % 30)}} for i in range(120)]
    patterns = {f"k{i}": {"type": "string", "pattern": "(a|b|c){1,%d}" % (i + 1)} for i in range(200)}  # noqa: UP031
    nested: dict = {"type": "object"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested, "b": nested.get("type", {}) and {}}}
    return {
        "alternatives": json_schema({"anyOf": options}),
        "patterns": json_schema({"type": "object", "properties": patterns}),
        "enumeration": json_schema({"enum": [f"{i}" * 8 for i in range(2000)]}),
        "nested": json_schema(nested),
        "repeated": json_schema({"type": "array", "minItems": 100_000, "items": {"type": "string"}}),
        "power": GrammarSpec("regex", "(a{1,1000}){1,1000}", "regex"),
        "backtracking": GrammarSpec("regex", "(.*a.{500})" * 20, "regex"),
        "ambiguous": GrammarSpec("ebnf", 'start: s\ns: s s | "a" | s s s |', "grammar"),
    }


@pytest.mark.parametrize("name", _large())
def test_compiling_is_bounded(name: str) -> None:
    """Done, or refused, in a second or two of one core; so is each step along a completion."""
    started = time.process_time()
    try:
        matcher = COMPILER.compile(_large()[name]).matcher()
    except InvalidRequestError:
        matcher = None
    assert time.process_time() - started < 5  # measured: 0.7 s for the worst; shared machines are slower
    if matcher is not None:
        started = time.process_time()
        walk(matcher, np.random.default_rng(0), most=10)
        assert time.process_time() - started < 5


def test_the_default_models_tokenizer(smollm2) -> None:
    compiler = GrammarCompiler(smollm2, 49_152, [2])
    matcher = compiler.compile(json_schema(SCHEMA)).matcher()
    text = '{"name": "ab", "kind": "é", "tags": [true, false], "more": {"n": 12}}'
    matcher.accept(smollm2.encode(text, add_special_tokens=False))
    assert matcher.may_end and 2 in bits(matcher.mask())
