"""The gated delta net of Qwen3-Next, Qwen3.5 and Qwen4Exp: pure functions, without weights or caches.

Per value head there is a state S [X, Y] in fp32, X the width of a key and Y that of a value. A row has a
query q, a key k, a value v, a decay e^g and a strength beta, and does

    S <- e^g S;   delta = beta (v - S^T k);   S <- S + k delta^T;   out = S^T q

Letters besides those of `mtp_jax/shapes.py`, in this file only:

    I  key heads      J  value heads a key head; value head i J + j has key head i
    X  key width      Y  value width
    A  channels of the convolution: all queries, then all keys, then all values

A row with g = 0 and beta = 0 leaves the state as it is: so do callers hide rows that hold no token.

What a speculative round may have to take back is not undone but never done. A round reads the state and
leaves it where the accepted rows of earlier rounds end; a `Journal` keeps what its own rows would do, and the
next round first replays as many of them as were accepted. The replay is the same sums whatever the others
were and however many, so no bit of the state tells of a rejected row.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 64  # rows whose mutual influence is solved at once; the published models are trained with it
L2_EPS = 1e-6  # under the root, on the sum of squares: the training kernels' constant, in no config.json


@dataclasses.dataclass(frozen=True)
class DeltaHeads:
    """Head counts and widths of a delta net."""

    num_key_heads: int  # I
    num_value_heads: int  # I J
    key_width: int  # X
    value_width: int  # Y

    @property
    def num_channels(self) -> int:
        """A, the convolution's channels."""
        return 2 * self.num_key_heads * self.key_width + self.num_value_heads * self.value_width

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of one sequence: [I J, X, Y]."""
        return self.num_value_heads, self.key_width, self.value_width


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the recurrence takes of each row, fp32."""

    query: jax.Array  # B T I X    of length X^-0.5
    key: jax.Array  # B T I X      of length 1
    value: jax.Array  # B T IJ Y
    log_decay: jax.Array  # B T IJ  g, at most 0
    strength: jax.Array  # B T IJ   beta, between 0 and 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Changes:
    """What T rows do to a state, fp32: S <- decay S + key delta^T, one after the other."""

    key: jax.Array  # B T I X
    delta: jax.Array  # B T IJ Y
    decay: jax.Array  # B T IJ


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Journal:
    """What T rows do to a layer's state and to its convolution's window; a small part of the state's size."""

    channels: jax.Array  # B T A  the convolution's inputs, in their own dtype
    changes: Changes


# Weights


