"""The n-gram hash in pairs of 32-bit words against Python's integers, wrapped as torch's int64 are."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.config import NgramConfig
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.models.ngram import hash_constants, multiply, ngram_rows, remainder

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "tiny_qwen4_exp"


def published() -> NgramConfig:
    """The constants of Qwen3.8-Flash-Next."""
    multipliers, sizes = hash_constants(248320, 3, 8, 20_000_000, 1234)
    return NgramConfig(1, 3, 8, 2560, 4, multipliers, sizes, 320_001_536, 128, 248044)


def wrapped(value: int) -> int:
    """A signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def rows_of(tokens: list[int], ngram: NgramConfig) -> list[int]:
    """The rows of the last token's n-grams, in wrapping 64-bit integers."""
    back, rows, offset = tokens[::-1], [], 0
    for place in range(1, ngram.order):
        if back[place] == ngram.eos:
            back[place:] = [ngram.eos] * (ngram.order - place)
            break
    mixed = wrapped(back[0] * ngram.multipliers[0])
    for order in range(1, ngram.order):
        mixed ^= wrapped(back[order] * ngram.multipliers[order])
        for size in ngram.sizes[(order - 1) * ngram.heads : order * ngram.heads]:
            rows.append(mixed % size + offset)
            offset += size
    return rows


def test_published_constants() -> None:
    """As they are in the published checkpoint."""
    ngram = published()
    assert ngram.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert ngram.sizes[0] == 20_000_003
    assert -(-sum(ngram.sizes) // 128) * 128 == ngram.rows


@pytest.mark.parametrize("factor", [1, 23703573157769, 2**62 + 12345, 2**63 - 1])
def test_products_wrap(factor: int) -> None:
    ids = np.array([0, 1, 2, 65535, 65536, 248319, 2**31 - 1, -1, -77, -(2**31)], np.int32)
    high, low = (np.asarray(word).astype(np.uint64) for word in multiply(jnp.asarray(ids), factor))
    found = ((high << np.uint64(32)) | low).astype(np.int64)
    assert found.tolist() == [wrapped(int(one) * factor) for one in ids]
    for sizes in ((2, 37, 20_000_003), (2**31 - 1, 5)):
        rest = remainder(multiply(jnp.asarray(ids)[:, None], factor), sizes)
        assert np.asarray(rest).tolist() == [
            [wrapped(int(one) * factor) % size for size in sizes] for one in ids
        ]


@pytest.mark.parametrize("largest", [248320, 2**31 - 1])
def test_rows(largest: int) -> None:
    """Ids of the vocabulary, and some so large that products overflow."""
    ngram, rng = published(), np.random.default_rng(0)
    tokens = rng.integers(0, largest, (200, 3)).astype(np.int32)
    tokens[::5, 1] = ngram.eos
    tokens[::7, 0] = ngram.eos
    tokens[::11, 2] = ngram.eos
    found = np.asarray(ngram_rows(jnp.asarray(tokens), ngram))
    assert found.tolist() == [rows_of(row, ngram) for row in tokens.tolist()]
    products = [int(id) * m for row in tokens for id, m in zip(row[::-1], ngram.multipliers, strict=True)]
    assert any(product >= 1 << 63 for product in products) == (largest > 248320)


def test_rows_of_the_golden() -> None:
    """transformers' rows over a text, n-grams ended by end-of-sequence tokens and by its beginning."""
    ngram = config_from_directory(TINY).ngram
    assert ngram is not None
    with np.load(GOLDEN / "tiny_qwen4_exp.npz") as golden:
        ids, wanted = golden["ids"], golden["ngram_ids"]
    text = np.concatenate([np.full(ngram.context, ngram.eos), ids]).astype(np.int32)
    windows = np.stack([text[first : first + len(ids)] for first in range(ngram.order)], axis=1)
    np.testing.assert_array_equal(ngram_rows(jnp.asarray(windows), ngram), wanted)
    assert ngram.eos == json.loads((TINY / "config.json").read_text())["text_config"]["eos_token_id"]
