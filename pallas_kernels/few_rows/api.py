"""The products of a decoder layer on a few rows, with what stands around them: the contract.

A layer at decode has few rows, and its time is the number of its kernels. These are the whole of it but
attention: norm + q, k, v + bias + rotation; output projection + residual; norm + gate, up + SiLU; down
projection + residual. Weights stay [out, in], as the modules store them, and are read once.

Sums are fp32, and results are rounded once, at the end; XLA's form also rounds between, so the two differ by
roundings. Equal inputs give equal bits. Works inside shard_map with check_vma on.
"""

from typing import Literal

import jax

from pallas_kernels.device import NotHereError, on_hopper
from pallas_kernels.few_rows import mosaic_gpu, reference

Implementation = Literal["auto", "mosaic_gpu", "reference"]


def norm_qkv_rope(
    x: jax.Array,
    norm: jax.Array,
    qkv: jax.Array,
    bias: jax.Array | None,
    rope: tuple[jax.Array, jax.Array],
    eps: float,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Queries, keys and values of a layer, rotated: RMS norm, projection, bias, rotary embedding.

    In plain JAX, with normed = x / sqrt(mean(x², -1) + eps) * norm:

        out = einsum("md,gqhd->mgqh", normed, qkv) + bias
        low, high = split(out, 2, -1)
        rotated = concatenate([low * cos - high * sin, high * cos + low * sin], -1)
        result = concatenate([rotated[:, :, :-1], out[:, :, -1:]], 2)

    Args:
      x: [M, D].
      norm: [D].
      qkv: [G, Q + 2, H, D]: of each KV head its queries, its key, its value.
      bias: [G, Q + 2, H], or None.
      rope: cosines and sines, [M, H / 2] fp32.
      eps: of the norm.
      implementation: `auto` takes the kernel where there is one.

    Returns:
      [M, G, Q + 2, H] in x's dtype.

    Raises:
      NotHereError: `auto` or `mosaic_gpu`, and no kernel takes this.
      ValueError: shapes that do not belong together.
    """
    m, d = x.shape
    g, per_group, h = qkv.shape[:3]
    _need(norm, (d,), "norm")
    _need(qkv, (g, per_group, h, d), "qkv")
    for table in rope:
        _need(table, (m, h // 2), "a table of rope")
    if bias is not None:
        _need(bias, (g, per_group, h), "bias")
    if implementation == "reference":
        return reference.norm_qkv_rope(x, norm, qkv, bias, rope, eps)
    _need_kernel(x, qkv, h // 2, implementation)
    return mosaic_gpu.norm_qkv_rope(x, norm, qkv, bias, rope, eps)


def norm_swiglu(
    x: jax.Array, norm: jax.Array, gate_up: jax.Array, eps: float, *, implementation: Implementation = "auto"
) -> jax.Array:
    """silu(normed @ gate.T) * (normed @ up.T), with normed as in `norm_qkv_rope`.

    Args:
      x: [M, D].
      norm: [D].
      gate_up: [2, F, D].
      eps: of the norm.
      implementation: `auto` takes the kernel where there is one.

    Returns:
      [M, F] in x's dtype.

    Raises:
      NotHereError, ValueError: as `norm_qkv_rope`.
    """
    _need(norm, (x.shape[1],), "norm")
    _need(gate_up, (2, gate_up.shape[1], x.shape[1]), "gate_up")
    if implementation == "reference":
        return reference.norm_swiglu(x, norm, gate_up, eps)
    _need_kernel(x, gate_up, gate_up.shape[1], implementation)
    return mosaic_gpu.norm_swiglu(x, norm, gate_up, eps)


def project_add(
    x: jax.Array, weight: jax.Array, residual: jax.Array, *, implementation: Implementation = "auto"
) -> jax.Array:
    """x @ weight.T + residual.

    Args:
      x: [M, in].
      weight: [D, in].
      residual: [M, D].
      implementation: `auto` takes the kernel where there is one.

    Returns:
      [M, D] in residual's dtype.

    Raises:
      NotHereError, ValueError: as `norm_qkv_rope`.
    """
    _need(weight, (weight.shape[0], x.shape[1]), "weight")
    _need(residual, (x.shape[0], weight.shape[0]), "residual")
    if implementation == "reference":
        return reference.project_add(x, weight, residual)
    _need_kernel(x, weight, weight.shape[0], implementation)
    return mosaic_gpu.project_add(x, weight, residual)


def _need(array: jax.Array, shape: tuple[int, ...], name: str) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(array.shape)}")


def _need_kernel(x: jax.Array, weight: jax.Array, width: int, implementation: Implementation) -> None:
    """Raises NotHereError where no kernel takes x [M, in] and weights with parts of `width` outputs."""
    reason = mosaic_gpu.why_not(x, weight.dtype, width)
    if reason is None and implementation == "auto" and not on_hopper():
        reason = "it needs a Hopper GPU"
    if reason is not None:
        raise NotHereError(f"no kernel for a few rows here: {reason}")
