"""A small SentencePiece-like vocabulary as a GGUF file would describe it, and a plain encoder for it."""

import itertools

from mtp_jax.text import Tokenizer
from mtp_jax.text.token_bytes import byte_alphabet

PIECES = [
    "▁",
    "a",
    "b",
    "c",
    "h",
    "e",
    "l",
    "o",
    "ll",
    "he",
    "hell",
    "hello",
    "▁hello",
    "ab",
    "▁a",
    "▁ab",
    ".",
]
SCORES = [
    -9.0,
    -9.1,
    -9.2,
    -9.3,
    -9.4,
    -9.5,
    -9.6,
    -9.7,
    -1.0,
    -2.0,
    -3.0,
    -4.0,
    -5.0,
    -6.0,
    -7.0,
    -8.0,
    -9.8,
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = SPECIAL + BYTES + PIECES


def spelled(tokenizer: Tokenizer, text: str) -> str:
    """The text without characters that the vocabulary cannot spell.

    SmolLM2's lacks a few control bytes and those that begin characters beyond U+3FFFF; SentencePiece
    takes its own sign for a space.
    """
    if not tokenizer.token_text.byte_level:
        return text.replace("▁", "")
    known = {
        byte for sign, byte in byte_alphabet().items() if tokenizer._backend.token_to_id(sign) is not None
    }
    return "".join(character for character in text if known.issuperset(character.encode()))


def sentence_piece_metadata() -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [0.0] * (len(SPECIAL) + 256) + SCORES,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def encode(text: str) -> list[int]:
    """SentencePiece's rule: always join the neighbours whose joint piece has the best score."""
    parts = list(("▁" + text if text else "").replace(" ", "▁"))
    score = dict(zip(PIECES, SCORES, strict=True))
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        if part in score:
            ids.append(TOKENS.index(part))
        else:
            ids += [TOKENS.index(f"<0x{byte:02X}>") for byte in part.encode()]
    return ids
