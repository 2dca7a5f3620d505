"""Tokenizers against golden ids, and rebuilt from metadata of every known kind."""

import json
import threading
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from mtp_jax.errors import CheckpointError, InvalidRequestError
from mtp_jax.text import Tokenizer
from mtp_jax.text.from_gguf import tokenizer_from_gguf
from mtp_jax.text.from_hf import tokenizer_from_directory
from mtp_jax.text.token_bytes import byte_alphabet
from tests.text.conftest import GOLDEN
from tests.text.reference import TOKENS, encode, sentence_piece_metadata, spelled

TEXTS = json.loads((GOLDEN / "smollm2_tokenizer.json").read_text())["texts"]


@pytest.mark.parametrize("entry", TEXTS, ids=range(len(TEXTS)))
def test_golden_ids(smollm2, entry):
    assert smollm2.encode(entry["text"]) == entry["ids"]
    assert smollm2.decode(entry["ids"], skip_special_tokens=False) == entry["text"]


def test_golden_prompts(smollm2):
    golden = np.load(GOLDEN / "smollm2.npz")
    for name in ("essay", "program", "conversation"):
        ids = golden[f"{name}_ids"].tolist()
        assert len(ids) > 200
        assert smollm2.encode(smollm2.decode(ids, skip_special_tokens=False)) == ids


def special_tokens(tokenizer: Tokenizer) -> tuple[str, str]:
    """What a chat template sees of them."""
    shows = Tokenizer(tokenizer._backend, "", tokenizer._special_tokens, "{{ bos_token }} {{ eos_token }}")
    bos, eos = shows.apply_chat_template([]).split(" ")
    return bos, eos


def test_special_tokens(smollm2):
    assert smollm2.vocab_size == 49152
    assert special_tokens(smollm2) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.decode([2, 19556, 60000]) == "Hello"


@given(st.text())
def test_text_comes_back(smollm2, text):
    text = spelled(smollm2, text)
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@given(st.text("abchelo .Ж🦊", max_size=30))
def test_sentence_piece_against_its_plain_rule(sentence_piece, text):
    ids = sentence_piece.encode(text, add_special_tokens=False)
    assert ids == encode(text)
    assert sentence_piece.decode(ids) == text


def test_text_and_ids_that_cannot_be(smollm2):
    with pytest.raises(InvalidRequestError, match=r"prompt: got .*\\ud800.*lone surrogates"):
        smollm2.encode("a\ud800b")
    for ids in ([-1, 5], [2**32]):
        with pytest.raises(InvalidRequestError, match=r"tokens: got .*0 to 49151"):
            smollm2.decode(ids)
    assert smollm2.decode([]) == "" and smollm2.encode("") == []


def test_batches_are_one_after_another(smollm2, sentence_piece):
    for tokenizer in (smollm2, sentence_piece):
        texts = ["hello", "", "a longer one, with more tokens"]
        ids = tokenizer.encode_batch(texts)
        assert ids == [tokenizer.encode(text) for text in texts]
        assert tokenizer.decode_batch(ids) == texts == [tokenizer.decode(each) for each in ids]
        assert tokenizer.encode_batch(texts, add_special_tokens=False) == [
            tokenizer.encode(text, add_special_tokens=False) for text in texts
        ]
    with pytest.raises(InvalidRequestError, match="lone surrogates"):
        smollm2.encode_batch(["a", "\ud800"])
    with pytest.raises(InvalidRequestError, match="0 to 49151"):
        smollm2.decode_batch([[1], [-1]])


def longest_stall(work) -> tuple[float, float]:
    """Seconds that `work` takes in a thread, and the longest time that this thread stood still meanwhile."""
    thread = threading.Thread(target=work)
    stall, started = 0.0, time.monotonic()
    thread.start()
    while thread.is_alive():
        before = time.monotonic()
        time.sleep(0.001)
        stall = max(stall, time.monotonic() - before)
    return time.monotonic() - started, stall


