"""Four-bit floats: NVFP4 (a float8 scale for 16 of them, and a float32 one for the tensor) and MXFP4 (a power
of two for 32)."""

import dataclasses

import ml_dtypes
import numpy as np

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.fp8 import FP8, POWERS, FP8Format, decoded, factors_of, scaled
from mtp_jax.loading.quantised import Dequantised, by_rows, need
from mtp_jax.loading.tensor_files import TensorFiles

GROUP = 16  # values of a row that share a scale, in NVFP4
MX_GROUP = 32  # and in MXFP4
_BYTES, _F32 = np.dtype(np.uint8), np.dtype(np.float32)
# Each byte's two values, the low four bits' first: [256, 2].
_PAIRS = np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1).astype(np.uint8)
_VALUES = _PAIRS.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ModelOpt:
    """NVIDIA's modelopt (a `Format`): NVFP4 where `weight` is bytes, float8 where it is float8."""

    fp8: FP8Format = FP8Format((128, 128))  # noqa: RUF009 - frozen

    def weights(self, stored: TensorFiles) -> dict[str, Dequantised]:
        names = stored.names()
        packed = [name for name in names if stored.dtype(name) == _BYTES and name + "_scale_2" in names]
        packed += [name for name in names if stored.dtype(name) == _BYTES and name.endswith(".weight")]
        found = {
            name: nvfp4(stored, name, name, name + "_scale_2", divide=False) for name in sorted(set(packed))
        }
        return found | self.fp8.weights(stored)


@dataclasses.dataclass(frozen=True)
class Quark:
    """AMD's Quark (a `Format`): MXFP4 where `weight` is bytes, float8 where it is float8."""

    fp8: FP8Format = FP8Format()  # noqa: RUF009 - frozen

    def weights(self, stored: TensorFiles) -> dict[str, Dequantised]:
        packed = [
            name for name in stored.names() if stored.dtype(name) == _BYTES and name.endswith(".weight")
        ]
        return {name: mxfp4(stored, name, name) for name in sorted(packed)} | self.fp8.weights(stored)


def mxfp4(stored: TensorFiles, weight: str, codes: str) -> Dequantised:
    """A weight from `codes` [out, in / 2] and `weight`_scale [out, in / 32], exponents of two.

    Args:
      weight: its name as a plain tensor.
      codes: name of its bytes, two values each.
    """
    rows, columns = _shape(stored, codes, MX_GROUP)
    shape = (rows, columns // MX_GROUP)
    scales = need(stored, weight + "_scale", f"the scales of {codes}", (_BYTES, POWERS), shape)

    def read() -> np.ndarray:
        packed, factors = stored.read(codes), factors_of(stored, scales)

        def some(here: slice) -> np.ndarray:
            return scaled(_VALUES[packed[here]].reshape(-1, columns), factors[here], MX_GROUP)

        return by_rows((rows, columns), some)

    return Dequantised((rows, columns), "MXFP4", (codes, scales), read)


def _shape(stored: TensorFiles, codes: str, group: int) -> tuple[int, int]:
    """Rows and columns of a weight with two values a byte."""
    if len(stored.shape(codes)) != 2 or stored.shape(codes)[1] * 2 % group:
        legal = f"[out, in / 2] for an `in` that is a multiple of {group}"
        raise CheckpointError(codes, list(stored.shape(codes)), legal)
    return stored.shape(codes)[0], stored.shape(codes)[1] * 2


def nvfp4(stored: TensorFiles, weight: str, codes: str, whole: str, *, divide: bool) -> Dequantised:
    """A weight from `codes` [out, in / 2], `weight`_scale [out, in / 16] and the tensor's scale.

    Args:
      weight: its name as a plain tensor.
      codes: name of its bytes, two values each.
      whole: name of the scale of the whole tensor.
      divide: whether that scale divides instead of multiplying.
    """
    rows, columns = _shape(stored, codes, GROUP)
    scales = need(stored, weight + "_scale", f"the scales of {codes}", FP8[:1], (rows, columns // GROUP))
    need(stored, whole, f"the scale of all of {codes}", (_F32,), (), (1,))

    def read() -> np.ndarray:
        packed = stored.read(codes)
        factors = decoded(FP8[0])[stored.read(scales).view(np.uint8)]
        factor = stored.read(whole).reshape(())

        def some(here: slice) -> np.ndarray:
            values = _VALUES[packed[here]].reshape(-1, columns)
            values = scaled(values, factors[here], GROUP)
            return values / factor if divide else values * factor

        return by_rows((rows, columns), some)

    return Dequantised((rows, columns), "NVFP4", (codes, scales, whole), read)
