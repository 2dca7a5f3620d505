"""Incremental detokenising: joined pieces are decode(all ids), and no character is ever broken."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.text import Detokenizer, Tokenizer
from tests.text.reference import spelled

NAMES = ("smollm2", "sentence_piece", "byte_tokens")
# fragments whose bytes are split over tokens, or that combine
FRAGMENTS = [
    "🦊",
    "👨\u200d👩\u200d👧",
    "🇸🇪",
    "日本語",
    "한국",
    "e\u0301",
    "שלום",
    "hello",
    " ",
    "\n",
    "𓀀",
    "½",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=8).map("".join)


@pytest.fixture(scope="session", params=NAMES)
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Splits ids at the cuts, taken modulo their number; empty pieces happen."""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(places)]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_ids(tokenizer, data):
    """Any ids at all: broken characters, special tokens, ids beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=10))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    shown = "".join(detokenizer.push(piece) for piece in pieces(ids, cuts)) + detokenizer.finish()
    assert shown == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_bytes_in_any_order(tokenizer, data):
    """Ids that are single bytes of UTF-8, in valid and invalid order."""
    single = [i for i in range(min(tokenizer.vocab_size, 400)) if _is_byte(tokenizer, i)]
    lead = [i for i in single if tokenizer.token_text.piece(i).data[0] >= 0x80]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(single), st.sampled_from(lead)), max_size=20))
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
    assert shown == tokenizer.decode(ids)


def _is_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    piece = tokenizer.token_text.piece(token_id)
    return piece is not None and len(piece.data) == 1


@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=10))
@settings(max_examples=200, deadline=None)
def test_text_never_breaks(tokenizer, text, cuts):
    """What is shown is at any time a beginning of the text: so never half a character."""
    text = spelled(tokenizer, text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    detokenizer, shown = Detokenizer(tokenizer), ""
    for piece in pieces(ids, cuts):
        shown += detokenizer.push(piece)
        assert whole.startswith(shown)
        assert text.count("\ufffd") >= shown.count("\ufffd")
    assert shown + detokenizer.finish() == whole
    assert whole == text


def test_a_character_over_several_tokens_comes_when_it_is_whole(smollm2):
    ids = smollm2.encode("🦊!")
    detokenizer = Detokenizer(smollm2)
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 2) + ["🦊", "!"]


def test_an_end_inside_a_character_shows_the_replacement_sign(smollm2):
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.push(smollm2.encode("a🦊")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens(smollm2):
    ids = smollm2.encode("a<|im_end|>b")
    assert Detokenizer(smollm2).push(ids) == "ab"
    assert Detokenizer(smollm2, skip_special_tokens=False).push(ids) == "a<|im_end|>b"


def test_cost_does_not_grow_with_the_text(smollm2):
    """The last thousand tokens of 20 thousand cost about what the first thousand did."""
    ids = smollm2.encode("The quick brown fox jumps over the lazy dog 🦊. " * 1600)[:20_000]
    assert len(ids) == 20_000
    detokenizer, times = Detokenizer(smollm2), []
    detokenizer.push(ids[:100])  # so that every token's piece is known
    for start in range(0, len(ids), 1000):
        begin = time.perf_counter()
        for token_id in ids[start : start + 1000]:
            detokenizer.push([token_id])
        times.append(time.perf_counter() - begin)
    assert min(times[-5:]) < 5 * min(times[:5])
