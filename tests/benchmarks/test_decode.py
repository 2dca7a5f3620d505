"""The decode benchmark over a checkpoint of random weights: real files, real engine, figures that add up."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.decode import benchmark, engine_options, parse, round_bytes, table
from benchmarks.device_profile import Kernel, busy_us
from benchmarks.random_checkpoint import CHECKPOINTS, TINY, Recipe, config_json, write_checkpoint
from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import resolve_model
from mtp_jax.models.registry import expected_tensors

NEW = 12
FLAGS = ["--batch", "2", "--prompt", "8", "--new", str(NEW), "--repeat", "2", "--max-model-len", "32"]
# One bucket of each kind, so that little is compiled.
FLAGS += ["--set", "prefill_chunk=16", "--set", "min_rows=2"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint("tiny", directory)
    return directory


def test_checkpoint_opens_as_what_it_was_written_for(checkpoint: Path) -> None:
    source = resolve_model(checkpoint)
    assert source.config == TINY
    table = source.read("model.embed_tokens.weight").astype(np.float32)
    assert table.std() == pytest.approx(CHECKPOINTS["tiny"].std, rel=0.05)  # 16384 numbers: within 0.6 %
    assert not source.read("model.layers.1.mlp.down_proj.weight").astype(np.float32).any()
    assert (source.read("model.norm.weight") == 1).all()
    ids = source.tokenizer().encode("sea é")
    assert len(ids) == 6 and source.tokenizer().decode(ids) == "sea é"


def test_checkpoint_is_a_function_of_its_seed(checkpoint: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_checkpoint("tiny", tmp_path / str(seed), seed)
    written = [
        (path / "model.safetensors").read_bytes() for path in (checkpoint, tmp_path / "0", tmp_path / "1")
    ]
    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize("name", ["llama135m", "mimo", "mimo_agree"])
def test_large_shapes_have_configurations_that_read_back(name: str, tmp_path: Path) -> None:
    from mtp_jax.loading.hf_config import config_from_directory

    model = CHECKPOINTS[name].model
    (tmp_path / "config.json").write_text(json.dumps(config_json(model)))
    assert config_from_directory(tmp_path) == model


@pytest.mark.parametrize(("k", "name"), [(0, "tiny"), (1, "tiny"), (1, "tiny_head")])
def test_decode_figures_add_up(checkpoint: Path, tmp_path: Path, k: int, name: str) -> None:
    out, directory = tmp_path / "out.jsonl", checkpoint
    if name != "tiny":
        write_checkpoint(name, directory := tmp_path / name)
    args = parse(["--model", str(directory), *FLAGS, "--json", str(out)])
    rows = benchmark(args, k, None)
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    (row,) = rows
    assert (row["k"], row["batch"], row["new"], row["max_rounds"]) == (k, 2, NEW, 1)
    # The MTP module of this checkpoint predicts what the target will say; in float32 nothing rounds it away.
    assert row["acceptance_length"] == 1 + k
    assert row["tokens_per_round_and_request"] == pytest.approx(1 + k)
    rate = row["tokens_per_round_and_request"] * row["batch"] * 1e3 / row["ms_per_round"]
    assert row["decode_tokens_per_s"] == pytest.approx(rate)
    assert row["whole_tokens_per_s"] == pytest.approx(2 * NEW / min(row["whole_s_of_all_runs"]))
    assert row["first_tokens_s"] < row["whole_s"]
    assert 0 < row["host_ms_per_dispatch"] < 1e3 * row["whole_s"]
    assert row["compile_s"] > 0 and row["rounds_per_dispatch"] == 1
    cells = table(rows).splitlines()[2].strip("| ").split(" | ")
    assert cells[:4] == [str(k), "1", "2", f"{row['decode_tokens_per_s']:.1f}"]


def test_drafts_without_an_mtp_module_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    plain = dataclasses.replace(TINY, model_type="llama", attention_bias=False, num_nextn_predict_layers=0)
    monkeypatch.setitem(CHECKPOINTS, "plain", Recipe(plain, 0.1))
    write_checkpoint("plain", tmp_path)
    with pytest.raises(InvalidValueError, match="no MTP module"):
        benchmark(parse(["--model", str(tmp_path), *FLAGS]), 1, None)


def test_a_round_reads_the_module_and_its_head_once_a_draft(checkpoint: Path, tmp_path: Path) -> None:
    from mtp_jax.engine.build import draw_blueprint

    write_checkpoint("tiny_head", tmp_path / "tiny_head")
    whole, part = (
        draw_blueprint(engine_options(parse(["--model", str(path), *FLAGS]), 1, None))
        for path in (checkpoint, tmp_path / "tiny_head")
    )
    vocab, width = TINY.vocab_size, TINY.hidden_size
    trunk = vocab * width * 4 + 2 * sum(
        4 * math.prod(shape)
        for name, shape in expected_tensors(TINY).items()
        if name.startswith("model.layers.0.")
    )
    module = sum(4 * math.prod(s) for name, s in expected_tensors(TINY).items() if ".mtp_layers." in name)
    assert round_bytes(whole, 0) == round_bytes(part, 0) == trunk
    assert round_bytes(whole, 2) == trunk + 2 * (module + vocab * width * 4)
    assert round_bytes(part, 2) == trunk + 2 * (module + 128 * width * 4)


def test_busy_counts_overlaps_once() -> None:
    kernels = [Kernel("a", 0, 4), Kernel("b", 2, 1), Kernel("c", 3, 4), Kernel("d", 9, 5)]
    assert busy_us(kernels, 1, 10) == 6 + 1
    assert busy_us([], 1, 10) == 0
