"""Integer weights of AWQ and GPTQ: W = (code - zero point) · scale, a scale and a zero point for a group."""

import dataclasses

import numpy as np

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.quantised import RESULT, Dequantised, by_rows, need
from mtp_jax.loading.tensor_files import TensorFiles

WORD = 32  # bits that codes are packed into
INT32 = (np.dtype(np.int32),)
SCALES = (np.dtype(np.float16), np.dtype(np.float32), RESULT)
# A word of AWQ holds columns 0 to 7 in this order, from its low bits up.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class AWQ:
    """AWQ (a `Format`), as AutoAWQ's `gemm` version packs it.

    `X.qweight` int32 [in, out / 8], `X.qzeros` int32 [in / group, out / 8], `X.scales` [in / group, out].

    Attributes:
      group: inputs that share a scale; None: all.
    """

    group: int | None = 128

    def weights(self, stored: TensorFiles) -> dict[str, Dequantised]:
        stems = [name.removesuffix("qweight") for name in stored.names() if name.endswith(".qweight")]
        return {stem + "weight": self._weight(stored, stem) for stem in sorted(stems)}

    def _weight(self, stored: TensorFiles, stem: str) -> Dequantised:
        codes = _matrix(stored, stem + "qweight")
        columns, rows = stored.shape(codes)[0], stored.shape(codes)[1] * 8
        group = self.group or columns
        scales, groups = _scales(stored, stem, rows, -(-columns // group))
        what = f"the zero points of {codes}"
        zeros = need(stored, stem + "qzeros", what, INT32, (groups, rows // 8))

        def read() -> np.ndarray:
            packed, factors = stored.read(codes), stored.read(scales).astype(np.float32)
            zero = unpacked(stored.read(zeros), 4, 1, AWQ_ORDER).astype(np.float32)
            of_column = np.arange(columns) // group

            def some(here: slice) -> np.ndarray:
                values = unpacked(packed[:, here.start // 8 : here.stop // 8], 4, 1, AWQ_ORDER)
                return ((values - zero[of_column, here]) * factors[of_column, here]).T

            return by_rows((rows, columns), some, multiple=8)

        return Dequantised((rows, columns), "AWQ int4", (codes, scales, zeros), read)


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """GPTQ (a `Format`).

    `X.qweight` int32 [in / n, out] for n codes a word, `X.qzeros` int32 [groups, out / n], `X.scales`
    [groups, out], `X.g_idx` int32 [in]: the group of each input; absent where they are in order.

    Attributes:
      group: inputs that share a scale; None: all.
      bits: of a code, 4 or 8.
      zero_offset: what stored zero points lack: 1 in the original format, 0 in `gptq_v2`.
    """

    group: int | None = 128
    bits: int = 4
    zero_offset: int = 1

    def weights(self, stored: TensorFiles) -> dict[str, Dequantised]:
        stems = [name.removesuffix("qweight") for name in stored.names() if name.endswith(".qweight")]
        return {stem + "weight": self._weight(stored, stem) for stem in sorted(stems)}

    def _weight(self, stored: TensorFiles, stem: str) -> Dequantised:
        codes, each = _matrix(stored, stem + "qweight"), WORD // self.bits
        columns, rows = stored.shape(codes)[0] * each, stored.shape(codes)[1]
        if rows % each:
            raise CheckpointError(codes, list(stored.shape(codes)), f"[in / {each}, a multiple of {each}]")
        group = self.group or columns
        scales, groups = _scales(stored, stem, rows, -(-columns // group))
        what = f"the zero points of {codes}"
        zeros = need(stored, stem + "qzeros", what, INT32, (groups, rows // each))
        parts = (codes, scales, zeros)
        order = stem + "g_idx"
        if order in stored.names():
            parts += (need(stored, order, f"the groups of {codes}", INT32, (columns,)),)

        def read() -> np.ndarray:
            packed, factors = stored.read(codes), stored.read(scales).astype(np.float32)
            zero = unpacked(stored.read(zeros), self.bits, 1).astype(np.float32) + self.zero_offset
            of_column = groups_of(stored, order, groups, np.arange(columns) // group)

            def some(here: slice) -> np.ndarray:
                values = unpacked(packed[:, here], self.bits, 0)
                return ((values - zero[of_column, here]) * factors[of_column, here]).T

            return by_rows((rows, columns), some)

        return Dequantised((rows, columns), f"GPTQ int{self.bits}", parts, read)


def unpacked(words: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """The codes in a matrix of int32 words, uint8; the axis grows by the codes in a word.

    Args:
      order: the place, within a word's codes, of each code from the low bits up; ascending if empty.
    """
    each = WORD // bits
    mask = np.int32((1 << bits) - 1)
    codes = [((words >> np.int32(bits * i)) & mask).astype(np.uint8) for i in range(each)]
    if order:
        codes = [codes[order.index(place)] for place in range(each)]
    shape = list(words.shape)
    shape[axis] *= each
    return np.stack(codes, axis + 1).reshape(shape)


def groups_of(stored: TensorFiles, order: str, groups: int, default: np.ndarray) -> np.ndarray:
    """The group of each input [in]: as the tensor `order` says, if there is one.

    Raises:
      CheckpointError: a group that has no scale.
    """
    if order not in stored.names():
        return default
    group = stored.read(order)
    if group.size and not (group.min() >= 0 and group.max() < groups):
        got = f"groups from {group.min()} to {group.max()}"
        raise CheckpointError(order, got, f"groups from 0 to {groups - 1}, as there are scales")
    return group


def _matrix(stored: TensorFiles, name: str) -> str:
    need(stored, name, "codes", INT32)
    if len(stored.shape(name)) != 2:
        raise CheckpointError(name, list(stored.shape(name)), "a matrix")
    return name


def _scales(stored: TensorFiles, stem: str, rows: int, groups: int) -> tuple[str, int]:
    """The name of the scales, and how many groups they are for."""
    what = f"the scales of {stem}qweight"
    return need(stored, stem + "scales", what, SCALES, (groups, rows)), groups
