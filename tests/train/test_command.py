"""The whole command: the target writes text, and a head is trained on it."""

from pathlib import Path

import pytest

from mtp_jax.train.__main__ import main
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.curves import read_curves
from mtp_jax.train.text import needs_text
from tests.house.source import ROOT

TARGET = ROOT / "tests" / "golden" / "tiny_mimo"


@pytest.mark.parametrize(
    ("files", "needed"),
    [
        ([], True),
        (["a.safetensors"], True),  # its writing was stopped
        (["a.safetensors", "written-0of1-seed0.json"], False),
        (["a.safetensors", "written-0of2-seed0.json"], True),
        (["a.safetensors", "written-0of2-seed0.json", "written-1of2-seed0.json"], False),
    ],
)
def test_when_text_is_written(tmp_path: Path, files: list[str], needed: bool) -> None:
    (tmp_path / "data").mkdir()
    for name in files:
        (tmp_path / "data" / name).touch()
    assert needs_text(TrainOptions(out=str(tmp_path))) is needed
    given = TrainOptions(out="elsewhere", data=str(tmp_path / "data"))
    assert needs_text(given) is not bool(files)  # a user's own folder is taken as it is


@pytest.mark.slow
def test_from_a_model_to_its_head(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    argv = ["--out", str(out), "--model", str(TARGET), "--tokens", "3000", "--max-num-seqs", "8"]
    argv += ["--sequence-length", "64", "--batch-tokens", "512", "--steps", "4", "--held-out-samples", "8"]
    argv += ["--draft-vocab-size", "64", "--devices", "1"]
    assert main(argv) == 0
    assert (out / "mtp_head.safetensors").is_file()
    curves = read_curves(out / "curves.jsonl")
    assert curves[-1]["step"] == 4
    capfd.readouterr()
    assert main(argv) == 0  # nothing is left to do, and nothing is done again
    assert "generating" not in capfd.readouterr().err
    assert read_curves(out / "curves.jsonl") == curves
    assert main([*argv, "--seed", "1"]) == 2
    assert "--seed: got 1; expected 0, as the run in" in capfd.readouterr().err
