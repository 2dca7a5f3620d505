"""Training prompts: built-in templates, files, and what is held out."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import resolve_model
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.train.prompts import (
    HeldOut,
    OpenTurn,
    categories,
    prompt_ids,
    read_prompts,
    requests,
    text_of_turn,
    user_turn,
)

ROOT = Path(__file__).parents[2]
HELD_OUT = ROOT / "benchmarks" / "prompts" / "held_out.jsonl"
TINY_MIMO = ROOT / "tests" / "golden" / "tiny_mimo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return resolve_model(TINY_MIMO).tokenizer()


def text_of(conversation: tuple) -> str:
    return conversation[-1]["content"]


def test_requests_differ_and_follow_the_seed() -> None:
    first, again, other = ([*itertools.islice(requests(seed), 3000)] for seed in (0, 0, 1))
    assert first == again != other
    texts = list(map(text_of, first))
    assert len(set(texts)) == len(texts)
    assert not any("{" in text or "  " in text or text != text.strip() for text in texts)
    assert all(text[0].isupper() for text in texts)


def test_requests_come_in_the_categories_weights() -> None:
    kinds = categories()
    assert sum(template.size for kind in kinds.values() for template in kind.templates) > 10**6
    starts = Counter(text_of(each).split()[0] for each in itertools.islice(requests(2), 2000))
    assert len(starts) > 40 and max(starts.values()) < 400


def test_slots_of_one_template_differ() -> None:
    template = next(t for t in categories()["compare"].templates if t.text.count("{thing}") == 2)
    assert template.fill(0) is None  # the same thing twice
    texts = [template.fill(index) for index in range(1, 60)]
    assert len({text for text in texts if text}) == len([text for text in texts if text]) > 40


def test_held_out_prompts_are_a_hundred_of_many_kinds() -> None:
    lines = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    assert len(lines) == len({line["id"] for line in lines}) == 100
    assert len({line["category"] for line in lines}) >= 12
    assert any(len(line["messages"]) > 1 for line in lines)
    conversations = read_prompts(HELD_OUT)
    assert [list(c) for c in conversations] == [line["messages"] for line in lines]
    for index, conversation in enumerate(conversations):  # and none is nearly another
        assert conversation not in HeldOut(conversations[:index] + conversations[index + 1 :])


def test_near_equals_of_held_out_prompts_are_recognised() -> None:
    held_out = HeldOut(read_prompts(HELD_OUT))
    near = [
        "why does the sky look BLUE during the day, and red at sunset",
        "Please explain: how does a refrigerator keep food cold?",
        "Why do we have leap years?",
        "why do we have leap years",
        "Write a poem about the first snow of the year. Keep it short.",
        "What is photosynthesis?",  # an earlier turn
        "Hi! What is photosynthesis, exactly?",
    ]
    for text in near:
        assert user_turn(text) in held_out, text
    assert (*user_turn(near[0]), {"role": "assistant", "content": "x"}, *user_turn("And now?")) in held_out
    for text in ("How does a dishwasher work?", "Why?", "!", "Write a poem about the last day of summer."):
        assert user_turn(text) not in held_out, text
    assert user_turn(near[0]) not in HeldOut()
    kept = sum(each not in held_out for each in itertools.islice(requests(0), 2000))
    assert kept > 1950


def test_prompt_files(tmp_path: Path) -> None:
    plain = tmp_path / "p.txt"
    plain.write_text("one\n\n two words \n")
    assert [text_of(c) for c in read_prompts(plain)] == ["one", "two words"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns.append({"role": "user", "content": "c"})
    lines = tmp_path / "p.jsonl"
    lines.write_text("\n".join(map(json.dumps, ["one", {"prompt": "two"}, {"messages": turns, "id": 3}])))
    assert [list(c) for c in read_prompts(lines)] == [[*user_turn("one")], [*user_turn("two")], turns]


@pytest.mark.parametrize(
    "line", ["{", "3", '""', "{}", '{"messages": []}', '{"messages": [{"role": "user"}]}', '{"prompt": 3}']
)
def test_lines_that_are_no_prompts_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"good"\n' + line)
    with pytest.raises(InvalidValueError, match=r"--prompts: got .*p\.jsonl:2"):
        read_prompts(path)
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}))
    with pytest.raises(InvalidValueError, match="the user's"):
        read_prompts(path)


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "binary", "absent"):
        with pytest.raises(InvalidValueError, match=f"--prompts: got .*{name}"):
            read_prompts(tmp_path / name)


def test_the_user_turn_is_found_in_the_template(tokenizer: Tokenizer) -> None:
    turn = OpenTurn.of(tokenizer)
    assert turn is not None
    whole = prompt_ids(tokenizer, user_turn("stone"))
    assert tokenizer.decode(turn.prefix, skip_special_tokens=False) == "user: "
    assert whole[: len(turn.prefix)] == turn.prefix and len(whole) > len(turn.prefix)


def test_the_default_models_turn_ends_at_its_own_token() -> None:
    tokenizer = resolve_model().tokenizer()
    turn = OpenTurn.of(tokenizer)
    assert turn is not None
    assert tokenizer.decode(turn.prefix, skip_special_tokens=False).endswith("<|im_start|>user\n")
    assert tokenizer.decode(turn.stop_token_ids, skip_special_tokens=False) == "<|im_end|>"
    assert text_of_turn(tokenizer, tokenizer.encode("  What? \n")) == "What?"
    assert text_of_turn(tokenizer, tokenizer.encode("<|im_start|>user")) is None
    assert text_of_turn(tokenizer, tokenizer.encode(" \n ?!")) is None
    assert text_of_turn(tokenizer, []) is None
