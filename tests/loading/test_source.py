"""Tensors against what a configuration asks for: every problem is named, in one line."""

import pytest

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.source import check_shapes

WANTED = {"a": (2, 3), "b": (4,), "c": (5,)}


def message(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], unread=()) -> str:
    with pytest.raises(CheckpointError) as error:
        check_shapes("dir", expected, found, dict.fromkeys(unread, (1,)))
    return str(error.value)


def test_nothing_wrong():
    check_shapes("dir", WANTED, WANTED)
    check_shapes("dir", WANTED, WANTED | {"d": (9,)}, {"d": (1,)})


def test_one_problem():
    assert (
        message(WANTED, {"a": (2, 3), "b": (4,)})
        == "dir: c: got 'no such tensor'; expected a tensor of shape [5]"
    )
    assert message(WANTED, WANTED | {"a": (3, 2)}) == "dir: a: got [3, 2]; expected shape [2, 3]"
    legal = "dir: d: got 'a tensor that this model type does not have'; expected none"
    assert message(WANTED, WANTED | {"d": (3, 2)}) == legal


def test_all_problems_at_once():
    text = "1 missing: b [4]; 2 of another shape: a [3, 2] instead of [2, 3], c [6] instead of [5]; "
    text += "2 unexpected: d, e"
    found = {"a": (3, 2), "c": (6,), "e": (1,), "d": (1,), "f": (1,)}
    assert (
        message(WANTED, found, ["f"])
        == f"dir: tensors: got '{text}'; expected those that config.json asks for"
    )


def test_a_long_list_ends_in_a_count():
    expected = {f"w{i:02}": (i,) for i in range(18)}
    found = {f"x{i}": (1,) for i in range(5)}
    text = message(expected, found)
    assert text.startswith("dir: tensors: got '18 missing: w00 [0], ")
    assert text.endswith(
        "w17 [17]; 5 unexpected: x0, x1, and 3 more'; expected those that config.json asks for"
    )
    assert message(expected, {}).count("[") == 18
    text = message({f"w{i:02}": (i,) for i in range(99)}, found)
    assert text.endswith("w19 [19], and 79 more; 5 unexpected'; expected those that config.json asks for")
