"""Dequantisation of GGUF's block formats with NumPy.

A block is 32 weights of one row. Bytes of a block, little-endian:
  Q8_0: f16 scale, 32 x int8                          w = scale * q
  Q4_0: f16 scale, 16 bytes of nibbles                w = scale * (q - 8)
  Q4_1: f16 scale, f16 minimum, 16 bytes of nibbles   w = scale * q + minimum
The low nibbles of the 16 bytes are weights 0 to 15, the high ones 16 to 31.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

BLOCK = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
PLAIN_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# ids of ggml_type for the formats above
TYPE_NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}
# and for those that error messages name
# fmt: off
OTHER_TYPE_NAMES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}
# fmt: on

_CHUNK = 4096  # blocks at a time: half a megabyte of floats, so that every pass stays in cache


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of one stored row. `columns` must be a multiple of `BLOCK` for quantised kinds."""
    if kind in PLAIN_DTYPES:
        return columns * PLAIN_DTYPES[kind].itemsize
    return columns // BLOCK * BLOCK_BYTES[kind]


def dequantize(raw: np.ndarray, kind: str) -> np.ndarray:
    """Turns stored rows into float32.

    Args:
      raw: uint8 [rows, bytes a row].
      kind: a key of `BLOCK_BYTES`.

    Returns:
      float32 [rows, columns].
    """
    rows = raw.shape[0]
    blocks = raw.reshape(-1, BLOCK_BYTES[kind])
    out = np.empty((blocks.shape[0], BLOCK), np.float32)
    convert = _CONVERTERS[kind]
    for start in range(0, blocks.shape[0], _CHUNK):
        convert(blocks[start : start + _CHUNK], out[start : start + _CHUNK])
    return out.reshape(rows, -1)


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The f16 field at a byte offset of every block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


_Converter = Callable[[np.ndarray, np.ndarray], None]
_CONVERTERS: dict[str, _Converter] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
