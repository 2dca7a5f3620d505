"""Stand-alone MTP heads: which one is found, which one is refused."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.engine.build import draw_blueprint
from mtp_jax.engine.options import EngineOptions
from mtp_jax.errors import CheckpointError
from mtp_jax.loading import SafetensorsDir, find_mtp_head, open_mtp_head, resolve_model
from mtp_jax.loading.fingerprint import target_fingerprint
from mtp_jax.loading.mtp_head import SHIPPED
from mtp_jax.models.registry import mtp_tensors

TARGET = Path(__file__).parents[1] / "golden" / "tiny_llama3"
IDS = "model.mtp_layers.0.draft_vocab_ids"


def save_head(path: Path, ids: np.ndarray | None = None, **metadata: str) -> Path:
    config = SafetensorsDir(TARGET).config
    tensors = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in mtp_tensors(config).items()}
    if ids is not None:
        tensors[IDS] = ids
    save_file(tensors, path, metadata)
    return path


def copy_of_target(folder: Path) -> Path:
    return Path(shutil.copytree(TARGET, folder / "model"))


def test_the_head_beside_a_model_is_used(tmp_path: Path) -> None:
    """It is none of the model's own weights, and a server with it speculates."""
    model = copy_of_target(tmp_path)
    for file in TARGET.parent.joinpath("tiny_mimo").glob("tokenizer*"):  # the target's folder has none
        shutil.copy(file, model)
    source = SafetensorsDir(model)
    assert find_mtp_head(model, source) is None
    save_head(model / "mtp_head.safetensors", np.arange(5, 25, dtype=np.int32))
    source = SafetensorsDir(model)
    head = find_mtp_head(model, source)
    assert head is not None and head.draft_vocab == 20
    drawn = draw_blueprint(EngineOptions(model=str(model), overrides={"max_model_len": 64}))
    assert drawn.config.adaptive_drafts and drawn.head is not None
    assert "chooses among 20 tokens" in drawn.describe()
    off = EngineOptions(model=str(model), overrides={"max_model_len": 64, "num_speculative_tokens": 0})
    assert draw_blueprint(off).config.num_speculative_tokens == 0


def test_a_head_of_another_target_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = copy_of_target(tmp_path)
    path = save_head(model / "mtp_head.safetensors", target_fingerprint="0123456789abcdef")
    assert find_mtp_head(model, SafetensorsDir(model)) is None
    assert "another model" in caplog.text
    path.unlink()
    save_head(path, target_fingerprint=target_fingerprint(SafetensorsDir(model)))
    assert find_mtp_head(model, SafetensorsDir(model)) is not None


@pytest.mark.parametrize(
    "ids",
    [
        np.array([3, 2, 7], np.int32),
        np.array([3, 3, 7], np.int32),
        np.array([-1, 3], np.int32),
        np.array([3, 1 << 30], np.int32),
        np.zeros(0, np.int32),
        np.array([[1, 2]], np.int32),
        np.array([1, 2], np.float32),
    ],
)
def test_ids_that_are_none(tmp_path: Path, ids: np.ndarray) -> None:
    path = save_head(tmp_path / "head.safetensors", ids)
    with pytest.raises(CheckpointError, match=r"draft_vocab_ids: got .*ascending int32 ids below"):
        open_mtp_head(path, SafetensorsDir(TARGET).config)


def test_the_default_model_has_a_head() -> None:
    """Shipped with the package, found by the target's fingerprint, below 10 MB, with a model card."""
    source = resolve_model()
    head = find_mtp_head(None, source)
    assert head is not None and head.path.is_relative_to(SHIPPED)
    assert head.path.stat().st_size < 10e6
    assert (head.path.parent / "README.md").is_file()
    assert head.tensors.metadata["target_fingerprint"] == target_fingerprint(source)


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    """Its scales would be missing: codes alone have the right shape and mean nothing."""
    path, name = save_head(tmp_path / "head.safetensors"), "model.mtp_layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].astype(ml_dtypes.float8_e4m3fn)}, path)
    with pytest.raises(CheckpointError) as error:
        open_mtp_head(path, SafetensorsDir(TARGET).config)
    legal = "float32, float16 or bfloat16"
    assert str(error.value) == f"head.safetensors: {name}: got 'float8_e4m3fn'; expected {legal}"
