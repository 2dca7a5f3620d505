"""Quantised checkpoints that cannot be loaded: one line each, which names the tensor or the field."""

import json

import numpy as np
import pytest

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.compressed import CompressedTensors
from mtp_jax.loading.formats import format_of
from mtp_jax.loading.fp8 import FP8Format
from mtp_jax.loading.int4 import AWQ, GPTQ
from mtp_jax.loading.nvfp4 import ModelOpt, Quark
from mtp_jax.loading.quantised import LogicalTensors
from tests.loading import packers

X = "up_proj."
W = X + "weight"
I32, F16, F32 = np.int32, np.float16, np.float32

FP8 = (FP8Format((16, 16)), packers.fp8(W, (20, 40), (16, 16)))
ROWS = (FP8Format(), packers.fp8(W, (20, 40), (1, 40), end="_scale"))
GEMM = (AWQ(16), packers.awq(X, 16, 32, 16))
ORDERED = (GPTQ(16), packers.gptq(X, 16, 32, 16, order="act"))
PACKED = (CompressedTensors((4,), 16), packers.packed_integers(W, 16, 32, 16, symmetric=False, shuffled=True))
NVFP4 = (ModelOpt(), packers.nvfp4(W, 4, 32))
MXFP4 = (Quark(), packers.mxfp4(W, 4, 64))
QUARK = {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}
PART = "got 'a part of a quantised weight without its other parts'; expected whole weights, of the kind that"
PART += " config.json's quantization_config says"


