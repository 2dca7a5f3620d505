"""The planner's command line: tables, JSON, what to change, and mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_jax.plan.app import main
from mtp_jax.plan.devices import DEVICES
from tests.house.source import ROOT

PUBLISHED = sorted((ROOT / "configs/published").iterdir())
MIMO = str(ROOT / "configs/published/mimo_7b")
AIR = str(ROOT / "configs/published/glm_45_air")
FLAGS = {"stage": "--stages", "data": "--data", "tensor": "--tensor"}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main([*argv])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_every_preset_fits_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = ROOT / "configs" / f"{folder.name}.toml"
    code, out = run(capsys, str(folder), "--config", str(preset), "--device", "h200")
    assert code == 0, out
    assert "fits: " in out
    devices = int(out.split(" = ")[1].split(" x ")[0])
    if devices > 2:
        assert f"on {devices} H200" in preset.read_text()


def test_the_file_and_its_directory_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(capsys, MIMO, "--device", "h100", "--json")
    assert directory == run(capsys, f"{MIMO}/config.json", "--device", "h100", "--json")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(
        capsys, AIR, "--device", "tpu7x", "--stages", "4", "--stage-layers", "11,12,12,11",
        "--max-len", "4096", "--num-speculative-tokens", "1", "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["changes"] == []
    assert [stage["layers"] for stage in found["stages"]] == [[0, 10], [11, 22], [23, 34], [35, 45]]
    assert found["max_model_len"] == 4096 and found["num_speculative_tokens"] == 1
    assert found["bytes"]["total"] == sum(size for name, size in found["bytes"].items() if name != "total")
    assert found["bytes"]["total"] <= found["device"]["usable"] == DEVICES["tpu7x"].usable


def test_changes_lead_to_plans_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is suggested is tried: the same command with those flags fits."""
    asked = {"--stages": "2", "--dtype": "float32", "--max-len": "16384"}

    def plan(flags: dict[str, str]) -> tuple[int, dict]:
        code, out = run(
            capsys, AIR, "--device", "h200", "--json", *(word for pair in flags.items() for word in pair)
        )
        return code, json.loads(out)

    code, found = plan(asked)
    assert code == 1 and not found["fits"]
    same, more = found["changes"]
    assert same["devices"] == 2 and same["flags"]["--dtype"] == "bfloat16"
    assert more["devices"] > 2 and "--dtype" not in more["flags"]
    for change in found["changes"]:
        flags = {
            "--max-len" if flag == "--max-model-len" else flag: value
            for flag, value in change["flags"].items()
        }
        code, changed = plan(asked | flags)
        assert code == 0 and changed["bytes"]["total"] == change["total"]


def test_the_same_devices_with_another_type(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, AIR, "--device", "h200", "--stages", "4", "--dtype", "float32")
    assert code == 1
    assert "fits with --dtype bfloat16: " in out
    assert "fits with --stages 8 on 8 devices" in out


def test_pages_that_are_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, MIMO, "--device", "h100", "--num-pages", "10000000")
    assert code == 1
    assert "does not fit: --num-pages" in out and "fits without --num-pages" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([MIMO, "--device", "h200", "--stages", "37"], "--stages: got 37; expected 1 to 36"),
        (
            [MIMO, "--device", "h200", "--stage-layers", "36,1"],
            "--stage-layers: got '36,1'; expected 1 integers",
        ),
        (
            [MIMO, "--device", "h200", "--stages", "2", "--stage-layers", "20,20"],
            "2 numbers from 1 that add up to 36, the model's layers, such as 18,18",
        ),
        ([MIMO, "--device", "h200", "--stage-layers", "a"], "integers with commas between them"),
        (
            [MIMO, "--device", "h200", "--max-len", "40000"],
            "--max-model-len: got 40000; expected up to 32768",
        ),
        ([MIMO, "--device", "h300"], "invalid choice: 'h300'"),
        ([MIMO], "required: --device"),
        (["--device", "h200"], "MODEL_OR_CONFIG: got None; expected a directory with a config.json"),
        (["/nowhere", "--device", "h200"], "MODEL_OR_CONFIG: got '/nowhere'"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(argv)
    except SystemExit as error:
        code = error.code
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and message in err


def test_needs_no_device() -> None:
    """A back end that is not there would be an error at its first use."""
    run = subprocess.run(
        [sys.executable, "-m", "mtp_jax.plan", MIMO, "--device", "v6e", "--stages", "4"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "no_such_back_end"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "4 x v6e" in run.stdout


def test_a_layout_for_so_many_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` takes all of them, and what is printed as flags is the same plan."""
    mesh = ("--stages", "auto", "--tensor", "auto", "--data", "auto", "--json")
    code, out = run(capsys, AIR, "--device", "h200", "--devices", "8", *mesh)
    found = json.loads(out)
    sizes = found["mesh"]
    assert code == 0 and sizes["stage"] * sizes["data"] * sizes["tensor"] == 8
    assert found["max_num_seqs"] <= sizes["data"] * found["num_longest"]
    given = (word for axis, flag in FLAGS.items() for word in (flag, str(sizes[axis])))
    assert json.loads(run(capsys, AIR, "--device", "h200", *given, "--json")[1]) == found
    assert run(capsys, AIR, "--device", "v5e", "--devices", "8", *mesh)[0] == 1
    assert main([AIR, "--device", "h200", *mesh]) == 2
    assert "--devices: got None; expected how many there are" in capsys.readouterr().err
