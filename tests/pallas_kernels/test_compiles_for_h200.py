"""The kernels compile for an H200 without one, and ptxas finds nothing that would make them slow."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_for_h200.py"
# setmaxnreg ignored, wgmma serialized (three reasons)
SLOW = ("C7504", "C7509", "C7510", "C7512")


def test_no_spills_and_no_serialized_wgmma() -> None:
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax[cuda13], no GPU")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-2000:]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", report)]
    assert spills and not any(spills), report[-4000:]
    assert not [code for code in SLOW if code in report]
