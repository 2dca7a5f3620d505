"""Placed arrays: what is written comes back bit by bit, for the same layout only."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.convert import convert
from mtp_jax.engine.build import draw_blueprint
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.placed import load_weights
from mtp_jax.engine.weights import Weights
from mtp_jax.errors import CheckpointError, InvalidValueError
from mtp_jax.loading import PlacedDir, resolve_model
from mtp_jax.loading.placed_dir import MARKER
from mtp_jax.request import EngineRequest, SamplingParams
from tests.house.source import ROOT
from tests.loading.packers import edit_config
from tests.parity.rig import make_engine, renew

GOLDEN = Path(__file__).parents[1] / "golden"


def load(model: Path, dtype: str = "auto", head: str | None = None, **overrides: int) -> Weights:
    options = EngineOptions(str(model), mtp_head=head, dtype=dtype, overrides=overrides)
    blueprint = draw_blueprint(options)
    layout = blueprint.program.layout
    return load_weights(blueprint.source, layout, blueprint.read_mtp, lambda done, total: None)


def check_equal(got: Weights, expected: Weights) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype and mine.sharding == theirs.sharding
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize(
    ("name", "stages", "dtype", "tied"),
    [
        ("tiny_mimo", 2, "float32", False),
        ("tiny_mimo", 3, "bfloat16", True),
        ("tiny_deepseek_v3", 1, "bfloat16", False),
    ],
)
def test_arrays_come_back(tmp_path: Path, name: str, stages: int, dtype: str, tied: bool) -> None:
    model = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    edit_config(model, tie_word_embeddings=tied)
    convert(model, tmp_path / "out", dtype=dtype, layout={"stages": stages})
    assert isinstance(resolve_model(tmp_path / "out"), PlacedDir)
    got = load(tmp_path / "out", dtype, stages=stages)
    assert got.mtp is not None and (got.lm_head is None) == tied
    check_equal(got, load(model, dtype, stages=stages))
    plain = load(tmp_path / "out", dtype, stages=stages, num_speculative_tokens=0)
    assert plain.mtp is None
    check_equal(plain, load(model, dtype, stages=stages, num_speculative_tokens=0))


@pytest.mark.parametrize(("written", "read"), [(1, 2), (2, 1), (2, 2)])
def test_other_shards_of_the_same_arrays(tmp_path: Path, written: int, read: int) -> None:
    """Orbax places them anew: what does not change shapes needs no other checkpoint."""
    model = GOLDEN / "tiny_deepseek_v3"
    convert(model, tmp_path / "out", layout={"stages": 2, "tensor": written})
    check_equal(load(tmp_path / "out", stages=2, tensor=read), load(model, stages=2, tensor=read))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_mimo in two stages, by the command."""
    folder = tmp_path_factory.mktemp("placed") / "out"
    run = command(str(GOLDEN / "tiny_mimo"), str(folder), "--stages", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"mtp-jax serve --model {folder}\n"
    return folder


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mtp_jax.convert", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command(out: Path) -> None:
    check_equal(load(out, stages=2), load(GOLDEN / "tiny_mimo", stages=2))
    blueprint = draw_blueprint(EngineOptions(str(out), overrides={"stages": 2}))
    assert f"mimo, 49056 parameters, {out}, placed arrays of float32 for 2 stages" in blueprint.describe()
    prompt = "a b"
    assert blueprint.source.tokenizer().encode(prompt) == resolve_model(
        GOLDEN / "tiny_mimo"
    ).tokenizer().encode(prompt)


def test_an_engine_answers_from_them(out: Path) -> None:
    placed = make_engine(resolve_model(out), num_speculative_tokens=2, stages=2)
    answers = []
    for engine in (placed, renew(placed, resolve_model(GOLDEN / "tiny_mimo"))):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        engine.add_request(EngineRequest("a", (40, 41, 42), params))
        answers.append([])
        while engine.has_work():
            answers[-1] += [token for output in engine.step() for token in output.token_ids]
    assert len(answers[0]) == 12 and answers[0] == answers[1]


def test_a_separate_head_is_kept(tmp_path: Path) -> None:
    """With a list of the tokens that drafts are chosen from."""
    model, prefix = Path(shutil.copytree(GOLDEN / "tiny_mimo", tmp_path / "model")), "model.mtp_layers.0."
    tensors = load_file(model / "model.safetensors")
    head = {name: value for name, value in tensors.items() if name.startswith(prefix)}
    save_file(
        {name: value for name, value in tensors.items() if name not in head}, model / "model.safetensors"
    )
    ids = {prefix + "draft_vocab_ids": np.array([1, 5, 7, 8, 11], np.int32)}
    save_file(head | ids, model / "mtp_head.safetensors")
    convert(model, tmp_path / "out")
    got = load(tmp_path / "out")
    assert got.draft_head is not None
    check_equal(got, load(model))
    with pytest.raises(InvalidValueError) as error:
        load(tmp_path / "out", head=str(model / "mtp_head.safetensors"))
    assert str(error.value).endswith(
        "mtp_head.safetensors'; expected none: placed arrays have their own head"
    )


def test_another_layout_is_refused(out: Path) -> None:
    again = f"as {out} was written; `python -m mtp_jax.convert` writes others"
    with pytest.raises(InvalidValueError) as error:
        load(out)
    assert str(error.value) == f"--stages: got 1; expected 2, {again}"
    with pytest.raises(InvalidValueError) as error:
        load(out, "bfloat16", stages=2)
    assert str(error.value) == f"--dtype: got 'bfloat16'; expected float32, {again}"


def edited(out: Path, folder: Path, **fields: object) -> Path:
    copy = Path(shutil.copytree(out, folder / "copy"))
    marker = json.loads((copy / MARKER).read_text())
    (copy / MARKER).write_text(json.dumps(marker | fields))
    return copy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, f"{MARKER}: version: got 2; expected 1"),
        ({"arrays": {}}, "OUT: trunk.0.0: got None; expected [2, 32]: convert it again"),
        ({"layers": [[0], [1]]}, "OUT: layers: got [[0], [1]]; expected [[0, 1], [2]]: convert it again"),
        (
            {"mtp": None, "draft_vocab": "x"},
            f"{MARKER}: draft_vocab: got 'x'; expected an integer of at least 1",
        ),
    ],
)
def test_markers_refused(out: Path, tmp_path: Path, fields: dict[str, object], message: str) -> None:
    copy = edited(out, tmp_path, **fields)
    with pytest.raises(CheckpointError) as error:
        load(copy, stages=2)
    assert str(error.value).replace(str(copy), "OUT") == message


