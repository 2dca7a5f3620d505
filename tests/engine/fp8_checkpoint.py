"""A golden model with its matrices in float8 blocks, as DeepSeek publishes them, and its dequantised twin."""

import shutil
from collections.abc import Collection
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.loading.packers import edit_config

GOLDEN = Path(__file__).parents[1] / "golden"
# Embeddings, norms, routers, eh_proj and heads are not quantised.
KEPT = ("embed_tokens", "norm", "mlp.gate.", "eh_proj", "lm_head", "shared_head", "weights_proj")


def quantised(
    weight: np.ndarray, block: tuple[int, int], ue8m0: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales, and what they stand for."""
    grid = tuple(-(-size // one) for size, one in zip(weight.shape, block, strict=True))
    codes, scales = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros(grid, np.float32)
    twin = np.zeros(weight.shape, ml_dtypes.bfloat16)
    for i, j in np.ndindex(grid):
        place = tuple(slice(at * size, (at + 1) * size) for at, size in zip((i, j), block, strict=True))
        scale = np.float32(np.abs(weight[place]).max() / 448)
        scales[i, j] = 2 ** np.ceil(np.log2(scale)) if ue8m0 else scale
        codes[place] = (weight[place] / scales[i, j]).astype(codes.dtype)
        twin[place] = (codes[place].astype(np.float32) * scales[i, j]).astype(twin.dtype)
    return codes, scales, twin


def write(
    folder: Path,
    model: str | Path,
    block: tuple[int, int],
    *,
    ue8m0: bool = False,
    kept: Collection[str] = (),
) -> tuple[Path, Path]:
    """Writes both below `folder`.

    Args:
      folder: exists.
      model: which golden one, or a directory like theirs.
      block: rows and columns that share a scale.
      ue8m0: whether scales are powers of two, stored as float8_e8m0fnu.
      kept: parts of names of further tensors that are not quantised.
    """
    packed = Path(shutil.copytree(GOLDEN / model, folder / "packed"))
    plain = Path(shutil.copytree(GOLDEN / model, folder / "plain"))
    tensors, twins = {}, {}
    for name, value in load_file(GOLDEN / model / "model.safetensors").items():
        tensors[name] = twins[name] = value
        if value.ndim == 2 and not any(part in name for part in (*KEPT, *kept)):
            tensors[name], scales, twins[name] = quantised(value, block, ue8m0)
            tensors[name + "_scale_inv"] = scales.astype(ml_dtypes.float8_e8m0fnu) if ue8m0 else scales
    save_file(tensors, packed / "model.safetensors")
    save_file(twins, plain / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    quantization |= {"scale_fmt": "ue8m0"} if ue8m0 else {}
    edit_config(packed, quantization_config=quantization | {"modules_to_not_convert": [*kept]})
    return packed, plain
