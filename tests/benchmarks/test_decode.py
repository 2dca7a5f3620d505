"""The decode benchmark over a checkpoint of random weights: real files, real engine, figures that add up."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.decode import benchmark, parse, table
from benchmarks.random_checkpoint import CHECKPOINTS, TINY, config_json, write_checkpoint
from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import resolve_model

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
    assert table.std() == pytest.approx(CHECKPOINTS["tiny"][1], rel=0.05)  # 16384 numbers: within 0.6 %
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

    model = CHECKPOINTS[name][0]
    (tmp_path / "config.json").write_text(json.dumps(config_json(model)))
    assert config_from_directory(tmp_path) == model


@pytest.mark.parametrize("k", [0, 1])
def test_decode_figures_add_up(checkpoint: Path, tmp_path: Path, k: int) -> None:
    out = tmp_path / "out.jsonl"
    args = parse(["--model", str(checkpoint), *FLAGS, "--json", str(out)])
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
    monkeypatch.setitem(CHECKPOINTS, "plain", (plain, 0.1, False))
    write_checkpoint("plain", tmp_path)
    with pytest.raises(InvalidValueError, match="no MTP module"):
        benchmark(parse(["--model", str(tmp_path), *FLAGS]), 1, None)
