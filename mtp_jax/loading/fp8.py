"""float8 weights with scales: one for a tensor, one for a row, or one for a block."""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.quantised import Dequantised, Float8, by_rows
from mtp_jax.loading.tensor_files import TensorFiles

FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)  # scales that are powers of two: exponents alone
_SCALES = ("_scale_inv", "_scale")  # both multiply, whatever the first one's name says


@dataclasses.dataclass(frozen=True)
class FP8Format:
    """W = float8 · scale (a `Format`): Hugging Face's `fp8`, and the float8 of other methods.

    Attributes:
      block: rows and columns that share a scale, the last ones of each fewer; None where there are no blocks.
    """

    block: tuple[int, int] | None = None

    def weights(self, stored: TensorFiles) -> dict[str, Dequantised]:
        codes = [name for name in stored.names() if stored.dtype(name) in FP8 and not _is_scale(name)]
        return {name: self._weight(stored, name) for name in sorted(codes)}

    def _weight(self, stored: TensorFiles, name: str) -> Dequantised:
        shape = stored.shape(name)
        if len(shape) < 2:
            raise CheckpointError(name, f"float8 of shape {list(shape)}", "a matrix, or a stack of them")
        scales = next((name + end for end in _SCALES if name + end in stored.names()), None)
        if scales is None:
            raise CheckpointError(
                name + _SCALES[self.block is None], "no such tensor", f"the scales of {name}"
            )
        block = self._block_of(stored, name, scales)
        kind = "fp8 blocks" if block == self.block else "fp8"
        float8 = None
        if stored.dtype(name) == FP8[0]:
            columns = min(block[1], shape[-1])
            float8 = Float8(columns, lambda: stored.read(name), lambda: spread(stored, shape, scales, block))
        return Dequantised(
            shape, kind, (name, scales), lambda: dequantise(stored, name, scales, block), float8
        )

    def _block_of(self, stored: TensorFiles, name: str, scales: str) -> tuple[int, int]:
        """Rows and columns of `name` that share a scale, from the scales' shape."""
        if stored.dtype(scales).kind == "i":
            raise CheckpointError(scales, str(stored.dtype(scales)), f"the scales of {name}, floating point")
        *stack, rows, columns = stored.shape(name)
        shape, lead = stored.shape(scales), tuple(stack)
        legal = {lead: (rows, columns), (*lead, 1): (rows, columns), (*lead, 1, 1): (rows, columns)}
        legal |= {(*lead, rows): (1, columns), (*lead, rows, 1): (1, columns)}
        wanted, more = [*lead, rows, 1], "; blocks need a weight_block_size in quantization_config"
        if self.block is not None:
            wanted, more = [*lead, -(-rows // self.block[0]), -(-columns // self.block[1])], ""
            legal[tuple(wanted)] = self.block
        if shape not in legal:
            text = f"the scales of {name}, of shape {wanted}{more}"
            raise CheckpointError(scales, list(shape), text)
        return legal[shape]


def dequantise(stored: TensorFiles, name: str, scales: str, block: tuple[int, int]) -> np.ndarray:
    """float8 [..., rows, columns] times a scale for each block, as bfloat16."""
    shape = stored.shape(name)
    rows, columns = shape[-2:]
    codes = stored.read(name).view(np.uint8).reshape(-1, columns)
    table = decoded(stored.dtype(name))
    block_rows, block_columns = -(-rows // block[0]), -(-columns // block[1])
    factors = factors_of(stored, scales).reshape(-1, block_columns)

    def some(here: slice) -> np.ndarray:
        row = np.arange(here.start, here.stop)
        of_rows = factors[row // rows * block_rows + row % rows // block[0]]
        # clip: no bounds checks, and bytes are all within the table
        return scaled(np.take(table, codes[here], mode="clip"), of_rows, block[1])

    return by_rows(codes.shape, some).reshape(shape)


def spread(stored: TensorFiles, shape: tuple[int, ...], scales: str, block: tuple[int, int]) -> np.ndarray:
    """The scale of every element of a weight of this shape [..., rows, columns], float32."""
    *stack, rows, columns = shape
    blocks = -(-rows // block[0]), -(-columns // block[1])
    factors = factors_of(stored, scales).reshape(*stack, *blocks)
    of_rows = np.repeat(factors, block[0], axis=-2)[..., :rows, :]
    return np.repeat(of_rows, block[1], axis=-1)[..., :columns]


def scaled(values: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """Values [rows, columns] times scales [rows, groups], the last group of columns perhaps shorter.

    `values` is changed and returned.
    """
    if scales.shape[1] > 1:
        scales = np.repeat(scales, group, axis=1)[:, : values.shape[1]]
    return np.multiply(values, scales, out=values)


def factors_of(stored: TensorFiles, scales: str) -> np.ndarray:
    """Scales as float32; bytes are exponents of two, as float8_e8m0fnu has them."""
    values = stored.read(scales)
    return (values.view(POWERS) if values.dtype == np.uint8 else values).astype(np.float32)


@functools.cache
def decoded(dtype: np.dtype) -> np.ndarray:
    """The float32 value of each of the 256 codes."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def _is_scale(name: str) -> bool:
    return name.endswith((*_SCALES, "_scale_2"))
