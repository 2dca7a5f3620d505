"""Quantised weights made element by element from each format's description: slow, and unlike the readers.

Every packer takes what a weight is made of and gives its stored tensors and, as bfloat16, the weight.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mtp_jax.loading.tensor_files import TensorFiles

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
E8M0 = ml_dtypes.float8_e8m0fnu
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # column of eight to nibble, low first


@dataclasses.dataclass
class Packed:
    tensors: dict[str, np.ndarray]
    weight: np.ndarray


def stored(directory: Path, tensors: Mapping[str, np.ndarray]) -> TensorFiles:
    directory.mkdir(exist_ok=True)
    path = directory / f"{len(list(directory.iterdir()))}.safetensors"
    save_file(dict(tensors), path)
    return TensorFiles([path])


def result(value: np.ndarray) -> np.ndarray:
    """Exact products, rounded to float32 and then to bfloat16."""
    return value.astype(np.float32).astype(BF16)


def fp8(
    name: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    *,
    end: str = "_scale_inv",
    kind: type = E4M3,
    scale_shape: tuple[int, ...] | None = None,
    scale_kind: type = np.float32,
    seed: int = 0,
) -> Packed:
    rng = np.random.default_rng(seed)
    codes = (rng.standard_normal(shape) * 20).astype(kind)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    powers = scale_kind in (E8M0, np.uint8)
    scales = 2.0 ** rng.integers(-9, 3, grid) if powers else rng.uniform(0.001, 0.1, grid)
    scales = scales.astype(np.float32 if scale_kind is np.uint8 else scale_kind).astype(np.float64)
    weight = np.zeros(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            weight[i, j] = float(codes[i, j]) * scales[i // block[0], j // block[1]]
    written = (
        (np.log2(scales) + 127).astype(np.uint8) if scale_kind is np.uint8 else scales.astype(scale_kind)
    )
    tensors = {name: codes, name + end: written.reshape(grid if scale_shape is None else scale_shape)}
    return Packed(tensors, result(weight))


def awq(stem: str, rows: int, columns: int, group: int, seed: int = 0) -> Packed:
    rng = np.random.default_rng(seed)
    groups = -(-columns // group)
    codes, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (groups, rows))
    scales = rng.uniform(0.01, 0.1, (groups, rows)).astype(np.float16)

    def words(values: np.ndarray) -> np.ndarray:
        found = np.zeros((values.shape[0], rows // 8), np.uint32)
        for i in range(values.shape[0]):
            for j in range(rows):
                found[i, j // 8] |= np.uint32(int(values[i, j]) << 4 * AWQ_PLACES[j % 8])
        return found.view(np.int32)

    weight = np.zeros((rows, columns))
    for o in range(rows):
        for i in range(columns):
            g = i // group
            weight[o, i] = (int(codes[i, o]) - int(zeros[g, o])) * float(scales[g, o])
    tensors = {stem + "qweight": words(codes), stem + "qzeros": words(zeros), stem + "scales": scales}
    return Packed(tensors, result(weight))


def gptq(
    stem: str,
    rows: int,
    columns: int,
    group: int,
    *,
    bits: int = 4,
    offset: int = 1,
    order: str = "",  # "act": inputs in groups out of order; "": without g_idx
    seed: int = 0,
) -> Packed:
    rng = np.random.default_rng(seed)
    groups, each = -(-columns // group), 32 // bits
    codes = rng.integers(0, 1 << bits, (columns, rows))
    zeros = rng.integers(offset, (1 << bits) - 1 + offset, (groups, rows))
    scales = rng.uniform(0.01, 0.1, (groups, rows)).astype(np.float16)
    g_idx = np.array([i // group for i in range(columns)], np.int32)
    if order == "act":
        rng.shuffle(g_idx)
    qweight = np.zeros((columns // each, rows), np.uint32)
    qzeros = np.zeros((groups, rows // each), np.uint32)
    weight = np.zeros((rows, columns))
    for o in range(rows):
        for i in range(columns):
            qweight[i // each, o] |= np.uint32(int(codes[i, o]) << bits * (i % each))
            weight[o, i] = (int(codes[i, o]) - int(zeros[g_idx[i], o])) * float(scales[g_idx[i], o])
        for g in range(groups):
            qzeros[g, o // each] |= np.uint32(int(zeros[g, o] - offset) << bits * (o % each))
    tensors = {
        stem + "qweight": qweight.view(np.int32),
        stem + "qzeros": qzeros.view(np.int32),
        stem + "scales": scales,
    }
    return Packed(tensors | ({stem + "g_idx": g_idx} if order else {}), result(weight))


def packed_integers(
    name: str,
    rows: int,
    columns: int,
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    shuffled: bool = False,
    seed: int = 0,
) -> Packed:
    """compressed-tensors' pack-quantized: signed codes, written with half their range added."""
    rng = np.random.default_rng(seed)
    groups, each, half = -(-columns // group), 32 // bits, 1 << (bits - 1)
    codes = rng.integers(-half, half, (rows, columns))
    zeros = np.zeros((rows, groups), int) if symmetric else rng.integers(-half, half, (rows, groups))
    scales = rng.uniform(0.01, 0.1, (rows, groups)).astype(BF16)
    g_idx = np.array([i // group for i in range(columns)], np.int32)
    if shuffled:
        rng.shuffle(g_idx)
    words = np.zeros((rows, -(-columns // each)), np.uint32)
    zero_words = np.zeros((-(-rows // each), groups), np.uint32)
    weight = np.zeros((rows, columns))
    for o in range(rows):
        for i in range(columns):
            words[o, i // each] |= np.uint32(int(codes[o, i]) + half << bits * (i % each))
            weight[o, i] = (int(codes[o, i]) - int(zeros[o, g_idx[i]])) * float(scales[o, g_idx[i]])
        for g in range(groups):
            zero_words[o // each, g] |= np.uint32(int(zeros[o, g]) + half << bits * (o % each))
    tensors = {
        name + "_packed": words.view(np.int32),
        name + "_scale": scales,
        name + "_shape": np.array([rows, columns], np.int64),
    }
    if not symmetric:
        tensors[name + "_zero_point"] = zero_words.view(np.int32)
    return Packed(tensors | ({name + "_g_idx": g_idx} if shuffled else {}), result(weight))


def nvfp4(name: str, rows: int, columns: int, *, compressed: bool = False, seed: int = 0) -> Packed:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.uniform(1, 400, (rows, columns // 16)).astype(E4M3)
    whole = np.float32(rng.uniform(100, 1000)) if compressed else np.float32(rng.uniform(0.0001, 0.001))
    packed = np.zeros((rows, columns // 2), np.uint8)
    weight = np.zeros((rows, columns))
    for o in range(rows):
        for i in range(columns):
            packed[o, i // 2] |= codes[o, i] << 4 * (i % 2)
            value = E2M1[codes[o, i] & 7] * (-1 if codes[o, i] & 8 else 1) * float(scales[o, i // 16])
            weight[o, i] = value / float(whole) if compressed else value * float(whole)
    ends = ("_packed", "_scale", "_global_scale") if compressed else ("", "_scale", "_scale_2")
    values = (packed, scales, np.full((1,) if compressed else (), whole))
    tensors = {name + end: value for end, value in zip(ends, values, strict=True)}
    return Packed(tensors, result(weight))


def mxfp4(name: str, rows: int, columns: int, *, compressed: bool = False, seed: int = 0) -> Packed:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, columns))
    exponents = rng.integers(110, 130, (rows, columns // 32)).astype(np.uint8)
    packed = np.zeros((rows, columns // 2), np.uint8)
    weight = np.zeros((rows, columns))
    for o in range(rows):
        for i in range(columns):
            packed[o, i // 2] |= codes[o, i] << 4 * (i % 2)
            sign = -1 if codes[o, i] & 8 else 1
            weight[o, i] = sign * E2M1[codes[o, i] & 7] * 2.0 ** (int(exponents[o, i // 32]) - 127)
    return Packed({name + "_packed" * compressed: packed, name + "_scale": exponents}, result(weight))


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
