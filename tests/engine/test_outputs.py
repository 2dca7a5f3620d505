"""Which characters are said to come from accepted drafts. tiny_mimo's tokens are single bytes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.engine.outputs import Completion
from mtp_jax.request import EngineRequest, RequestOutput, SamplingParams, TokenLogprobs
from mtp_jax.scheduler.plan import TokenUpdate
from mtp_jax.text.from_hf import tokenizer_from_directory
from mtp_jax.text.tokenizer import Tokenizer

EOS = 2
TOKENIZER = tokenizer_from_directory(Path(__file__).parents[1] / "golden" / "tiny_mimo")


def completion(*stops: str, tokenizer: Tokenizer = TOKENIZER) -> Completion:
    request = EngineRequest("a", (40,), SamplingParams(stop=stops, max_tokens=None))
    return Completion(request, tokenizer, 0.0)


def bytes_of(text: str) -> list[int]:
    """One token for each byte."""
    tokens = TOKENIZER.encode(text)
    assert len(tokens) == len(text.encode())
    return tokens


def push(
    made: Completion, tokens: list[int], accepted: int, drafts: int = 3, reason: str | None = None
) -> RequestOutput:
    """One round: `accepted` drafts that stood, then the target's own token (unless the round was cut)."""
    stop_token = tokens[-1] if reason == "stop" else None
    return made.push(TokenUpdate("a", tuple(tokens), drafts, accepted, False, reason, stop_token), 0)


def shown(output: RequestOutput) -> tuple[str, list[str]]:
    """The text, and the parts of it that came from accepted drafts."""
    return output.text, [output.text[start:end] for start, end in output.accepted_spans]


def test_the_last_token_of_a_round_is_the_targets_own() -> None:
    made = completion()
    assert shown(push(made, bytes_of("p"), 0, drafts=0)) == ("p", [])  # the first one: nothing was drafted
    assert shown(push(made, bytes_of("abc"), 2)) == ("abc", ["ab"])
    assert shown(push(made, bytes_of("d"), 0)) == ("d", [])
    assert shown(push(made, bytes_of("efgh"), 3)) == ("efgh", ["efg"])


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    made = completion()
    first, second = bytes_of("é")
    assert shown(push(made, [*bytes_of("a"), first], 1)) == ("a", ["a"])
    assert shown(push(made, [second, *bytes_of("b")], 1)) == ("éb", ["é"])
    euro = bytes_of("€")
    assert shown(push(made, euro, 2)) == ("€", [])  # the last of its bytes is the target's
    assert shown(push(made, [*euro, *euro[:1]], 3)) == ("€", ["€"])


def test_text_that_a_stop_string_holds_back_keeps_its_origin() -> None:
    made = completion("xyz")
    assert shown(push(made, bytes_of("axy"), 2)) == ("a", ["a"])
    assert shown(push(made, bytes_of("bc"), 1)) == ("xybc", ["x", "b"])
    assert shown(push(made, bytes_of("x"), 0)) == ("", [])
    assert shown(push(made, bytes_of("qxq"), 2)) == ("xqxq", ["qx"])


def test_a_stop_string_drops_what_follows() -> None:
    made = completion("xyz")
    assert shown(push(made, bytes_of("abxy"), 3)) == ("ab", ["ab"])
    output = push(made, bytes_of("zcd"), 2)
    assert output.finish_reason == "stop" and shown(output) == ("", [])
    assert output.accepted_spans == ()


@pytest.mark.parametrize(("reason", "last"), [("length", "c"), ("stop", EOS)])
def test_a_round_that_was_cut(reason: str, last: str | int) -> None:
    tokens = bytes_of("ab") + (bytes_of(last) if isinstance(last, str) else [last])
    output = push(completion(), tokens, 4, drafts=4, reason=reason)
    assert shown(output) == (("abc", ["abc"]) if reason == "length" else ("ab", ["ab"]))


def test_the_end_releases_what_was_held() -> None:
    assert shown(push(completion("xyz"), bytes_of("axy"), 2, reason="length")) == ("axy", ["ax"])
    half = bytes_of("é")[:1]
    made = completion()
    assert shown(push(made, [*bytes_of("a"), *half], 2, reason="length")) == ("a\ufffd", ["a"])


@given(
    text=st.text(alphabet="abx é€🙂", min_size=1, max_size=30),
    rounds=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="abx é", min_size=2, max_size=4), max_size=2),
)
def test_any_split_marks_the_same_characters(text: str, rounds: list[int], stops: list[str]) -> None:
    tokens, by_byte, outputs = bytes_of(text), [], []
    made = completion(*stops)
    while tokens:
        accepted = rounds[len(outputs) % len(rounds)]
        taken, tokens = tokens[: accepted + 1], tokens[accepted + 1 :]
        by_byte += [index < accepted for index in range(len(taken))]
        outputs.append(push(made, taken, accepted, reason=None if tokens else "length"))
        if outputs[-1].finish_reason is not None:
            break
    told = []
    for output in outputs:
        inside = [False] * len(output.text)
        for start, end in output.accepted_spans:
            assert 0 <= start < end <= len(output.text)
            inside[start:end] = [True] * (end - start)
        told += inside
    whole = "".join(output.text for output in outputs)
    assert text.startswith(whole)
    ends = [len(text[: index + 1].encode()) - 1 for index in range(len(whole))]
    assert told == [by_byte[end] for end in ends]


def test_a_recomputed_prompt_is_told_once() -> None:
    """After preemption the same positions come again, and those of the completion with them."""
    output = completion()
    output.note_prompt(1, TokenLogprobs(66, -0.5))
    first = push(output, bytes_of("a"), 0)
    output.note_prompt(1, TokenLogprobs(66, -0.5))
    output.note_prompt(2, TokenLogprobs(97, -0.25))
    later = push(output, bytes_of("b"), 0)
    assert [entry.token_id for entry in first.prompt_logprobs] == [66]
    assert not later.prompt_logprobs
