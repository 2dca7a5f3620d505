"""Weights that stay in float8 with their scales, and are dequantised where a product takes them.

A row has a scale for every `group` columns. Checkpoints have them for blocks of rows and columns: the rows'
copies cost little (4 bytes for 128), and so rows can be sorted, cut and spread over devices like any
weight's, wherever a block ends.
"""

import dataclasses
from types import EllipsisType

import jax
import jax.numpy as jnp

LEAST_GROUP = 8  # below, scales would make a weight nearly as large as in bfloat16, or larger
CODES = jnp.dtype("float8_e4m3fn")
SCALES = jnp.dtype("float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A weight of float8 codes times scales. Of an array it has what models ask of a weight."""

    codes: jax.Array  # ..., columns
    scales: jax.Array  # ..., ceil(columns / group) fp32
    group: int = dataclasses.field(metadata={"static": True})  # columns of a scale; the last may have fewer

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, index: EllipsisType) -> "BlockScaled":
        """The whole weight: so does `nnx.Param` hand it out."""
        assert index is ...
        return self

    def reshape(self, *shape: int) -> "BlockScaled":
        """In another shape; columns may be joined or parted only where whole groups are."""
        codes = self.codes.reshape(*shape)
        old, new = self.shape[-1], codes.shape[-1]
        assert old == new or not (old % self.group or new % self.group), (self.shape, shape, self.group)
        return dataclasses.replace(
            self, codes=codes, scales=self.scales.reshape(*codes.shape[:-1], -(-new // self.group))
        )


Weight = jax.Array | BlockScaled


def dense(x: jax.Array, weight: Weight) -> tuple[jax.Array, jax.Array]:
    """What a product takes: x as it is, and the weight as an array of x's type.

    Values are rounded to bfloat16 first, as those of weights that are dequantised when they are read.
    """
    if not isinstance(weight, BlockScaled):
        return x, weight
    # Dequantised not before x is there: else the compiler may do it for all layers ahead of the loop around
    # them, and keep what it got.
    x, codes, scales = jax.lax.optimization_barrier((x, weight.codes, weight.scales))
    return x, _values(codes, scales, weight.group, x.dtype)


def take(weight: Weight, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows [..., columns] of a table [..., columns]: those at `rows` [...], counted over its leading axes.

    Those of float8 are dequantised as `dense` does, after they are found.
    """

    def found(table: jax.Array) -> jax.Array:
        return table.reshape(-1, table.shape[-1])[rows]

    if not isinstance(weight, BlockScaled):
        return found(weight)
    return _values(found(weight.codes), found(weight.scales), weight.group, dtype)


def _values(codes: jax.Array, scales: jax.Array, group: int, dtype: jnp.dtype) -> jax.Array:
    spread = jnp.broadcast_to(scales[..., None], (*scales.shape, group))
    spread = spread.reshape(*scales.shape[:-1], -1)[..., : codes.shape[-1]]
    values = codes.astype(SCALES) * spread
    if dtype != jnp.bfloat16:  # not two casts, which the compiler would take for none
        values = jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(dtype)
