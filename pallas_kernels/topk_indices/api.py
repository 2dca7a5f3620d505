"""The positions of the best k scores of each row: the contract, and who carries it out."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.device import NotHereError, on_hopper
from pallas_kernels.topk_indices import mosaic_gpu, reference

Implementation = Literal["auto", "mosaic_gpu", "reference"]


def topk_indices(
    scores: jax.Array, lengths: jax.Array, k: int, *, implementation: Implementation = "auto"
) -> jax.Array:
    """The exact set of each row's k best positions among its first `lengths`, in ascending order.

    A score of -inf is not chosen; of equal scores (-0.0 equals 0.0) the lower positions are. Scores that are
    NaN may be anywhere. What lies at or behind a row's length may be anything. Works inside shard_map
    with check_vma on.

    Args:
      scores: [T, L] fp32.
      lengths: [T] int32, clipped to [0, L].
      k: how many.
      implementation: `auto` takes the kernel where there is one.

    Returns:
      [T, k] int32, -1 behind the last where a row has fewer.

    Raises:
      NotHereError: `auto` or `mosaic_gpu`, and no kernel takes this.
      ValueError: shapes that do not belong together.
    """
    if scores.ndim != 2 or scores.dtype != jnp.float32 or lengths.shape != scores.shape[:1] or k < 1:
        raise ValueError(
            "scores must be float32 [T, L], lengths [T], k positive; got"
            f" {scores.dtype}{scores.shape}, {lengths.shape}, {k}"
        )
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths must be integers, got {lengths.dtype}")
    if implementation == "reference":
        return reference.topk_indices(scores, lengths, k)
    reason = mosaic_gpu.why_not(scores)
    if reason is None and implementation == "auto" and not on_hopper():
        reason = "it needs a Hopper GPU"
    if reason is not None:
        raise NotHereError(f"no top-k kernel here: {reason}")
    return mosaic_gpu.topk_indices(scores, lengths, k)
