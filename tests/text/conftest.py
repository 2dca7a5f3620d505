"""Tokenizers of three kinds: the default model's, SentencePiece's and a Hugging Face directory's."""

from pathlib import Path

import pytest

from mtp_jax.loading import resolve_model
from mtp_jax.text.from_gguf import tokenizer_from_gguf
from mtp_jax.text.from_hf import tokenizer_from_directory
from tests.text.reference import sentence_piece_metadata

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def smollm2():
    return resolve_model(None).tokenizer()


@pytest.fixture(scope="session")
def sentence_piece():
    return tokenizer_from_gguf(sentence_piece_metadata(), "tiny.gguf")


@pytest.fixture(scope="session")
def byte_tokens():
    return tokenizer_from_directory(GOLDEN / "tiny_mimo")