def test_arrays_that_are_gone(out: Path, tmp_path: Path) -> None:
    copy = edited(out, tmp_path)
    shutil.rmtree(copy / "target")
    with pytest.raises(
        CheckpointError, match=r"/target: got 'unreadable \(.*mtp_jax\.convert` writes them again$"
    ):
        load(copy, stages=2)


def test_no_tensors_by_name(out: Path) -> None:
    source = resolve_model(out)
    with pytest.raises(CheckpointError) as error:
        source.read("model.norm.weight")
    legal = "the checkpoint that it was made from: placed arrays have no tensors by name"
    assert str(error.value) == f"{out}: model.norm.weight: got 'no such tensor'; expected {legal}"


def test_what_cannot_be_converted(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError) as error:
        convert(out, tmp_path / "new")
    assert str(error.value) == f"SOURCE: got {str(out)!r}; expected a Hugging Face directory with safetensors"
    with pytest.raises(InvalidValueError, match=r"^SOURCE: got '/nowhere'; expected an existing"):
        convert(Path("/nowhere"), tmp_path / "new")
    with pytest.raises(InvalidValueError) as error:
        convert(GOLDEN / "tiny_mimo", out)
    assert str(error.value) == f"OUT: got {str(out)!r}; expected a folder that does not exist or is empty"
    run = command(str(GOLDEN / "tiny_mimo"), str(out))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"python -m mtp_jax.convert: {error.value}\n"
