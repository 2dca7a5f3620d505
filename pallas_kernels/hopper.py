"""What the Mosaic GPU kernels share: the sizes of the chip, and results that shard_map can follow."""

import jax
from jax import lax

NUM_SMS = 132  # multiprocessors of an H100 or H200
SMEM_BYTES = 227 * 1024  # shared memory that a multiprocessor has, and that a block may take


def vary_like(operands: tuple[jax.Array, ...], *results: jax.Array) -> list[jax.Array]:
    """The results, marked to vary over every manual mesh axis that an operand varies over.

    plgpu.kernel switches check_vma off around itself, so its results come out as if all devices had the same.
    """
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    return [
        lax.pcast(x, tuple(varying - jax.typeof(x).manual_axis_type.varying), to="varying") for x in results
    ]
