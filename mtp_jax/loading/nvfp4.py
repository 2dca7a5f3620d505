"""NVFP4 weights: four-bit floats, a float8 scale for 16 of them, and a float32 one for the tensor."""

import dataclasses

import ml_dtypes
import numpy as np

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.fp8 import FP8, FP8Format, decoded, scaled
from mtp_jax.loading.quantised import Dequantised, by_rows, need
from mtp_jax.loading.tensor_files import TensorFiles

GROUP = 16  # values of a row that share a scale
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


def nvfp4(stored: TensorFiles, weight: str, codes: str, whole: str, *, divide: bool) -> Dequantised:
    """A weight from `codes` [out, in / 2], `weight`_scale [out, in / 16] and the tensor's scale.

    Args:
      weight: its name as a plain tensor.
      codes: name of its bytes, two values each.
      whole: name of the scale of the whole tensor.
      divide: whether that scale divides instead of multiplying.
    """
    if len(stored.shape(codes)) != 2 or stored.shape(codes)[1] * 2 % GROUP:
        legal = f"[out, in / 2] for an `in` that is a multiple of {GROUP}"
        raise CheckpointError(codes, list(stored.shape(codes)), legal)
    rows, columns = stored.shape(codes)[0], stored.shape(codes)[1] * 2
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
