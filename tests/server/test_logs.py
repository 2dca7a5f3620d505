"""Loading as a person sees it, and as a log collector does."""

import logging

import pytest

from mtp_jax.progress import PhaseBars
from mtp_jax.server.logs import Progress


def test_a_bar_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    bars = PhaseBars()
    for phase, total in (("reading", 3), ("compiling", 2)):
        for done in range(total + 1):
            bars(phase, done, total)
    bars("placing", 0, 4)
    bars.close()
    bars.close()
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if line]
    lasts = {line.split()[0]: line.split()[1] for line in lines}
    assert lasts == {"reading": "100%", "compiling": "100%", "placing": "0%"}


def test_structured_progress_is_a_record_for_each_phase(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(structured=True)
    with caplog.at_level(logging.INFO, "mtp_jax"):
        for done in range(4):
            progress("reading", done, 3)
        progress("placing", 1, 1)
    progress.close()
    assert [record.message for record in caplog.records] == ["reading", "placing"]
    assert capsys.readouterr().err == "" and progress.seconds >= 0
