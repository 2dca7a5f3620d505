"""A quantised checkpoint gives the very arrays of its dequantised twin."""

import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.engine.build import draw_blueprint
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.weights import Weights
from tests.loading.packers import edit_config

TINY = Path(__file__).parents[1] / "golden" / "tiny_deepseek_v3"
BLOCK = (7, 12)  # neither divides the widths, 8 to 64: most last blocks are partial
# As DeepSeek publishes them: embeddings, norms, routers, eh_proj and heads are not quantised.
KEPT = ("embed_tokens", "norm", "mlp.gate.", "eh_proj", "lm_head", "shared_head")


def quantised(weight: np.ndarray, ue8m0: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales, and what they stand for."""
    grid = tuple(-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    codes, scales = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros(grid, np.float32)
    twin = np.zeros(weight.shape, ml_dtypes.bfloat16)
    for i, j in np.ndindex(grid):
        place = tuple(slice(at * size, (at + 1) * size) for at, size in zip((i, j), BLOCK, strict=True))
        scale = np.float32(np.abs(weight[place]).max() / 448)
        scales[i, j] = 2 ** np.ceil(np.log2(scale)) if ue8m0 else scale
        codes[place] = (weight[place] / scales[i, j]).astype(codes.dtype)
        twin[place] = (codes[place].astype(np.float32) * scales[i, j]).astype(twin.dtype)
    return codes, scales, twin


def arrays(directory: Path, stages: int) -> Weights:
    blueprint = draw_blueprint(EngineOptions(str(directory), overrides={"stages": stages}))
    source, layout = blueprint.source, blueprint.program.layout
    return layout.load(source.read, blueprint.read_mtp, lambda done, total: None, source.names())


@pytest.mark.parametrize(("stages", "ue8m0"), [(1, False), (2, True)])
def test_fp8_blocks_equal_their_twin(tmp_path: Path, stages: int, ue8m0: bool) -> None:
    packed = Path(shutil.copytree(TINY, tmp_path / "packed"))
    plain = Path(shutil.copytree(TINY, tmp_path / "plain"))
    tensors, twins = {}, {}
    for name, value in load_file(TINY / "model.safetensors").items():
        tensors[name] = twins[name] = value
        if value.ndim == 2 and not any(part in name for part in KEPT):
            tensors[name], tensors[name + "_scale_inv"], twins[name] = quantised(value, ue8m0)
    save_file(tensors, packed / "model.safetensors")
    save_file(twins, plain / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}
    edit_config(packed, quantization_config=quantization | ({"scale_fmt": "ue8m0"} if ue8m0 else {}))
    assert sum(name.endswith("_scale_inv") for name in tensors) > 100
    got, expected = arrays(packed, stages), arrays(plain, stages)
    assert got.mtp is not None
    original = jax.tree.leaves(arrays(TINY, stages))
    differs = 0
    for mine, twin, fine in zip(jax.tree.leaves(got), jax.tree.leaves(expected), original, strict=True):
        np.testing.assert_array_equal(mine, twin)
        differs += not np.array_equal(mine, fine)
        # Three bits of mantissa: half a unit in the last place is a sixteenth of a value, and of a block's
        # largest value for what is far below it.
        np.testing.assert_allclose(mine, fine, rtol=1 / 16, atol=np.abs(fine).max() / 448)
    assert differs > 20
