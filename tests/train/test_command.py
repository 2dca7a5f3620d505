"""The whole command: the target writes text, and a head is trained on it."""

import os
import signal
from pathlib import Path

import pytest

from mtp_jax.errors import InvalidValueError
from mtp_jax.train import __main__ as command
from mtp_jax.train.__main__ import main
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.curves import read_curves
from mtp_jax.train.text import needs_text
from tests.house.source import ROOT

TARGET = ROOT / "tests" / "golden" / "tiny_mimo"


A, B, C = (f"{part}-seed0-00000.safetensors" for part in ("0of1", "0of2", "1of2"))
ENDED_A, ENDED_B, ENDED_C = (f"written-{part}-seed0.json" for part in ("0of1", "0of2", "1of2"))


@pytest.mark.parametrize(
    ("files", "needed"),
    [
        ([], True),
        (["by-hand.safetensors"], False),
        ([A], True),  # this command's own part, whose writing was stopped
        ([A, ENDED_A], False),
        ([B, ENDED_B, C, ENDED_C], False),
        ([B, ENDED_B], "1of2-seed0"),  # it has not begun
        ([B, C, ENDED_B], "1of2-seed0"),
        (["by-hand.safetensors", A, ENDED_A, B, C, ENDED_C], "0of2-seed0"),
    ],
)
def test_when_text_is_written(tmp_path: Path, files: list[str], needed: bool | str) -> None:
    (tmp_path / "data").mkdir()
    for name in files:
        (tmp_path / "data" / name).touch()
    given = TrainOptions(out="elsewhere", data=str(tmp_path / "data"))
    for options in (TrainOptions(out=str(tmp_path)), given):
        if isinstance(needed, bool):
            assert needs_text(options) is needed
        else:
            with pytest.raises(InvalidValueError, match=f"--data: .*; {needed} has not"):
                needs_text(options)


def test_an_unusable_folder_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for argv in (["--out", f"{tmp_path}/file"], ["--out", f"{tmp_path}/o", "--data", f"{tmp_path}/file"]):
        assert main([*argv, "--devices", "1"]) == 2
        line = capfd.readouterr().err
        assert line.startswith(
            f"python -m mtp_jax.train: {argv[-2]}: got '{tmp_path}/file'; expected a folder"
        )
        assert line.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_in_order(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What runs can clean up behind itself; then it is one line, and the shell's exit code."""
    cleaned = []

    def run(options: TrainOptions) -> None:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            cleaned.append(options.out)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "run", run)
    assert main(["--out", "o", "--devices", "1"]) == 128 + number
    assert cleaned == ["o"] and signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err == "python -m mtp_jax.train: stopped; the same command goes on\n"


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
