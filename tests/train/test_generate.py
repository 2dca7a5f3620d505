"""The target writes its text: by the real engine over a tiny random model with a chat template."""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mtp_jax.engine.engine import Engine
from mtp_jax.errors import InvalidValueError
from mtp_jax.request import RequestOutput
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.train import generate
from mtp_jax.train.corpus import Corpus, Origin, Sample, ShardHeader, read_header, shard_paths, write_shard
from mtp_jax.train.generate import GenerateOptions, generate_corpus
from mtp_jax.train.prompts import OpenTurn, prompt_ids, user_turn
from mtp_jax.train.repetition import distinct_share, loop_start, pooled_distinct_share
from mtp_jax.train.shelf import Counts, Shelf
from tests.parity.rig import TINY, Job, RandomSource, greedy, make_engine, run_jobs, tokens_of

LETTERS = [chr(code) for code in range(0x21, 0x7F)]
END = len(LETTERS)  # id of the token that ends a turn
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ChatSource(RandomSource):
    """Random weights, a token for each printable character, and a chat template with tokens of its own."""

    def __init__(self) -> None:
        size = len(LETTERS) + 3
        super().__init__(dataclasses.replace(TINY, vocab_size=size, eos_token_ids=(END,)))

    def tokenizer(self) -> Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(LETTERS)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<end>", "<user>", "<assistant>"])
        return Tokenizer(backend, "test", {}, TEMPLATE)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = make_engine(
        ChatSource(), num_speculative_tokens=0, max_num_seqs=6, max_model_len=128, prefill_chunk=64
    )
    yield made
    made.close()


def options(num_tokens: int, **values: object) -> GenerateOptions:
    return GenerateOptions(num_tokens=num_tokens, max_tokens=24, **values)  # type: ignore[arg-type]


def texts(corpus: Corpus) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(prompt.tolist()), tuple(completion.tolist())) for prompt, completion in corpus]


def test_the_target_writes_what_it_would_write(engine: Engine, tmp_path: Path) -> None:
    counts = generate_corpus(engine, tmp_path, options(600), use_tqdm=False)
    corpus = Corpus.open(tmp_path)
    # What was under way when enough was expected: two requests a slot at most.
    assert 600 <= corpus.num_tokens == counts.tokens < 600 + 24 * 12
    assert corpus.num_samples == counts.samples
    assert not engine.has_work() or engine.stats().num_running == engine.stats().num_waiting == 0
    assert np.unique(corpus.temperatures).tolist() == pytest.approx([0.0, 0.7, 1.0])
    samples = texts(corpus)
    assert len({completion for _, completion in samples}) == len(samples)
    assert all(len(completion) <= 24 and END not in completion[:-1] for _, completion in samples)
    greedy_ones = [sample for sample, t in zip(samples, corpus.temperatures, strict=True) if t == 0][:4]
    for prompt, completion in greedy_ones:
        alone = tokens_of(run_jobs(engine, {"alone": Job(prompt, greedy(24))})["alone"])
        assert tuple(alone[: len(completion)]) == completion  # a loop at the end was cut


def test_half_of_the_prompts_are_the_targets_own(engine: Engine, tmp_path: Path) -> None:
    counts = generate_corpus(engine, tmp_path, options(1000), use_tqdm=False)
    turn = OpenTurn.of(engine.tokenizer)
    assert turn is not None and turn.stop_token_ids == (END,)
    assert 0.6 * counts.requests < counts.turns < 1.4 * counts.requests
    assert counts.turns_dropped > 0  # those that do not end
    for prompt, _ in Corpus.open(tmp_path):
        text = engine.tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        assert text.startswith("<user>") and text.endswith("<end><assistant>"), text
        assert text.count("<user>") == text.count("<end>") == 1, text
    only = generate_corpus(engine, tmp_path / "none", options(100, own_prompts=0.0), use_tqdm=False)
    assert only.turns == only.turns_dropped == 0


def test_a_target_that_writes_no_turns_is_asked_no_more(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generate, "TURN_TOKENS", 1)
    with caplog.at_level(logging.WARNING):
        counts = generate_corpus(engine, tmp_path, options(1000), use_tqdm=False)
    assert counts.turns == 0 and counts.tokens >= 1000
    assert "no sound user turns" in caplog.text


def test_a_finished_run_does_nothing_and_a_longer_one_goes_on(engine: Engine, tmp_path: Path) -> None:
    first = generate_corpus(engine, tmp_path, options(400), use_tqdm=False)
    files = {path: path.read_bytes() for path in shard_paths(tmp_path)}
    again = generate_corpus(engine, tmp_path, options(400), use_tqdm=False)
    assert (again.samples, again.tokens, again.requests) == (first.samples, first.tokens, first.requests)
    assert {path: path.read_bytes() for path in shard_paths(tmp_path)} == files
    more = generate_corpus(engine, tmp_path, options(700), use_tqdm=False)
    corpus = Corpus.open(tmp_path)
    assert corpus.num_tokens == more.tokens >= 700 and more.requests > first.requests
    assert corpus.num_samples == more.samples
    assert all(path.read_bytes() == data for path, data in files.items())
    assert read_header(shard_paths(tmp_path)[-1]).num_requests == more.requests