def of(shape: tuple[int, ...], kind: type = F32) -> np.ndarray:
    return np.zeros(shape, kind)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (FP8, {W + "_scale_inv": None}, f"{W}_scale_inv: got 'no such tensor'; expected the scales of {W}"),
        (ROWS, {W + "_scale": None}, f"{W}_scale: got 'no such tensor'; expected the scales of {W}"),
        (
            FP8,
            {W + "_scale_inv": of((3, 3))},
            f"{W}_scale_inv: got [3, 3]; expected the scales of {W}, of shape [2, 3]",
        ),
        (
            ROWS,
            {W + "_scale": of((2, 3))},
            f"{W}_scale: got [2, 3]; expected the scales of {W}, of shape [20, 1]; blocks need a "
            "weight_block_size in quantization_config",
        ),
        (
            ROWS,
            {W + "_scale": of((20,), I32)},
            f"{W}_scale: got 'int32'; expected the scales of {W}, floating point",
        ),
        (FP8, {W: None}, f"{W}_scale_inv: {PART}"),
        (FP8, {W: of((20, 40))}, f"{W}_scale_inv: {PART}"),
        (
            FP8,
            {W: of((20,), packers.E4M3)},
            f"{W}: got 'float8 of shape [20]'; expected a matrix, or a stack of them",
        ),
        (
            GEMM,
            {X + "qzeros": None},
            f"{X}qzeros: got 'no such tensor'; expected the zero points of {X}qweight",
        ),
        (GEMM, {X + "scales": None}, f"{X}scales: got 'no such tensor'; expected the scales of {X}qweight"),
        (GEMM, {X + "qweight": None}, f"{X}qzeros: {PART}"),
        (
            GEMM,
            {X + "scales": of((4, 16), F16)},
            f"{X}scales: got [4, 16]; expected the scales of {X}qweight, of shape [2, 16]",
        ),
        (
            GEMM,
            {X + "qzeros": of((2, 16), I32)},
            f"{X}qzeros: got [2, 16]; expected the zero points of {X}qweight, of shape [2, 2]",
        ),
        (GEMM, {X + "qweight": of((32, 2))}, f"{X}qweight: got 'float32'; expected codes, int32"),
        (GEMM, {X + "qweight": of((32,), I32)}, f"{X}qweight: got [32]; expected a matrix"),
        (
            GEMM,
            {X + "scales": of((2, 16), I32)},
            f"{X}scales: got 'int32'; expected the scales of {X}qweight, float16 or float32 or bfloat16",
        ),
        (
            GEMM,
            {W: of((16, 32))},
            f"{W}: got 'a plain tensor beside quantised parts of it'; expected one of the two",
        ),
        (
            ORDERED,
            {X + "qzeros": None},
            f"{X}qzeros: got 'no such tensor'; expected the zero points of {X}qweight",
        ),
        (
            ORDERED,
            {X + "g_idx": of((31,), I32)},
            f"{X}g_idx: got [31]; expected the groups of {X}qweight, of shape [32]",
        ),
        (
            ORDERED,
            {X + "qweight": of((4, 15), I32)},
            f"{X}qweight: got [4, 15]; expected [in / 8, a multiple of 8]",
        ),
        (PACKED, {W + "_scale": None}, f"{W}_scale: got 'no such tensor'; expected the scales of {W}_packed"),
        (PACKED, {W + "_shape": None}, f"{W}_shape: got 'no such tensor'; expected the shape of {W}_packed"),
        (PACKED, {W + "_packed": None}, f"{W}_g_idx: {PART}"),
        (PACKED, {W + "_packed": of((16, 8), I32)}, f"{W}_packed: got [16, 8]; expected [16, 4] for 4 bits"),
        (
            PACKED,
            {W + "_zero_point": of((16, 2), I32)},
            f"{W}_zero_point: got [16, 2]; expected the zero points of {W}_packed, of shape [2, 2]",
        ),
        (NVFP4, {W + "_scale": None}, f"{W}_scale: got 'no such tensor'; expected the scales of {W}"),
        (MXFP4, {W + "_scale": None}, f"{W}_scale: got 'no such tensor'; expected the scales of {W}"),
        (
            MXFP4,
            {W: np.zeros((4, 24), np.uint8)},
            f"{W}: got [4, 24]; expected [out, in / 2] for an `in` that is a multiple of 32",
        ),
        (
            NVFP4,
            {W + "_scale_2": None},
            f"{W}_scale_2: got 'no such tensor'; expected the scale of all of {W}",
        ),
        (
            NVFP4,
            {W + "_scale": of((4, 4), packers.E4M3)},
            f"{W}_scale: got [4, 4]; expected the scales of {W}, of shape [4, 2]",
        ),
        (
            NVFP4,
            {W: of((4, 12), np.uint8)},
            f"{W}: got [4, 12]; expected [out, in / 2] for an `in` that is a multiple of 16",
        ),
        (
            NVFP4,
            {"x.bias": of((4,), np.uint8)},
            "x.bias: got 'uint8'; expected float32, float16 or bfloat16, or a quantization_config in "
            "config.json that explains it",
        ),
    ],
)
def test_parts_that_are_no_weight(tmp_path, base, change, message):
    form, packed = base
    tensors = {name: value for name, value in (packed.tensors | change).items() if value is not None}
    with pytest.raises(CheckpointError) as error:
        LogicalTensors(packers.stored(tmp_path, tensors), form)
    assert str(error.value) == message


@pytest.mark.parametrize("base", [FP8, GEMM, NVFP4])
def test_without_a_description_nothing_is_guessed(tmp_path, base):
    with pytest.raises(CheckpointError, match=r"^up_proj\.\w+: got .*quantization_config"):
        LogicalTensors(packers.stored(tmp_path, base[1].tensors))


@pytest.mark.parametrize(
    ("form", "packed"),
    [
        (GPTQ(16), {X + "g_idx": np.full(32, 2, I32)}),
        (GPTQ(16), {X + "g_idx": np.full(32, -1, I32)}),
    ],
)
def test_groups_without_scales(tmp_path, form, packed):
    tensors = LogicalTensors(packers.stored(tmp_path, ORDERED[1].tensors | packed), form)
    group = packed[X + "g_idx"][0]
    with pytest.raises(CheckpointError) as error:
        tensors.read(W)
    wanted = (
        f"{X}g_idx: got 'groups from {group} to {group}'; expected groups from 0 to 1, as there are scales"
    )
    assert str(error.value) == wanted


def describe(tmp_path, quantization: object, key: str = "quantization_config", **others: object):
    (tmp_path / "config.json").write_text(json.dumps({key: quantization} | others))
    return format_of(tmp_path)


