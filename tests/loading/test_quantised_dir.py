"""Whole directories: a golden model with its matrices quantised, and one inside a larger model."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.errors import CheckpointError
from mtp_jax.loading import SafetensorsDir
from tests.loading import packers
from tests.loading.packers import Packed

GOLDEN = Path(__file__).parents[1] / "golden"
Packer = Callable[[str, int, int], Packed]

FORMATS: dict[str, tuple[dict[str, object], Packer, str]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [24, 24], "modules_to_not_convert": ["lm_head"]},
        lambda stem, rows, columns: packers.fp8(stem + "weight", (rows, columns), (24, 24)),
        "fp8 blocks",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"},
        lambda stem, rows, columns: packers.awq(stem, rows, columns, 16),
        "AWQ int4",
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        lambda stem, rows, columns: packers.gptq(stem, rows, columns, 16, order="act"),
        "GPTQ int4",
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 16}}},
        },
        lambda stem, rows, columns: packers.packed_integers(stem + "weight", rows, columns, 16),
        "compressed-tensors int4",
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda stem, rows, columns: packers.nvfp4(stem + "weight", rows, columns),
        "NVFP4",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_whose_matrices_are_quantised(tmp_path, name):
    quantization, pack, kind = FORMATS[name]
    directory = Path(shutil.copytree(GOLDEN / "tiny_qwen2", tmp_path / "model"))
    packers.edit_config(directory, quantization_config=quantization)
    plain = load_file(directory / "model.safetensors")
    tensors, expected = {}, {}
    for key, value in plain.items():
        if key.endswith("_proj.weight"):
            packed = pack(key.removesuffix("weight"), *value.shape)
            tensors |= packed.tensors
            expected[key] = packed.weight
        else:
            tensors[key] = expected[key] = value
    save_file(tensors, directory / "model.safetensors")
    source = SafetensorsDir(directory)
    assert source.names() == set(plain)
    for key, value in expected.items():
        np.testing.assert_array_equal(source.read(key), value)
    small = {name: value.nbytes for name, value in plain.items() if not name.endswith("_proj.weight")}
    packed_bytes = sum(value.nbytes for name, value in tensors.items() if name not in small)
    assert source.stored_bytes() == ({"float32": sum(small.values())}, {kind: packed_bytes})
    memory = sum(value.nbytes for value in expected.values())
    stored, kept, taken = (f"{n / 1e6:.1f} MB" for n in (packed_bytes, sum(small.values()), memory))
    line = f"qwen2, 49056 parameters, {directory}, {stored} of {kind}, dequantised to bfloat16 at loading, "
    line += f"and {kept} of float32: 49056 parameters take {taken}"
    if name == "fp8":
        line = f"qwen2, 49056 parameters, {directory}, {stored} of {kind}, kept in float8, "
        line += f"and {kept} of float32"
    assert source.describe() == line


def test_a_method_that_we_cannot_read(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "tiny_qwen2", tmp_path / "model"))
    packers.edit_config(directory, quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError) as error:
        SafetensorsDir(directory)
    legal = "one of fp8, compressed-tensors, awq, gptq, modelopt, modelopt_fp4, quark"
    assert str(error.value) == f"config.json: quantization_config: quant_method: got 'hqq'; expected {legal}"


@pytest.mark.parametrize(
    ("body", "head", "vision"),
    [
        ("model.language_model.", "lm_head.", "model.visual."),
        ("language_model.model.", "language_model.lm_head.", "vision_tower."),
    ],
)
@pytest.mark.parametrize("index", [False, True])
def test_a_text_model_inside_a_larger_one(tmp_path, caplog, body, head, vision, index):
    directory = Path(shutil.copytree(GOLDEN / "tiny_qwen2", tmp_path / "model"))
    plain = load_file(directory / "model.safetensors")
    wrapped = {}
    for name, value in plain.items():
        inner = name.startswith("model.")
        wrapped[(body if inner else head) + name.removeprefix("model." if inner else "lm_head.")] = value
    for part in ("blocks.0.attn.qkv.weight", "patch_embed.proj.bias"):
        wrapped[vision + part] = np.ones(4, np.float32)
    save_file(wrapped, directory / "model.safetensors")
    if index:
        weight_map = dict.fromkeys(wrapped, "model.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with caplog.at_level(logging.INFO):
        source = SafetensorsDir(directory)
    assert source.names() == set(plain)
    for name, value in plain.items():
        np.testing.assert_array_equal(source.read(name), value)
    lines = [line for line in caplog.messages if "images" in line]
    assert lines == [f"{directory}: 2 tensors of images and video are not read"]


def test_a_plain_model_is_described_as_before():
    assert "dequantised" not in SafetensorsDir(GOLDEN / "tiny_qwen2").describe()


def test_a_file_that_is_cut_after_it_was_opened(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "tiny_qwen2", tmp_path / "model"))
    source = SafetensorsDir(directory)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    last = max(source.names(), key=lambda name: source.stored._entry(name).offset)
    with pytest.raises(CheckpointError) as error:
        source.read(last)
    assert (
        str(error.value)
        == f"model.safetensors: {last}: got 'cut short since it was opened'; expected the file"
    )