def interleaved_rows(groups: int, widths: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Where each part's rows are in a weight that has, group by group, `widths` rows of each part.

    Qwen3-Next packs by key head: in_proj_qkvz with widths (X, X, J Y, J Y), in_proj_ba with (J, J). The rows
    of one part are the weight that Qwen3.5 has for it; those of q, then k, then v are its in_proj_qkv.
    """
    rows = np.arange(groups * sum(widths)).reshape(groups, -1)
    return tuple(part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1))


# Norms and gates


def gated_rms_norm(
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array,
    eps: float,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> jax.Array:
    """weight times the normalised x [..., Y] times activation(gate), in fp32; in the gate's dtype.

    The weight is the plain factor here, not its distance from one. Qwen4Exp's activation is a sigmoid.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32) * activation(gate.astype(jnp.float32))).astype(gate.dtype)


def l2_normalise(x: jax.Array) -> jax.Array:
    """x [..., X] divided by sqrt(sum of squares + 1e-6), fp32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + L2_EPS)


def recurrence_rows(
    mixed: jax.Array, b: jax.Array, a: jax.Array, a_log: jax.Array, dt_bias: jax.Array, heads: DeltaHeads
) -> Rows:
    """The recurrence's rows from projections.

    Args:
      mixed: B T A, after the convolution and its SiLU
      b, a: B T IJ, products of in_proj_b and in_proj_a
      a_log, dt_bias: IJ, weights
      heads: counts and widths
    """
    width = heads.num_key_heads * heads.key_width
    query, key, value = jnp.split(mixed.astype(jnp.float32), (width, 2 * width), axis=-1)
    per_key_head = (*mixed.shape[:-1], heads.num_key_heads, heads.key_width)
    steps = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return Rows(
        query=l2_normalise(query.reshape(per_key_head)) * heads.key_width**-0.5,
        key=l2_normalise(key.reshape(per_key_head)),
        value=value.reshape(*mixed.shape[:-1], heads.num_value_heads, heads.value_width),
        log_decay=-jnp.exp(a_log.astype(jnp.float32)) * steps,
        strength=jax.nn.sigmoid(b.astype(jnp.float32)),
    )


# Convolution


def causal_conv(window: jax.Array, x: jax.Array, weight: jax.Array, dilation: int = 1) -> jax.Array:
    """Depthwise causal convolution of the rows x, fp32 [B, T, A], without an activation.

    Args:
      window: B (taps - 1) * dilation A, the inputs before x, oldest first; zeros before a sequence's first
      x: B T A
      weight: A taps, the last tap for a row itself
      dilation: rows from one tap to the next (Qwen4Exp's n-gram embedding: 3)
    """
    inputs = jnp.concatenate([window, x.astype(window.dtype)], axis=1).astype(jnp.float32)
    taps, rows = weight.shape[1], x.shape[1]
    parts = [
        inputs[:, tap * dilation : tap * dilation + rows] * weight[:, tap].astype(jnp.float32)
        for tap in range(taps)
    ]
    return sum(parts[1:], parts[0])


def advance_window(window: jax.Array, x: jax.Array, count: jax.Array) -> jax.Array:
    """The window after the first count [B] int32 (0 to T) of the rows x [B, T, A]."""
    inputs = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    places = count[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(inputs, places[..., None], axis=1)


# Recurrence


def _per_key_head(x: jax.Array, num_key_heads: int) -> jax.Array:
    """[B, IJ, ...] -> [B, I, J, ...]."""
    return x.reshape(x.shape[0], num_key_heads, -1, *x.shape[2:])


def delta_rule_steps(state: jax.Array, rows: Rows) -> tuple[jax.Array, Changes]:
    """Outputs of the T rows of a round, one after the other, behind a state that stays as it is.

    The state, far larger than all else, is read once: S^T k_t behind earlier rows is what the first state has
    for k_t plus what these rows' changes add to it. Every row is written out, so T is that of a round.

    Args:
      state: B IJ X Y fp32
      rows: T of them
    Returns:
      outputs B T IJ Y, fp32; and what the rows do, for a journal
    """
    batch, count, num_key_heads, _ = rows.key.shape
    state = _per_key_head(state, num_key_heads)
    value, strength, log_decay = (
        x.reshape(batch, count, num_key_heads, -1, *x.shape[3:])
        for x in (rows.value, rows.strength, rows.log_decay)
    )
    total = jnp.cumsum(log_decay, axis=1)  # B T I J
    # Products and sums, not matrix products: fp32 on every platform, and the reading is what takes the time.
    both = jnp.concatenate([rows.key, rows.query], axis=1)
    first = jnp.sum(state[:, None] * both[:, :, :, None, :, None], axis=-2)  # B 2T I J Y
    known, outputs = (x * jnp.exp(total)[..., None] for x in jnp.split(first, 2, axis=1))
    # How much of an earlier row's delta, on axis 2, is found along a row's key or query.
    earlier = jnp.tril(jnp.ones((count, count), bool))[:, :, None, None]
    between = jnp.exp(jnp.where(earlier, total[:, :, None] - total[:, None], -math.inf))  # B T T I J
    along_key, along_query = (
        (jnp.sum(x[:, :, None] * rows.key[:, None], axis=-1)[..., None] * between)[..., None]
        for x in (rows.key, rows.query)
    )
    deltas, found = value[:, :0], []
    for row in range(count):
        expected = known[:, row] + jnp.sum(along_key[:, row, :row] * deltas, axis=1)
        delta = strength[:, row, ..., None] * (value[:, row] - expected)
        deltas = jnp.concatenate([deltas, delta[:, None]], axis=1)
        found.append(outputs[:, row] + jnp.sum(along_query[:, row, : row + 1] * deltas, axis=1))
    changes = Changes(rows.key, deltas.reshape(rows.value.shape), jnp.exp(rows.log_decay))
    return jnp.stack(found, axis=1).reshape(rows.value.shape), changes


def replay(
    state: jax.Array, window: jax.Array, journal: Journal, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Advances a state B IJ X Y and a window by the first count [B] int32 (0 to T) rows of a journal.

    One pass over the state. Rows behind count may hold anything, and leave no trace.
    """
    changes = journal.changes
    num_rows, num_key_heads = changes.key.shape[1:3]
    live = jnp.arange(num_rows, dtype=jnp.int32) < count[:, None]

    def kept(x: jax.Array, otherwise: float) -> jax.Array:
        return jnp.where(live.reshape(*live.shape, *(1,) * (x.ndim - 2)), x, otherwise)

    key, delta, decay = kept(changes.key, 0.0), kept(changes.delta, 0.0), kept(changes.decay, 1.0)
    new = _per_key_head(state, num_key_heads)
    for row in range(num_rows):
        row_delta, row_decay = (_per_key_head(x[:, row], num_key_heads) for x in (delta, decay))
        new = new * row_decay[..., None, None] + key[:, row, :, None, :, None] * row_delta[..., None, :]
    return new.reshape(state.shape), advance_window(window, journal.channels, count)


def _product(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


def _in_chunks(rows: Rows, chunk: int) -> Rows:
    """Rows as [chunks, B, I, (J,) chunk, ...], filled up at the end with rows that do nothing."""
    batch, count, num_key_heads, _ = rows.key.shape
    missing = -count % chunk

    def cut(x: jax.Array, heads: tuple[int, ...]) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, chunk, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (0, 2), (1, 2 + len(heads)))

    per_value_head = num_key_heads, rows.value.shape[2] // num_key_heads
    return Rows(
        query=cut(rows.query, (num_key_heads,)),
        key=cut(rows.key, (num_key_heads,)),
        value=cut(rows.value, per_value_head),
        log_decay=cut(rows.log_decay, per_value_head),
        strength=cut(rows.strength, per_value_head),
    )


def delta_rule_chunked(state: jax.Array, rows: Rows, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """The same for many rows that all count, and the state behind them, in products of matrices.

    In a chunk, with G_t the sum of g up to row t, row t's delta depends on those of earlier rows s by
    beta_t e^(G_t - G_s) k_t.k_s: a unit lower triangular system, solved for all rows at once.

    Returns:
      outputs B T IJ Y, fp32; the state after all rows
    """
    batch, count, num_key_heads, _ = rows.key.shape
    rows = _in_chunks(rows, min(chunk, count))
    total = jnp.cumsum(rows.log_decay, axis=-1)  # chunks B I J T
    size = total.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -math.inf))  # t, then s
    strength, since_start = rows.strength[..., None], jnp.exp(total)[..., None]

    keys = rows.key[:, :, :, None]  # chunks B I 1 T X
    alike = _product("nbitx,nbisx->nbits", rows.key, rows.key)[:, :, :, None]
    system = jnp.where(jnp.tril(lower, -1), strength * between * alike, 0.0)
    right = jnp.concatenate([strength * rows.value, strength * since_start * keys], axis=-1)
    solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    fresh, stale = jnp.split(solved, [rows.value.shape[-1]], axis=-1)  # delta = fresh - stale S

    seen = _product("nbitx,nbisx->nbits", rows.query, rows.key)[:, :, :, None] * between
    queries = rows.query[:, :, :, None] * since_start
    until_end = keys * jnp.exp(total[..., -1:] - total)[..., None]
    whole = jnp.exp(total[..., -1])[..., None, None]

    def step(state: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        fresh, stale, seen, queries, until_end, whole = part
        delta = fresh - _product("bijtx,bijxy->bijty", stale, state)
        out = _product("bijtx,bijxy->bijty", queries, state) + _product("bijts,bijsy->bijty", seen, delta)
        return state * whole + _product("bijtx,bijty->bijxy", until_end, delta), out

    first = _per_key_head(state, num_key_heads)
    last, out = jax.lax.scan(step, first, (fresh, stale, seen, queries, until_end, whole))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # chunks B I J T Y -> B chunks T I J Y
    return out.reshape(batch, -1, *state.shape[1:2], out.shape[-1])[:, :count], last.reshape(state.shape)