def test_other_threads_run_while_a_long_text_is_tokenized(smollm2):
    words = np.random.default_rng(0).integers(97, 123, 400_000).astype(np.uint8)
    words[::9] = ord(" ")
    text = words.tobytes().decode()
    seconds, stall = longest_stall(lambda: smollm2.encode(text))
    assert stall < max(0.25, seconds / 3), (seconds, stall)
    ids = smollm2.encode(text) * 5
    seconds, stall = longest_stall(lambda: smollm2.decode(ids))
    assert stall < max(0.25, seconds / 3), (seconds, stall)


@given(st.text(max_size=40))
def test_no_text_is_longer_than_its_tokens_allow(smollm2, sentence_piece, text):
    for tokenizer in (smollm2, sentence_piece):
        kept = spelled(tokenizer, text)
        assert len(kept.encode()) <= tokenizer.max_text_bytes(len(tokenizer.encode(kept)))


def test_the_longest_token_and_composed_characters(smollm2):
    longest = max((smollm2.decode([token], False) for token in range(49152)), key=lambda t: len(t.encode()))
    assert smollm2.max_text_bytes(10) >= 10 * len(longest.encode()) > 200
    assert smollm2.max_text_bytes(10) <= 20 * len(longest.encode())
    qwen2 = tokenizer_from_gguf(byte_level_metadata(**{"tokenizer.ggml.pre": "qwen2"}), "tiny.gguf")
    decomposed = "\u03c5\u0308\u0301" * 50  # three times as many bytes as the character it becomes
    assert len(decomposed.encode()) <= qwen2.max_text_bytes(len(qwen2.encode(decomposed)))


def test_sentence_piece_adds_bos(sentence_piece):
    assert sentence_piece.encode("hello") == [1, TOKENS.index("▁hello")]
    assert sentence_piece.decode([1, TOKENS.index("▁hello"), 2]) == "hello"


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """GPT-2's kind with all bytes, two merges, a control and a user-defined token."""
    alphabet = [*byte_alphabet()]
    tokens = ["<|end|>", *alphabet, "ab", "Ġab", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 2) + [4],
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", [" 1234", "\n", "\n", "it", "'s", "\n"]),
        ("smollm", [" ", "1", "2", "3", "4", "\n", "\n", "it", "'s", "\n"]),
        ("qwen2", [" ", "1", "2", "3", "4", "\n\n", "it", "'s", "\n"]),
        ("llama-bpe", [" ", "123", "4", "\n\n", "it", "'s", "\n"]),
    ],
)
def test_pre_tokenizers_split_where_they_should(pre, words):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(**{"tokenizer.ggml.pre": pre}), "tiny.gguf")
    text = " 1234\n\nit's\n"
    split = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in split] == words


def test_added_tokens_of_gguf():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(), "tiny.gguf")
    ids = tokenizer.encode("ab ab<tool>ab<|end|>")
    tokens = [tokenizer._backend.id_to_token(i) for i in ids]
    assert tokens == ["ab", "Ġab", "<tool>", "ab", "<|end|>"]
    assert tokenizer.decode(ids) == "ab ab<tool>ab"  # a user-defined token is text, a control token is not


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_bos(changes, begins):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(**changes), "tiny.gguf")
    assert (tokenizer.encode("ab")[0] == 0) == begins
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != 0


