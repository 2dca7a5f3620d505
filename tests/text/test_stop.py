"""Stop strings: the same outcome however the text is split."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.text import StopChecker


def outcome(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Everything shown, and the stop string found."""
    checker, shown = StopChecker(stops), ""
    for piece in pieces:
        emitted, matched = checker.push(piece)
        shown += emitted
        if matched is not None:
            assert checker.push("more") == ("", matched)
            assert checker.finish() == ""
            return shown, matched
    return shown + checker.finish(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule read literally: after each character, does the text end in a stop string?"""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


CASES = [
    (["END"], "a text END more", ("a text ", "END")),
    (["\n\n", "\n"], "a\n\nb", ("a", "\n")),
    (["abcd", "bc"], "abcd", ("a", "bc")),
    (["aab"], "aaab", ("a", "aab")),
    (["abc", "c"], "abc", ("", "abc")),
    (["STOP"], "STOSTO", ("STOSTO", None)),
    ([], "anything", ("anything", None)),
    (["🦊x"], "a🦊🦊xb", ("a🦊", "🦊x")),
]


@pytest.mark.parametrize(("stops", "text", "result"), CASES)
def test_every_split(stops, text, result):
    assert expected(stops, text) == result
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces = [text[0]]
        for cut, character in zip(cuts, text[1:], strict=True):
            if cut:
                pieces.append(character)
            else:
                pieces[-1] += character
        assert outcome(stops, pieces) == expected(stops, text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=10),
)
def test_random_splits(stops, pieces):
    assert outcome(stops, pieces) == expected(stops, "".join(pieces))


@given(pieces=st.lists(st.text("abc", max_size=4), max_size=8))
def test_no_more_is_held_back_than_needed(pieces):
    checker, stop, text, shown = StopChecker(["abca"]), "abca", "", ""
    for piece in pieces:
        emitted, matched = checker.push(piece)
        text, shown = text + piece, shown + emitted
        if matched:
            break
        held = len(text) - len(shown)
        assert held == max(n for n in range(4) if text.endswith(stop[:n]))


def test_nothing_is_shown_early():
    checker = StopChecker(["<end>"])
    assert checker.push("a<e") == ("a", None)
    assert checker.push("n") == ("", None)
    assert checker.push("x") == ("<enx", None)
    assert checker.push("<end") == ("", None)
    assert checker.push(">tail") == ("", "<end>")


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=9))
def test_what_ends_in_exempt_text_does_not_stop(stops: list[str], text: str) -> None:
    """A stop string may begin there: only its end counts. Whatever is exempt, and piece by piece."""
    for exempt in range(len(text) + 1):
        checker, shown, matched = StopChecker(stops), "", None
        for index, character in enumerate(text):
            emitted, matched = checker.push(character, exempt=index < exempt)
            shown += emitted
            if matched is not None:
                break
        ends = (end for end in range(exempt + 1, len(text) + 1) if text[:end].endswith(tuple(stops)))
        end = next(ends, None)
        if end is None:
            assert (shown + checker.finish(), matched) == (text, None)
        else:
            longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
            assert (shown, matched) == (text[: end - len(longest)], longest)
