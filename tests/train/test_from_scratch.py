"""A small target and its module, trained together on text, and loaded like any checkpoint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import resolve_model
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.curves import read_curves
from mtp_jax.train.from_scratch import train_from_scratch
from tests.house.source import ROOT

TOKENIZER = ROOT / "tests" / "golden" / "tiny_mimo"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with a configuration and a tokenizer."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shutil.copyfile(TOKENIZER / "tokenizer.json", folder / "tokenizer.json")
    return folder


def options(tmp_path: Path, config: Path, **changes: object) -> TrainOptions:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 200)
    values = {
        "out": str(tmp_path / "run"),
        "from_scratch": str(config / "config.json"),
        "text": (str(text),),
        "steps": 90,
        "batch_tokens": 1024,
        "sequence_length": 64,
        "held_out_samples": 16,
        "evaluate_every": 100,
        "num_speculative_tokens": 2,
        "devices": 1,
        "learning_rate": 1e-2,
    }
    return TrainOptions(**values | changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_learns_and_the_model_loads(tmp_path: Path, config: Path) -> None:
    """Text that repeats has one right next token, nearly everywhere: target and drafts must find it."""
    outcome = train_from_scratch(options(tmp_path, config))
    first = read_curves(tmp_path / "run" / "curves.jsonl")[0]
    held_out = outcome.held_out
    assert first["main_loss"] > 4 and held_out["main_loss"] < 1  # type: ignore[operator]
    assert min(held_out["accepted_sampled"]) > 0.5  # type: ignore[arg-type]
    source = resolve_model(tmp_path / "run" / "model")
    assert source.config.num_nextn_predict_layers == 1
    assert source.tokenizer().encode("one two") == resolve_model(TOKENIZER).tokenizer().encode("one two")
    (layer,) = outcome.state.best.target.layers  # type: ignore[union-attr]
    np.testing.assert_array_equal(source.read("model.layers.1.mlp.down_proj.weight"), layer["ffn.down"][1])


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="--from-scratch"):
        train_from_scratch(options(tmp_path, tmp_path / "nowhere"))
