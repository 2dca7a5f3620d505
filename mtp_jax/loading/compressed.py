"""compressed-tensors: packed integers, float8, NVFP4 or MXFP4, tensor by tensor."""

import dataclasses

import numpy as np

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.fp8 import FP8Format
from mtp_jax.loading.int4 import INT32, SCALES, WORD, groups_of, unpacked
from mtp_jax.loading.nvfp4 import mxfp4, nvfp4
from mtp_jax.loading.quantised import Dequantised, by_rows, need
from mtp_jax.loading.tensor_files import TensorFiles

_PACKED = "_packed"
_INT64 = (np.dtype(np.int64),)


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """compressed-tensors (a `Format`).

    `X.weight_packed` int32 [out, ceil(in / n)] for n codes a word, low bits first, `X.weight_scale`
    [out, groups], `X.weight_shape` [2]; asymmetric: `X.weight_zero_point` int32 [ceil(out / n), groups];
    with `X.weight_g_idx` int32 [in], the group of each input. Bytes in `X.weight_packed` are NVFP4 with
    `X.weight_global_scale`, else MXFP4.

    Attributes:
      bits: the sizes of integer codes that there are: 4, 8 or both.
      group: inputs that share a scale, where there are several scales a row.
      fp8: how float8 weights are scaled.
      mxfp4: whether there is MXFP4.
    """

    bits: tuple[int, ...] = (4,)
    group: int | None = None
    fp8: FP8Format = dataclasses.field(default_factory=FP8Format)
    mxfp4: bool = False

    def weights(self, stored: TensorFiles) -> dict[str, Dequantised]:
        found: dict[str, Dequantised] = {}
        for codes in sorted(name for name in stored.names() if name.endswith(_PACKED)):
            weight = codes.removesuffix(_PACKED)
            whole = weight + "_global_scale"
            if stored.dtype(codes) == np.uint8 and self.mxfp4 and whole not in stored.names():
                found[weight] = mxfp4(stored, weight, codes)
            elif stored.dtype(codes) == np.uint8:
                found[weight] = nvfp4(stored, weight, codes, whole, divide=True)
            else:
                found[weight] = self._integers(stored, weight, codes)
        return found | self.fp8.weights(stored)

    def _integers(self, stored: TensorFiles, weight: str, codes: str) -> Dequantised:
        need(stored, codes, "packed codes", INT32)
        whole = need(stored, weight + "_shape", f"the shape of {codes}", _INT64, (2,))
        rows, columns = (int(size) for size in stored.read(whole))
        bits = self._bits_of(stored, codes, rows, columns)
        group = self.group or columns
        groups = -(-columns // group)
        what = f"the scales of {codes}"
        scales = need(stored, weight + "_scale", what, SCALES, (rows, groups), (rows, 1), (1,))
        if stored.shape(scales) != (rows, groups):  # one a row, or one in all
            group, groups = columns, 1
        zeros, order = weight + "_zero_point", weight + "_g_idx"
        parts = (codes, whole, scales)
        if zeros in stored.names():
            packed_rows = -(-rows * bits // WORD)
            parts += (need(stored, zeros, f"the zero points of {codes}", INT32, (packed_rows, groups)),)
        if order in stored.names():
            parts += (need(stored, order, f"the groups of {codes}", INT32, (columns,)),)

        def read() -> np.ndarray:
            packed = stored.read(codes)
            factors = np.broadcast_to(stored.read(scales).astype(np.float32), (rows, groups))
            zero = np.full((rows, groups), 1 << (bits - 1), np.float32)  # codes are stored without a sign
            if zeros in stored.names():
                zero = unpacked(stored.read(zeros), bits, 0)[:rows].astype(np.float32)
            of_column = groups_of(stored, order, groups, np.arange(columns) // group)

            def some(here: slice) -> np.ndarray:
                values = unpacked(packed[here], bits, 1)[:, :columns]
                return (values - zero[here][:, of_column]) * factors[here][:, of_column]

            return by_rows((rows, columns), some)

        return Dequantised((rows, columns), f"compressed-tensors int{bits}", parts, read)

    def _bits_of(self, stored: TensorFiles, codes: str, rows: int, columns: int) -> int:
        shapes = {bits: (rows, -(-columns * bits // WORD)) for bits in self.bits}
        for bits, shape in shapes.items():
            if stored.shape(codes) == shape:
                return bits
        legal = " or ".join(f"{list(shape)} for {bits} bits" for bits, shape in shapes.items())
        raise CheckpointError(
            codes, list(stored.shape(codes)), legal or "no integers, as quantization_config says"
        )
