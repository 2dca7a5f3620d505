"""The kernels compile for an H200 without one, and ptxas finds nothing that would make them slow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# setmaxnreg ignored, wgmma serialized (three reasons)
SLOW = ("C7504", "C7509", "C7510", "C7512")


def _run(script: str, *arguments: int) -> tuple[str, str]:
    """Its stdout and stderr."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax[cuda13], no GPU")
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout, done.stderr


def test_no_spills_and_no_serialized_wgmma() -> None:
    report = "".join(_run("compile_for_h200.py"))
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", report)]
    assert spills and not any(spills), report[-4000:]
    assert not [code for code in SLOW if code in report]


# Two layers and the MTP module; on two stages a device has one of the layers, and half the module's heads and
# products, which must then be summed.
@pytest.mark.parametrize(("stages", "kernels", "caches"), [(1, 5 + 5 + 5, 6), (2, 5 + 3, 3)])
def test_the_engine_step_takes_the_kernels_and_copies_no_cache(
    stages: int, kernels: int, caches: int
) -> None:
    found = json.loads(_run("compile_engine_for_h200.py", stages, 2, 1)[0])
    assert found["kernels"] == kernels
    assert found["temporaries"] < found["one_cache"]
    assert found["aliased"] > caches * found["one_cache"]
