"""Mosaic GPU kernels that write into some of their operands.

plgpu.kernel writes into a `jax.Ref`, but not inside shard_map where the array varies over a mesh axis. The
primitive beneath takes aliases, and gives a result the varying axes of the operand that it replaces. It is
private to JAX: where it is not what this module knows, `AVAILABLE` is false.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SEEN_WITH = ("0.11.2", "0.12.0.1")  # versions of JAX


def _find() -> Callable[..., Any] | None:
    """JAX's primitive for a kernel with aliases, where it has the arguments that are used here."""
    try:
        from jax._src.pallas.mpmd import _mpmd_map
    except ImportError:
        return None
    used = {"input_output_aliases", "compiler_params", "interpret", "name"}
    fits = used <= inspect.signature(_mpmd_map).parameters.keys()
    contexts = ("_check_vma", "pallas_tpu_interpret_mode_context_manager")
    return _mpmd_map if fits and all(hasattr(config, name) for name in contexts) else None


_mpmd_map = _find()
AVAILABLE = _mpmd_map is not None


def kernel(
    body: Callable[..., None],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    num_in_place: int,
    scratch_types: Mapping[str, Any],
    mesh: plgpu.Mesh,
    compiler_params: plgpu.CompilerParams,
    name: str,
) -> Callable[..., list[jax.Array]]:
    """As plgpu.kernel, for one thread a block, and in place.

    Args:
      body: takes the operands, then the results of `out_type`, then scratch by name. Its last `num_in_place`
        operands are for reading and writing.
      out_type: results besides.
      num_in_place: operands that are written in place, where the caller gives them up.
      scratch_types: as plgpu.kernel's.
      mesh: grid.
      compiler_params: as plgpu.kernel's.
      name: of the kernel in profiles.

    Returns:
      A function of the operands; it returns the results of `out_type`, then the new operands.
    """
    assert _mpmd_map is not None
    mpmd_map = _mpmd_map

    def run(*operands: jax.Array) -> list[jax.Array]:
        plain, count = len(operands) - num_in_place, len(out_type)

        def with_scratch(*refs: Any) -> None:
            read, results, updated = (
                refs[:plain],
                refs[len(operands) :][:count],
                refs[len(operands) + count :],
            )
            pl.run_scoped(
                functools.partial(body, *read, *updated, *results), collective_axes=(), **scratch_types
            )

        replaced = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[plain:]]
        aliases = {plain + i: count + i for i in range(num_in_place)}
        with config._check_vma(False):  # as plgpu.kernel does: bodies know nothing of mesh axes
            return mpmd_map(
                [(mesh, with_scratch)],
                [*out_type, *replaced],
                input_output_aliases=aliases,
                compiler_params=compiler_params,
                interpret=config.pallas_tpu_interpret_mode_context_manager.value or False,
                name=name,
            )(*operands)

    return run
