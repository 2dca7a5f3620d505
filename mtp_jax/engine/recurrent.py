"""Recurrent state of the slots: rounds that may be taken back, and prompt chunks that stand.

A decode row first replays what stood of its slot's last round, writes the state behind it, and then reads
the new round's rows on top of that without writing them: they go to the slot's journal. A prompt chunk
advances the state itself. So nothing is ever undone (see `models/delta_net.py`).
"""

import jax
import jax.numpy as jnp

from mtp_jax.models.delta import DeltaInputs, DeltaWeights
from mtp_jax.models.delta_net import (
    Changes,
    DeltaHeads,
    Journal,
    Rows,
    advance_window,
    causal_conv,
    delta_rule_chunked,
    delta_rule_steps,
    recurrence_rows,
    replay,
)
from mtp_jax.models.layers import Cache


def run_rows(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    heads: DeltaHeads,
    cache: Cache,
    slot: jax.Array,
    stood: jax.Array,
) -> tuple[jax.Array, Cache]:
    """A round of decode rows, B T -> (outputs [B, T, IJ, Y], cache).

    Args:
      cache: of the layer, as `DeltaAttention.caches` describes it.
      slot: where each row's state is, [B]; the last one is a sink.
      stood: rows of the slot's last round that were accepted, [B].
    """
    t = inputs.channels.shape[1]
    state, window, *journal = (_take(array, slot) for array in cache)
    state, window = replay(state, window, Journal(journal[0], Changes(*journal[1:])), stood)
    rows = _rows(inputs, weights, heads, window)
    outputs, changes = delta_rule_steps(state, rows)
    new = (inputs.channels.astype(cache[2].dtype), changes.key, changes.delta, changes.decay)
    journal = [old.at[:, :t].set(rows) for old, rows in zip(journal, new, strict=True)]
    return outputs, _put(cache, slot, (state, window, *journal))


def run_chunk(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    heads: DeltaHeads,
    cache: Cache,
    slot: jax.Array,
    count: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, Cache]:
    """A prompt chunk, 1 C -> (outputs [1, C, IJ, Y], cache).

    Args:
      slot: where its state is, [1]; the last one is a sink.
      count: tokens that the chunk has, [1].
      first: whether it begins the prompt, and with it an empty state, [1].
    """
    state, window = (_take(array, slot) for array in cache[:2])
    state, window = (
        jnp.where(first.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros((), x.dtype), x) for x in (state, window)
    )
    rows = _rows(inputs, weights, heads, window)
    real = (jnp.arange(inputs.channels.shape[1]) < count[:, None])[..., None]
    nothing = jnp.zeros((), jnp.float32)
    rows = Rows(
        rows.query,
        jnp.where(real[..., None], rows.key, nothing),  # 0 times an overflown row would not be 0
        jnp.where(real[..., None], rows.value, nothing),
        jnp.where(real, rows.log_decay, nothing),
        jnp.where(real, rows.strength, nothing),
    )
    outputs, state = delta_rule_chunked(state, rows)
    window = advance_window(window, inputs.channels, count)
    return outputs, (*_put(cache[:2], slot, (state, window)), *cache[2:])


def convolve_rows(
    x: jax.Array, weight: jax.Array, dilation: int, cache: Cache, slot: jax.Array, stood: jax.Array
) -> tuple[jax.Array, Cache]:
    """A convolution of a round of decode rows x [B, T, A] -> ([B, T, A] fp32, cache).

    Args:
      weight: [A, taps].
      cache: the slots' windows and the inputs of their last rounds.
      slot, stood: as for `run_rows`.
    """
    window, journal = (_take(array, slot) for array in cache)
    window = advance_window(window, journal, stood)
    journal = journal.at[:, : x.shape[1]].set(x.astype(journal.dtype))
    return causal_conv(window, x, weight, dilation), _put(cache, slot, (window, journal))


def convolve_chunk(
    x: jax.Array,
    weight: jax.Array,
    dilation: int,
    cache: Cache,
    slot: jax.Array,
    count: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, Cache]:
    """The same for a prompt chunk x [1, C, A]; other arguments as for `run_chunk`."""
    window = _take(cache[0], slot)
    window = jnp.where(first[:, None, None], jnp.zeros((), window.dtype), window)
    mixed = causal_conv(window, x, weight, dilation)
    return mixed, (*_put(cache[:1], slot, (advance_window(window, x, count),)), *cache[1:])


def _rows(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    heads: DeltaHeads,
    window: jax.Array,
) -> Rows:
    mixed = jax.nn.silu(causal_conv(window, inputs.channels, weights.conv)).astype(inputs.channels.dtype)
    return recurrence_rows(mixed, inputs.b, inputs.a, weights.a_log, weights.dt_bias, heads)


def _take(array: jax.Array, slot: jax.Array) -> jax.Array:
    return array.at[slot].get(mode="promise_in_bounds")


def _put(cache: Cache, slot: jax.Array, new: tuple[jax.Array, ...]) -> Cache:
    """The caches with these entries at `slot` [B]; several rows may write to the sink."""

    def put(old: jax.Array, rows: jax.Array) -> jax.Array:
        rows = rows.astype(old.dtype)
        if slot.shape[0] > 1:
            return old.at[slot].set(rows, mode="promise_in_bounds")
        # XLA expands a scatter of one row into a select, and copies the cache for it; this is in place.
        zeros = (jnp.int32(0),) * (old.ndim - 1)
        return jax.lax.dynamic_update_slice(old, rows, (slot[0], *zeros))

    written = tuple(put(old, rows) for old, rows in zip(cache, new, strict=True))
    # Without the barrier XLA may fuse the write into later reads, and must then keep the old cache.
    return jax.lax.optimization_barrier(written)