def test_shards_of_the_work_share_a_folder(engine: Engine, tmp_path: Path) -> None:
    for index in (0, 1):
        generate_corpus(engine, tmp_path, options(400, shard=(index, 2), own_prompts=0.0), use_tqdm=False)
    names = [path.name for path in shard_paths(tmp_path)]
    assert names == ["0of2-seed0-00000.safetensors", "1of2-seed0-00000.safetensors"]
    assert Corpus.open(tmp_path).num_tokens >= 400
    parts = []
    for name in names:
        (tmp_path / name[:1]).mkdir()
        (tmp_path / name[:1] / name).write_bytes((tmp_path / name).read_bytes())
        parts.append({prompt for prompt, _ in texts(Corpus.open(tmp_path / name[:1]))})
    assert parts[0] and parts[1] and not parts[0] & parts[1]


def test_a_killed_run_keeps_what_it_had(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = iter(range(150)), engine.step

    def interrupted() -> list[RequestOutput]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate_corpus(engine, tmp_path, options(10**6), use_tqdm=False)
    kept = Corpus.open(tmp_path)
    assert kept.num_samples > 5
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    generate_corpus(engine, tmp_path, options(kept.num_tokens + 200), use_tqdm=False)
    assert texts(Corpus.open(tmp_path))[: kept.num_samples] == texts(kept)


def test_it_stops_when_time_is_up(engine: Engine, tmp_path: Path) -> None:
    counts = generate_corpus(engine, tmp_path, options(10**7, seconds=0.5), use_tqdm=False)
    assert counts.seconds >= 0.5 and counts.tokens < 10**7
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_it_stops_when_prompts_bring_nothing_new(engine: Engine, tmp_path: Path) -> None:
    few = options(10**6, temperatures=((0.0, 1.0),), own_prompts=0.0)
    few = dataclasses.replace(few, conversations=[user_turn("one"), user_turn("two")])
    counts = generate_corpus(engine, tmp_path, few, use_tqdm=False)
    assert counts.samples <= 2
    assert counts.duplicates + counts.loops_dropped > 50
    prompts = {prompt for prompt, _ in texts(Corpus.open(tmp_path))} if counts.samples else set()
    assert prompts <= {prompt_ids(engine.tokenizer, each) for each in few.conversations}
    held = dataclasses.replace(few, held_out=few.conversations)
    counts = generate_corpus(engine, tmp_path / "held", held, use_tqdm=False)
    assert counts.samples == 0 and counts.held_out > 50


def test_two_writers_of_one_part_overwrite_nothing(tmp_path: Path) -> None:
    shelves = [Shelf(tmp_path, "0of1-seed0", Origin("t", 9, "f"), {}, Counts()) for _ in range(2)]
    for number in range(4):
        shelves[number % 2].put(Sample([1], [number], 0.0))
        shelves[number % 2].flush()
    assert [path.name for path in tmp_path.iterdir() if path not in shard_paths(tmp_path)] == []
    assert texts(Corpus.open(tmp_path)) == [((1,), (number,)) for number in range(4)]


def test_a_folder_of_another_target_is_refused(engine: Engine, tmp_path: Path) -> None:
    write_shard(tmp_path / "x.safetensors", ShardHeader(Origin("other", 9, "f")), [])
    with pytest.raises(InvalidValueError, match=r"x\.safetensors.*other"):
        generate_corpus(engine, tmp_path, options(10), use_tqdm=False)


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"num_tokens": 0}, "--tokens"),
        ({"seconds": 0}, "--seconds"),
        ({"shard": (2, 2)}, "--shard"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"own_prompts": 1.5}, "--own-prompts"),
        ({"temperatures": ()}, "--temperatures"),
        ({"temperatures": ((0.5, 0.0),)}, "--temperatures"),
    ],
)
def test_bad_options_are_refused(values: dict, flag: str) -> None:
    with pytest.raises(InvalidValueError, match=flag):
        GenerateOptions(**({"num_tokens": 10} | values))  # type: ignore[arg-type]


def test_parts_of_the_shards_add_up() -> None:
    assert sum(options(1000, shard=(i, 7)).own_tokens for i in range(7)) == 1000


def test_distinct_share() -> None:
    assert distinct_share([1, 2, 3]) == 1.0
    assert distinct_share([1, 2, 3, 4, 5]) == 1.0
    assert distinct_share([1] * 11) == 1 / 8
    assert pooled_distinct_share([[1, 2, 3, 4], [1, 2, 3, 4], [4, 5, 6, 7]]) == 2 / 3
    assert pooled_distinct_share([]) == 1.0


def test_loops_are_cut_where_they_begin() -> None:
    story, phrase = list(range(100, 160)), [1, 2, 3, 4, 5]
    for text in (story, [*story, *phrase], [*story, *phrase * 3], [], [1, 2]):
        assert loop_start(text, 0.5, 16.0) == len(text)
    # The 4-grams that begin within the first phrase are new; the last of them ends three tokens after it.
    assert loop_start([*story, *phrase * 30], 0.5, 16.0) == len(story) + len(phrase) + 3
    # A long text has more than half distinct 4-grams in spite of a long loop at its end.
    long = list(range(100, 400))
    assert distinct_share([*long, *phrase * 10]) > 0.5
    assert loop_start([*long, *phrase * 10], 0.5, 16.0) < len(long) + 2 * len(phrase)
    assert loop_start([7] * 50, 0.5, 16.0) == 4