def test_qwen2_composes_characters():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(**{"tokenizer.ggml.pre": "qwen2"}), "tiny.gguf")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tiny\.gguf: tokenizer\.ggml\.model: got 'bert'.*gpt2.*llama"),
        ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model: got None"),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre: got 'tekken'.*smollm"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens: got 'nothing'"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges: got 'nothing'"),
        ({"tokenizer.ggml.eos_token_id": 5000}, r"eos_token_id: got 5000.*index of the 260"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores: got 'too few or none'"),
        ({"tokenizer.ggml.model": ["llama"]}, r"tokenizer\.ggml\.model: got \['llama'\]"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, r"tokenizer\.ggml\.pre: got \['gpt-2'\]"),
        ({"tokenizer.ggml.token_type": 3}, r"tokenizer\.ggml\.token_type: got 3; expected a list"),
        ({"tokenizer.ggml.tokens": ["a", 5]}, r"tokenizer\.ggml\.tokens: got 'something else'"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"tokenizer\.ggml\.merges: got 'ab'.*space"),
        ({"tokenizer.ggml.merges": ["x yyy"]}, r"tokenizer\.ggml: got .*unusable"),
        ({"tokenizer.ggml.bos_token_id": -1}, r"bos_token_id: got -1.*index of the 260"),
    ],
)
def test_metadata_we_cannot_use(changes, message):
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(byte_level_metadata(**changes), "tiny.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.unknown_token_id": 10**6}, r"unknown_token_id: got 1000000.*index of the"),
        ({"tokenizer.ggml.unknown_token_id": "x"}, r"unknown_token_id: got 'x'"),
        ({"tokenizer.ggml.scores": ["x"] * len(TOKENS)}, r"tokenizer\.ggml\.scores"),
    ],
)
def test_sentence_piece_metadata_we_cannot_use(changes, message):
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(sentence_piece_metadata() | changes, "tiny.gguf")


def test_sentence_piece_without_space_prefix():
    metadata = sentence_piece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_from_gguf(metadata, "tiny.gguf")
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert ids == [TOKENS.index("hello")] and tokenizer.decode(ids) == "hello"


def test_hugging_face_directory(byte_tokens):
    assert byte_tokens.vocab_size == 256 and special_tokens(byte_tokens) == ("<|bos|>", "<|eos|>")
    ids = byte_tokens.encode("Hé 🦊<|eos|>")
    assert ids[-1] == 2 and len(ids) == 1 + 2 + 1 + 4 + 1
    assert byte_tokens.decode(ids) == "Hé 🦊"


def test_special_tokens_of_every_file(tmp_path, byte_tokens):
    (tmp_path / "tokenizer.json").write_text((GOLDEN / "tiny_mimo" / "tokenizer.json").read_text())
    assert special_tokens(tokenizer_from_directory(tmp_path)) == ("", "")
    names = {"eos_token": "<|pad|>", "bos_token": {"content": "<|bos|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert special_tokens(tokenizer_from_directory(tmp_path)) == ("<|bos|>", "<|pad|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    assert special_tokens(tokenizer_from_directory(tmp_path)) == ("<|bos|>", "<|eos|>")


def test_truncation_stored_in_the_file_is_not_applied(tmp_path, byte_tokens):
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "tiny_mimo" / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(tokenizer_from_directory(tmp_path).encode("x" * 20)) == 20


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"tokenizer\.json: got 'no such file'"),
        ({"tokenizer.json": "{}"}, r"tokenizer\.json: got \"?'?unreadable"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json: got .*unreadable"),
        ({"special_tokens_map.json": "[]"}, r"special_tokens_map\.json: got 'list'"),
        ({"tokenizer_config.json": "[" * 100_000}, r"tokenizer_config\.json: got .*unreadable"),
        ({"tokenizer_config.json": None}, r"tokenizer_config\.json: got .*unreadable"),
        ({"chat_template.jinja": None}, r"chat_template\.jinja: got .*unreadable"),
        ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja: got .*unreadable"),
        ({"tokenizer_config.json": '{"chat_template": ["x"]}'}, r"chat_template: got 'list'.*template"),
        ({"tokenizer_config.json": '{"chat_template": {"default": "x"}}'}, r"chat_template: got 'dict'"),
    ],
)
def test_directories_we_cannot_use(tmp_path, files, message):
    if files and "tokenizer.json" not in files:
        (tmp_path / "tokenizer.json").write_text((GOLDEN / "tiny_mimo" / "tokenizer.json").read_text())
    for name, content in files.items():
        if content is None:  # whatever is there, it cannot be read: root may read every file
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_decoders_that_cannot_be_streamed(decoder):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(CheckpointError, match=r"here: decoder: got .*ByteLevel"):
        Tokenizer(backend, "here", {})
