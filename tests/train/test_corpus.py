"""Shards on disk and the corpus that they make."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from mtp_jax.errors import InvalidValueError
from mtp_jax.train.corpus import (
    Corpus,
    Origin,
    Sample,
    ShardHeader,
    fingerprint,
    read_header,
    shard_paths,
    write_shard,
)
from tests.parity.rig import TINY, RandomSource

ORIGIN = Origin("tiny", 50, "abc")


def draw(count: int, seed: int = 0) -> list[Sample]:
    """Samples with prompts of 1 to 5 tokens and completions of 1 to 9, all completions different."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        prompt = rng.integers(0, 50, rng.integers(1, 6)).tolist()
        completion = [seed, index, *rng.integers(0, 50, rng.integers(0, 8)).tolist()]
        samples.append(Sample(prompt, completion, float(index % 3)))
    return samples


def write(folder: Path, *groups: list[Sample], header: ShardHeader | None = None) -> None:
    for number, samples in enumerate(groups):
        write_shard(folder / f"s-{number}.safetensors", header or ShardHeader(ORIGIN, number), samples)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    first, second = draw(7), draw(5, seed=1)
    write(tmp_path, first, second)
    corpus = Corpus.open(tmp_path)
    assert corpus.origin == ORIGIN and corpus.num_samples == 12
    got = [(prompt.tolist(), completion.tolist()) for prompt, completion in corpus]
    assert got == [(s.prompt, s.completion) for s in first + second]
    assert corpus.temperatures.tolist() == [s.temperature for s in first + second]
    assert corpus.num_tokens == sum(len(s.completion) for s in first + second)
    assert read_header(shard_paths(tmp_path)[1]).num_requests == 1
    assert not list(tmp_path.glob("*partial*"))


def test_token_counts_are_of_completions_only(tmp_path: Path) -> None:
    write(tmp_path, [Sample([1, 1, 2], [3, 1], 0.0), Sample([4], [3, 3, 5], 0.0)])
    counts = Corpus.open(tmp_path).token_counts(8)
    assert counts.tolist() == [0, 1, 0, 3, 0, 1, 0, 0]


def test_equal_completions_count_once(tmp_path: Path) -> None:
    write(tmp_path, [Sample([1], [3, 4], 0.0), Sample([1], [3], 0.0)], [Sample([2], [3, 4], 1.0)])
    got = [(prompt.tolist(), completion.tolist()) for prompt, completion in Corpus.open(tmp_path)]
    assert got == [([1], [3, 4]), ([1], [3])]


def test_split_parts_share_no_prompt(tmp_path: Path) -> None:
    samples = [dataclasses.replace(s, prompt=[i % 10]) for i, s in enumerate(draw(40))]
    write(tmp_path, samples)
    corpus = Corpus.open(tmp_path)
    train, held_out = corpus.split(4, seed=3)
    prompts = [{tuple(prompt.tolist()) for prompt, _ in part} for part in (train, held_out)]
    assert held_out.num_samples == 4 and train.num_samples == 40 - 4 * len(prompts[1])
    assert not prompts[0] & prompts[1]
    every = {tuple(completion.tolist()) for _, completion in corpus}
    assert {tuple(c.tolist()) for part in (train, held_out) for _, c in part} <= every
    again = corpus.split(4, seed=3)[1]
    assert np.array_equal(again.tokens, held_out.tokens)
    assert not np.array_equal(corpus.split(4, seed=4)[1].tokens, held_out.tokens)
    for count in (40, -1, 39):  # of 39, no prompt is left for training
        with pytest.raises(InvalidValueError, match="--held-out-samples"):
            corpus.split(count, seed=0)


def test_shards_of_another_target_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, draw(2))
    for change in ({"target": "other"}, {"vocab_size": 51}, {"tokenizer": "x"}):
        header = ShardHeader(dataclasses.replace(ORIGIN, **change))
        write_shard(tmp_path / "z.safetensors", header, draw(2, seed=1))
        with pytest.raises(InvalidValueError, match=rf"z\.safetensors.*{next(iter(change))}"):
            Corpus.open(tmp_path)


def test_broken_shards_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="--data"):
        Corpus.open(tmp_path)
    write(tmp_path, draw(3))
    (path,) = shard_paths(tmp_path)
    whole = path.read_bytes()
    arrays = safetensors.numpy.load(whole)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    broken = [
        whole[:-3],
        b"",
        safetensors.numpy.save(arrays),
        safetensors.numpy.save(arrays, {"corpus": '{"format": 99}'}),
        safetensors.numpy.save({k: v for k, v in arrays.items() if k != "offsets"}, metadata),
        safetensors.numpy.save(arrays | {"tokens": arrays["tokens"] + 50}, metadata),
        safetensors.numpy.save(arrays | {"tokens": arrays["tokens"][1:]}, metadata),
        safetensors.numpy.save(arrays | {"offsets": arrays["offsets"][:-1]}, metadata),
        safetensors.numpy.save(arrays | {"prompt_lengths": arrays["prompt_lengths"] + 99}, metadata),
        safetensors.numpy.save(arrays | {"tokens": arrays["tokens"].astype(np.int64)}, metadata),
    ]
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(InvalidValueError, match=r"s-0\.safetensors"):
            Corpus.open(tmp_path)
    path.write_bytes(whole)
    assert Corpus.open(tmp_path).num_samples == 3


def test_fingerprint_tells_tokenizers_apart() -> None:
    one = RandomSource(TINY).tokenizer()
    assert fingerprint(one) == fingerprint(RandomSource(TINY, seed=1).tokenizer())
    smaller = RandomSource(dataclasses.replace(TINY, vocab_size=96)).tokenizer()
    assert fingerprint(one) != fingerprint(smaller)
