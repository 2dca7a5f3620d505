"""Packing: every token of every sample once an epoch, marked for what it is."""

import time
from pathlib import Path

import numpy as np
import pytest

from mtp_jax.errors import InvalidValueError
from mtp_jax.train.corpus import Corpus, Origin
from mtp_jax.train.packing import Batch, Packer

LENGTH = 32


def make(lengths: np.ndarray, prompts: np.ndarray) -> Corpus:
    """Samples whose tokens tell the sample and the place: 100 * sample + place."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    tokens = (100 * np.repeat(np.arange(len(lengths)), lengths) + place).astype(np.int32)
    origin = Origin("t", int(tokens.max()) + 1, "t")
    return Corpus(origin, tokens, offsets, prompts.astype(np.int32), np.zeros(len(lengths), np.float32))


def random_corpus(count: int, longest: int = LENGTH, seed: int = 0) -> Corpus:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, count)
    return make(lengths, rng.integers(0, lengths))


def samples_of(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    """Tokens and loss mask of every segment; checks positions and padding."""
    found = []
    for row in range(len(batch.tokens)):
        segments = batch.segments[row]
        used = np.count_nonzero(segments)
        assert (segments[:used] > 0).all() and (np.diff(segments[:used]) >= 0).all()
        for array in (batch.tokens, batch.segments, batch.positions, batch.loss_mask):
            assert not array[row, used:].any()
        for number in range(1, segments.max() + 1):
            at = segments == number
            assert batch.positions[row, at].tolist() == list(range(at.sum()))
            found.append((batch.tokens[row, at].tolist(), batch.loss_mask[row, at].tolist()))
    return found


def test_an_epoch_has_every_sample_once() -> None:
    corpus = random_corpus(101)
    packer = Packer(corpus, rows=1, length=LENGTH, seed=0)
    got = sorted(
        sample for step in range(packer.steps_per_epoch) for sample in samples_of(packer.batch(step))
    )
    expected = [
        ([*prompt.tolist(), *text.tolist()], [False] * len(prompt) + [True] * len(text))
        for prompt, text in corpus
    ]
    assert got == sorted(expected)
    assert packer.fill > 0.9


def test_batches_are_a_function_of_seed_and_step() -> None:
    corpus = random_corpus(60)
    one, two = (Packer(corpus, rows=4, length=LENGTH, seed=5) for _ in range(2))
    steps = [0, 3 * one.steps_per_epoch + 1, 1, one.steps_per_epoch]
    drawn = {step: one.batch(step) for step in steps}
    for step in sorted(steps):
        again = two.batch(step)
        for name in ("tokens", "segments", "positions", "loss_mask"):
            array = getattr(again, name)
            assert array.shape == (4, LENGTH)
            assert array.dtype == (np.bool_ if name == "loss_mask" else np.int32)
            assert np.array_equal(array, getattr(drawn[step], name))
    assert not np.array_equal(drawn[0].tokens, drawn[one.steps_per_epoch].tokens)  # epochs differ
    assert not np.array_equal(drawn[0].tokens, Packer(corpus, 4, LENGTH, seed=6).batch(0).tokens)


def test_long_samples_are_cut_and_prompts_without_room_left_out() -> None:
    corpus = make(np.array([50, 60, 4]), np.array([10, LENGTH, 3]))
    packer = Packer(corpus, rows=3, length=LENGTH, seed=0)
    assert packer.num_rows == 2 and packer.steps_per_epoch == 1  # one row of three has nothing
    batch = packer.batch(0)
    assert sorted(samples_of(batch)) == [
        (list(range(LENGTH)), [False] * 10 + [True] * (LENGTH - 10)),
        (list(range(200, 204)), [False] * 3 + [True]),
    ]
    assert batch.num_tokens == LENGTH + 4


def test_what_cannot_be_packed_is_refused() -> None:
    corpus = random_corpus(3)
    for rows, length, field in ((0, 8, "rows"), (1, 0, "--sequence-length"), (1, 1, "--sequence-length")):
        with pytest.raises(InvalidValueError, match=field):
            Packer(make(np.array([5, 5]), np.array([3, 4])) if length == 1 else corpus, rows, length, 0)


def test_a_million_tokens_a_second(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 400, 4000)
    packer = Packer(make(lengths, np.full(4000, 39)), rows=32, length=1024, seed=0)
    assert packer.fill > 0.98
    packer.batch(0)
    began, tokens = time.thread_time(), 0  # of this thread: other work does not count
    for step in range(20):
        tokens += packer.batch(step).num_tokens
    assert tokens / (time.thread_time() - began) > 1e6