def scheme(**weights: object) -> dict[str, object]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
SKIPPED = {"ignore": ["lm_head", "re:.*mlp.gate$", "re:mtp.*"], "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        (None, None),
        ({}, None),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 64],
                "scale_fmt": "ue8m0",
                "activation_scheme": "dynamic",
            },
            FP8Format((128, 64)),
        ),
        ({"quant_method": "fp8"}, FP8Format()),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
            AWQ(64),
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}, GPTQ(128)),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
            GPTQ(None, 8, zero_offset=0),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": scheme(**INT4),
            },
            CompressedTensors((4,), 128),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": scheme(**FLOAT),
            },
            CompressedTensors((), None, FP8Format((128, 128))),
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ModelOpt()),
        ({"quant_method": "modelopt_fp4"}, ModelOpt()),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mxfp4-pack-quantized",
                "config_groups": scheme(type="float", num_bits=4, group_size=32),
            },
            CompressedTensors((), None, mxfp4=True),
        ),
        ({"quant_method": "quark", "global_quant_config": {"weight": QUARK}}, Quark()),
    ],
)
def test_the_description_chooses(tmp_path, fields, form):
    assert describe(tmp_path, fields and fields | SKIPPED) == form


def test_places_of_the_description(tmp_path):
    fp8 = {"quant_method": "fp8"}
    assert describe(tmp_path, {"quantization_config": fp8}, key="text_config") == FP8Format()
    old = {"quant_method": "compressed-tensors", "config_groups": scheme(**INT4)}
    assert describe(tmp_path, old, key="compression_config") == CompressedTensors((4,), 128)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert describe(tmp_path, None) == ModelOpt()
    assert describe(tmp_path, fp8) == FP8Format()
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}})
    )
    assert describe(tmp_path, None) is None


LEGAL = "one of fp8, compressed-tensors, awq, gptq, modelopt, modelopt_fp4, quark"
SCHEMES = "config_groups: group_0: weights"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitsandbytes"}, f"quant_method: got 'bitsandbytes'; expected {LEGAL}"),
        ({"bits": 4}, f"quant_method: got None; expected {LEGAL}"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
            "global_quant_config: weight: dtype: got 'int4'; expected 'fp4' or 'fp8_e4m3' or None",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size: got [128]; expected two integers of at least 1, or null",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 0]},
            "weight_block_size: got [128, 0]; expected two integers of at least 1, or null",
        ),
        ({"quant_method": "awq", "bits": 8}, "bits: got 8; expected 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version: got 'gemv'; expected 'gemm' or 'GEMM'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point: got False; expected True"),
        ({"quant_method": "awq", "group_size": 0}, "group_size: got 0; expected an integer of at least 1"),
        ({"quant_method": "gptq", "bits": 3}, "bits: got 3; expected 4 or 8"),
        ({"quant_method": "gptq"}, "bits: got None; expected an integer of at least 1"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format: got 'marlin'; expected 'gptq' or 'gptq_v2' or '' or None",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "format: got 'marlin-24'; expected 'pack-quantized' or 'float-quantized' or 'naive-quantized' or "
            "'nvfp4-pack-quantized' or 'mxfp4-pack-quantized' or 'mixed-precision' or None",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: format: got 'sparse-24-bitmask'; expected 'dense' or None",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": scheme(type="int", num_bits=2)},
            f"{SCHEMES}: num_bits: got 2; expected 4 or 8",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": scheme(type="complex")},
            f"{SCHEMES}: type: got 'complex'; expected 'int' or 'float'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": INT4}, "b": {"weights": INT4 | {"group_size": 32}}},
            },
            "config_groups: got 'groups of sizes [128, 32]'; expected one size in all schemes",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo: got 'W4A8_AWQ'; expected 'NVFP4' or 'FP8' or 'FP8_PB_WO' or 'MIXED_PRECISION' or "
            "None",
        ),
    ],
)
def test_descriptions_refused(tmp_path, fields, message):
    with pytest.raises(CheckpointError) as error:
        describe(tmp_path, fields)
    assert str(error.value) == f"config.json: quantization_config: {message}"
