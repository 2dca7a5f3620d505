"""Tensors of quantised checkpoints as plain ones, dequantised when they are read, or float8 as it is stored.

A format finds the weights that a checkpoint stores in parts (codes, scales, zero points). Arithmetic is in
float32 and results are bfloat16: they hold every code of 4 or 8 bits, and half of float32's bytes.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import ml_dtypes
import numpy as np

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.tensor_files import TensorFiles

Shape = tuple[int, ...]

RESULT = np.dtype(ml_dtypes.bfloat16)
PLAIN = (np.dtype(np.float32), np.dtype(np.float16), RESULT)
_PIECE = 1 << 18  # elements that are dequantised at once: they stay in a core's cache
# Scales of activations and caches, which stay bfloat16 here.
_UNUSED = re.compile(
    r"[._](input|output|activation)_(scale|scale_inv|global_scale|zero_point)$|\.(q|k|v|kv|prob)_scale$"
)
_PART = re.compile(
    r"(weight|proj)_(scale|scale_inv|scale_2|packed|zero_point|g_idx)$|\.(qweight|qzeros|scales|g_idx)$"
)


@dataclasses.dataclass(frozen=True)
class Float8:
    """How a weight is read that may stay in float8_e4m3fn."""

    columns: int  # that share a scale
    codes: Callable[[], np.ndarray]
    scales: Callable[[], np.ndarray]  # every element's, float32


@dataclasses.dataclass(frozen=True)
class Dequantised:
    """A weight that is stored in parts."""

    shape: Shape
    kind: str  # for people: "fp8 blocks"
    parts: tuple[str, ...]  # the stored tensors that it is made of
    read: Callable[[], np.ndarray]  # gives it as bfloat16
    float8: Float8 | None = None


class Format(Protocol):
    """A way to store quantised weights."""

    def weights(self, stored: TensorFiles) -> dict[str, Dequantised]:
        """The weights stored this way, by their names as plain tensors.

        Raises:
          CheckpointError: a weight whose parts are not all there, or do not fit each other.
        """
        ...


class LogicalTensors:
    """Plain tensors over stored ones: what is quantised is dequantised when it is read.

    Args:
      stored: the files.
      quantised: how weights are quantised; None: none is.
      integers: names of plain tensors that need not be floats.

    Raises:
      CheckpointError: names a tensor that is neither plain nor, with others, a whole quantised weight.
    """

    def __init__(self, stored: TensorFiles, quantised: Format | None = None, integers: Collection[str] = ()):
        self.stored = stored
        self._made = quantised.weights(stored) if quantised is not None else {}
        parts = {part for weight in self._made.values() for part in weight.parts}
        self._plain = set(stored.names()) - parts
        if quantised is not None:
            self._plain = {name for name in self._plain if not _UNUSED.search(name)}
        for name in sorted(self._plain - set(integers)):
            self._check_plain(name)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: self.shape(name) for name in self.names()}

    def drop(self, names: Iterable[str]) -> None:
        """Forgets tensors that the model does not use."""
        for name in names:
            self._plain.discard(name)
            self._made.pop(name, None)

    def names(self) -> frozenset[str]:
        return frozenset(self._plain) | frozenset(self._made)

    def shape(self, name: str) -> Shape:
        return self._made[name].shape if name in self._made else self.stored.shape(self._known(name))

    def dtype(self, name: str) -> np.dtype:
        return RESULT if name in self._made else self.stored.dtype(self._known(name))

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> np.ndarray:
        return self._made[name].read() if name in self._made else self.stored.read(self._known(name))

    def kind(self, name: str) -> str | None:
        """How a tensor is quantised, for people; None: it is not."""
        return self._made[name].kind if name in self._made else None

    @property
    def blocks(self) -> dict[str, int]:
        """Of weights that may stay in float8: how many columns share a scale."""
        return {name: made.float8.columns for name, made in self._made.items() if made.float8 is not None}

    def read_codes(self, name: str) -> np.ndarray:
        """A tensor of `blocks` in float8."""
        return self._float8(name).codes()

    def read_scales(self, name: str) -> np.ndarray:
        """The scales of all elements of a tensor of `blocks`, float32."""
        return self._float8(name).scales()

    def _float8(self, name: str) -> Float8:
        found = self._made[name].float8
        assert found is not None, name
        return found

    def stored_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Stored bytes by element type of plain tensors, and by kind of quantised ones."""
        plain: dict[str, int] = {}
        packed: dict[str, int] = {}
        for name in sorted(self._plain):
            kind = str(self.dtype(name))
            plain[kind] = plain.get(kind, 0) + self.stored.nbytes(name)
        for made in self._made.values():
            packed[made.kind] = packed.get(made.kind, 0) + sum(map(self.stored.nbytes, made.parts))
        return plain, packed

    def _check_plain(self, name: str) -> None:
        if name in self._made:
            raise CheckpointError(name, "a plain tensor beside quantised parts of it", "one of the two")
        if _PART.search(name):
            got = "a part of a quantised weight without its other parts"
            raise CheckpointError(
                name, got, "whole weights, of the kind that config.json's quantization_config says"
            )
        if self.stored.dtype(name) not in PLAIN:
            legal = "float32, float16 or bfloat16, or a quantization_config in config.json that explains it"
            raise CheckpointError(name, str(self.stored.dtype(name)), legal)

    def _known(self, name: str) -> str:
        if name not in self._plain:
            raise CheckpointError(name, "no such tensor", "a name of names()")
        return name


def need(stored: TensorFiles, name: str, what: str, dtypes: tuple[np.dtype, ...], *shapes: Shape) -> str:
    """The name, of a part that must be there with one of these types and shapes.

    Args:
      what: the part, in words: "the scales of X.weight".
      shapes: none: any shape.

    Raises:
      CheckpointError: it is not there, or something else.
    """
    if name not in stored.names():
        raise CheckpointError(name, "no such tensor", what)
    if stored.dtype(name) not in dtypes:
        raise CheckpointError(name, str(stored.dtype(name)), f"{what}, {' or '.join(map(str, dtypes))}")
    if shapes and stored.shape(name) not in shapes:
        legal = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise CheckpointError(name, list(stored.shape(name)), f"{what}, of shape {legal}")
    return name


def by_rows(shape: Shape, rows: Callable[[slice], np.ndarray], multiple: int = 1) -> np.ndarray:
    """A matrix as bfloat16, a few rows at a time.

    Args:
      shape: [out, in].
      rows: gives these rows, float32 [rows, in]; slices start at multiples of `multiple`.
    """
    result = np.empty(shape, RESULT)
    step = max(_PIECE // max(shape[1], 1) // multiple, 1) * multiple
    for start in range(0, shape[0], step):
        here = slice(start, min(start + step, shape[0]))
        result[here] = rows(here)
    return result
