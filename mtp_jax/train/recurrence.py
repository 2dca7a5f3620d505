"""Gated delta nets over packed rows: each segment begins with an empty state and an empty window."""

import jax
import jax.numpy as jnp

from mtp_jax.models.delta import DeltaInputs, DeltaWeights
from mtp_jax.models.delta_net import DeltaHeads, Rows, delta_rule_chunked, recurrence_rows

# What a segment's first row does to the state before it: e^-40 = 4e-18 is nothing in fp32, and sums of a
# few of these still tell a decay of 1e-5 from none, which those of larger ones would not.
FORGET = -40.0


def run(mask: jax.Array, inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads) -> jax.Array:
    """Outputs of all rows, [M, IJ, Y] fp32.

    Args:
      mask: [B, S, S] of `causal_mask`.
      inputs: of M = B S token rows.
    """
    b, s, _ = mask.shape
    channels, b_rows, a_rows = (x.reshape(b, s, -1) for x in (inputs.channels, inputs.b, inputs.a))
    mixed = jax.nn.silu(_convolved(mask, channels, weights.conv)).astype(channels.dtype)
    rows = recurrence_rows(mixed, b_rows, a_rows, weights.a_log, weights.dt_bias, heads)
    first = ~_sees(mask, 1)[..., None]  # B S 1
    rows = Rows(rows.query, rows.key, rows.value, jnp.where(first, FORGET, rows.log_decay), rows.strength)
    outputs, _ = delta_rule_chunked(jnp.zeros((b, *heads.state_shape), jnp.float32), rows)
    return outputs.reshape(b * s, *outputs.shape[2:])


def _convolved(mask: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Depthwise causal convolution of x [B, S, A] inside segments, fp32.

    weight is [A, taps], the last tap for a row itself.
    """
    taps, length = weight.shape[1], x.shape[1]
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    out = x * weight[:, -1]
    for back in range(1, min(taps, length)):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :length]
        out = out + jnp.where(_sees(mask, back)[..., None], earlier * weight[:, -1 - back], 0.0)
    return out


def _sees(mask: jax.Array, back: int) -> jax.Array:
    """Whether each position sees the one so many before it, [B, S] bool."""
    return jnp.pad(jnp.diagonal(mask, -back, axis1=1, axis2=2), ((0, 0), (back, 0)))
