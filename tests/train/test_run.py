"""Whole runs of the trainer on a tiny model: from text on disk to a head that the loader takes."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import open_mtp_head, resolve_model
from mtp_jax.models.registry import mtp_table
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.corpus import Origin, Sample, ShardHeader, fingerprint, write_shard
from mtp_jax.train.curves import read_curves
from mtp_jax.train.launch import remember, train_head
from mtp_jax.train.packing import Batch, Packer
from tests.house.source import ROOT

TARGET = ROOT / "tests" / "golden" / "tiny_mimo"
SMALL = {
    "model": str(TARGET),
    "steps": 12,
    "batch_tokens": 512,
    "micro_batch_tokens": 256,
    "sequence_length": 32,
    "held_out_samples": 16,
    "evaluate_every": 5,
    "checkpoint_every": 4,
    "num_speculative_tokens": 2,
    "draft_vocab_size": 64,
    "devices": 2,
    "learning_rate": 3e-3,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of random text: what the target says of it is as good to learn as what it says of its own."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    tokenizer = resolve_model(TARGET).tokenizer()
    origin = Origin("tiny_mimo", tokenizer.vocab_size, fingerprint(tokenizer))

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(0, 200, rng.integers(least, most)).tolist()

    drawn = [Sample(ids(1, 5), ids(6, 28), float(i % 2)) for i in range(96)]
    write_shard(folder / "0.safetensors", ShardHeader(origin), drawn)
    return folder


def options(out: Path, text: Path, **changes: object) -> TrainOptions:
    return TrainOptions(**SMALL | {"out": str(out), "data": str(text)} | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("run")
    train_head(options(folder, text))
    return folder


def test_it_learns(run: Path) -> None:
    records = read_curves(run / "curves.jsonl")
    held_out = [record for record in records if record["kind"] == "held_out"]
    assert [record["step"] for record in held_out] == [5, 10, 12]
    assert np.all(np.array(held_out[-1]["loss"]) < np.array(held_out[0]["loss"]))


def test_the_head_is_one_that_the_loader_takes(run: Path) -> None:
    """And it is what the run trained: the average of its weights, rounded to bfloat16."""
    source = resolve_model(TARGET)
    head = open_mtp_head(run / "mtp_head.safetensors", source.config)
    assert head.draft_vocab == 64 and head.fits(source)
    metadata = head.tensors.metadata
    assert metadata["steps"] == "12"
    last = read_curves(run / "curves.jsonl")[-1]
    # The text has samples of both kinds: what counts is the greedy ones.
    assert last["accepted"] != last["accepted_greedy"]
    assert metadata["acceptance"] == " ".join(f"{share:.4f}" for share in last["accepted_greedy"])  # type: ignore[union-attr]
    assert metadata["acceptance_of"] == "greedy text"
    state = ocp.StandardCheckpointer().restore((run / "checkpoints" / "12" / "default").resolve())
    for leaf in mtp_table(source.config):
        expected = np.asarray(state["average"][leaf.name]).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(leaf.read(head.read, "model.mtp_layers.0."), expected)


def test_the_report_and_the_picture(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    last = read_curves(run / "curves.jsonl")[-1]
    assert report["steps"] == 12
    assert report["held_out"] == {key: last[key] for key in report["held_out"]}
    assert report["target"] == "tiny_mimo" and report["tokens_per_second"] > 0
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_devices_share_a_batch(run: Path, tmp_path: Path, text: Path) -> None:
    """One device computes what two compute: micro-batches of whole rows, gradients that are summed."""
    train_head(options(tmp_path, text, devices=1))
    one, two = (read_curves(folder / "curves.jsonl") for folder in (tmp_path, run))
    assert len(one) == len(two)
    losses = [np.array([record["loss"] for record in records]) for records in (one, two)]
    # fp32 sums in another order; AdamW's square roots of tiny gradients spread them (measured: 2e-7).
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


class Killed(Exception):
    pass


def test_a_resumed_run_has_the_same_curve(
    run: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped right behind the checkpoint of update 4, then in update 8: 5, 6 and 7 are done again."""
    real = Packer.batch
    for last, recorded in ((4, (4,)), (7, (5, 6, 7))):

        def killing(self: Packer, step: int, last: int = last) -> Batch:
            if step == last:
                raise Killed
            return real(self, step)

        with monkeypatch.context() as patch:
            patch.setattr(Packer, "batch", killing)
            with pytest.raises(Killed):
                train_head(options(tmp_path, text))
        assert read_curves(tmp_path / "curves.jsonl")[-1]["step"] in recorded
    train_head(options(tmp_path, text))
    assert (tmp_path / "curves.jsonl").read_text() == (run / "curves.jsonl").read_text()
    first, second = (load_file(folder / "mtp_head.safetensors") for folder in (run, tmp_path))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])
    report = (tmp_path / "report.json").read_bytes()
    assert train_head(options(tmp_path, text)).updates == 0
    assert (tmp_path / "report.json").read_bytes() == report


def test_a_time_limit_ends_it_with_a_head(tmp_path: Path, text: Path) -> None:
    outcome = train_head(options(tmp_path, text, time_limit=1e-9))
    assert outcome.steps == 0
    assert (tmp_path / "mtp_head.safetensors").is_file() and (tmp_path / "report.json").is_file()


def test_a_run_is_not_continued_with_other_options(run: Path, text: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"--learning-rate: got 0\.5; expected 0\.003"):
        train_head(options(run, text, learning_rate=0.5))


def test_a_cut_record_of_options_is_named(tmp_path: Path, text: Path) -> None:
    remember(tmp_path, options(tmp_path, text))
    whole = (tmp_path / "run.json").read_text()
    for broken in (whole[:-9], "[]"):
        (tmp_path / "run.json").write_text(broken)
        with pytest.raises(InvalidValueError, match=r"run\.json: got .* expected the options of a run"):
            remember(tmp_path, options(tmp_path, text))


def test_text_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    origin = Origin("other", 300, "0")
    write_shard(tmp_path / "0.safetensors", ShardHeader(origin), [Sample([1], [2, 3], 1.0)] * 3)
    with pytest.raises(InvalidValueError, match="--data: got 'a vocabulary of 300'"):
        train_head(options(tmp_path / "out", tmp_path))


def test_text_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    size = resolve_model(TARGET).tokenizer().vocab_size
    write_shard(
        tmp_path / "0.safetensors", ShardHeader(Origin("other", size, "0")), [Sample([1], [2, 3], 1.0)] * 3
    )
    with pytest.raises(InvalidValueError, match="--data: got 'text by other with the tokenizer 0'"):
        train_head(options(tmp_path / "out", tmp_path))
