"""Prompts from files and at random."""

import json
import random
from pathlib import Path

import pytest

from mtp_jax.bench.arguments import Load
from mtp_jax.bench.prompts import Prompt, make_prompts, random_prompts, read_prompts
from mtp_jax.errors import InvalidValueError

MESSAGES = [{"role": "user", "content": "hi"}]


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('one\n\n{"prompt": "two"}\n')
    assert read_prompts(str(path), None, 9, chat=False) == [Prompt("one", 9), Prompt('{"prompt": "two"}', 9)]
    five = read_prompts(str(path), 5, 9, chat=True)
    assert [prompt.content for prompt in five] == ["one", '{"prompt": "two"}'] * 2 + ["one"]
    assert five[0].as_messages() == [{"role": "user", "content": "one"}]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ["one", {"prompt": "two", "max_tokens": 4}, {"prompt": [5, 6]}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = read_prompts(str(path), None, 9, chat=False)
    assert found == [Prompt("one", 9), Prompt("two", 4), Prompt([5, 6], 9)]
    path.write_text(json.dumps({"messages": MESSAGES}))
    (prompt,) = read_prompts(str(path), 1, 9, chat=True)
    assert prompt.is_chat and prompt.as_messages() == MESSAGES


@pytest.mark.parametrize(
    ("line", "chat", "part"),
    [
        ("{", False, "JSON"),
        ("3", False, "a text, or an object"),
        ('{"prompt": "a", "messages": []}', False, "one of prompt and messages"),
        ('{"prompt": ""}', False, "one of prompt and messages"),
        ('{"messages": "a"}', True, "one of prompt and messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', False, "--endpoint chat"),
        ('{"prompt": [1, 2]}', True, "--endpoint completions"),
        ('{"prompt": "a", "max_tokens": 0}', False, "at least 1"),
        ('{"prompt": "a", "max_tokens": true}', False, "at least 1"),
    ],
)
def test_lines_that_are_no_prompt(tmp_path: Path, line: str, chat: bool, part: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"fine"\n' + line)
    with pytest.raises(InvalidValueError, match="line 2") as caught:
        read_prompts(str(path), None, 9, chat)
    assert part in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "none"):
        with pytest.raises(InvalidValueError, match="--prompts"):
            read_prompts(str(tmp_path / name), None, 9, chat=False)


def test_random_prompts() -> None:
    made = random_prompts(50, 30, 7, False, 256, random.Random(1))
    ids = [token for prompt in made for token in prompt.content]
    assert {len(prompt.content) for prompt in made} == {30} and {p.max_tokens for p in made} == {7}
    assert min(ids) == 25 and max(ids) == 255
    (words,) = random_prompts(1, 30, 7, True, 256, random.Random(1))
    assert isinstance(words.content, str) and len(words.content.split()) == 30


def test_warm_ups_come_first_and_are_no_random_prompt_again() -> None:
    first, rest = make_prompts(Load(num_prompts=4, num_warmups=2, input_len=5), 1000)
    assert (len(first), len(rest)) == (2, 4)
    assert len({tuple(prompt.content) for prompt in first + rest}) == 6  # type: ignore[arg-type]
    assert make_prompts(Load(num_prompts=4, num_warmups=2, input_len=5), 1000) == (first, rest)
    assert len(make_prompts(Load(), 1000)[1]) == 100
