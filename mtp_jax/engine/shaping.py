"""What requests change about logits: bias, masks, penalties, bad words; and min-p, after temperature.

Everything is exact under speculation: row i of a request is shaped as if its drafts 1 to i were emitted,
which is so whenever the row's own token is.

The state is there only in steps of the kind `Sampling.SHAPED`, and allocated when the first request asks
for it. A slot's part of it holds from its installation (`engine.shaping_slots`), under one generation.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mtp_jax.engine.leaving import VerifyRows
from mtp_jax.engine.shaping_state import ANY_TOKEN, COUNT, IN_PROMPT, IS_STOP, ShapingState
from mtp_jax.engine.vocabulary import Vocabulary


def _mine(shaping: ShapingState, rows: VerifyRows) -> jax.Array:
    """Rows [B] whose request has something installed."""
    return shaping.generation[rows.slot] == rows.generation


def min_p_of(shaping: ShapingState, rows: VerifyRows) -> jax.Array:
    """min-p of rows, [B]; 0 is off."""
    return jnp.where(_mine(shaping, rows), shaping.min_p[rows.slot], 0.0)


def shape_logits(
    shaping: ShapingState, rows: VerifyRows, logits: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """This device's logits [B, T, V / devices], shaped: bias and masks, then penalties, then bad words."""
    mine = _mine(shaping, rows)
    bias = jnp.where(mine[:, None], shaping.bias[rows.slot], 0.0)
    marks = jnp.where(mine[:, None], shaping.marks[rows.slot], 0)
    logits = logits + bias[:, None]
    position = rows.start[:, None] + 1 + jnp.arange(logits.shape[1], dtype=jnp.int32)
    early = mine[:, None] & (position < shaping.min_total[rows.slot][:, None])  # B T
    is_stop = (marks & IS_STOP) > 0
    logits = jnp.where(early[:, :, None] & is_stop[:, None], -jnp.inf, logits)

    def of_row(values: jax.Array, neutral: float) -> jax.Array:
        return jnp.where(mine, values[rows.slot], neutral)[:, None, None]

    counts = _counts(marks, rows.drafts, vocabulary.ids)
    known = (counts > 0) | ((marks & IN_PROMPT) > 0)[:, None]
    repetition = of_row(shaping.repetition, 1.0)
    logits = jnp.where(known, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    taken = of_row(shaping.frequency, 0.0) * counts.astype(jnp.float32)
    taken += jnp.where(counts > 0, of_row(shaping.presence, 0.0), 0.0)
    return _without_bad_words(shaping, rows, mine, logits - taken, vocabulary)


def _counts(marks: jax.Array, drafts: jax.Array, ids: jax.Array) -> jax.Array:
    """How often each token was emitted before each row's own, drafts included: [B, T, V / devices]."""
    columns = [marks & COUNT]
    for draft in drafts.T:
        columns.append(columns[-1] + (ids == draft[:, None]).astype(jnp.int32))
    return jnp.stack(columns, axis=1)


def _without_bad_words(
    shaping: ShapingState, rows: VerifyRows, mine: jax.Array, logits: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """-inf for tokens that would complete a bad word of several tokens."""
    b, t, v = logits.shape
    words = shaping.bad_words[rows.slot]  # B X N
    before, last = words[:, :, :-1], words[:, :, -1]
    text = jnp.concatenate([shaping.tail[rows.slot], rows.drafts], axis=1)
    windows = jnp.stack([text[:, i : i + before.shape[-1]] for i in range(t)], axis=1)  # B T N-1
    fits = (before[:, None] == ANY_TOKEN) | (before[:, None] == windows[:, :, None])
    hit = jnp.all(fits, axis=-1) & (last >= 0)[:, None] & mine[:, None, None]  # B T X
    at = jnp.where(hit, vocabulary.local_index(last)[:, None], v)
    row, column = jnp.arange(b)[:, None, None], jnp.arange(t)[None, :, None]
    return logits.at[row, column, at].set(-jnp.inf, mode="drop")


def drop_unlikely(scaled: jax.Array, min_p: jax.Array, temperature: jax.Array) -> jax.Array:
    """-inf for tokens less likely than min_p [B] times the best one; scaled [B, T, V], temperature [B, T].

    Greedy rows keep everything, and so do rows with a min_p of 0.
    """
    least = jnp.max(scaled, axis=-1) + jnp.log(min_p)[:, None]
    least = jnp.where(temperature > 0, least, -jnp.inf)
    return jnp.where(scaled >= least[..., None], scaled, -jnp.inf)


def note_emitted(
    shaping: ShapingState, rows: VerifyRows, tokens: jax.Array, count: jax.Array, vocabulary: Vocabulary
) -> ShapingState:
    """After rows emitted `count` [B] of `tokens` [B, T]."""
    at = jnp.where(_mine(shaping, rows) & rows.valid, rows.slot, shaping.generation.shape[0])
    emitted = jnp.arange(tokens.shape[1]) < count[:, None]
    local = jnp.where(emitted, vocabulary.local_index(tokens), shaping.marks.shape[1])
    length = shaping.tail.shape[1]
    text = jnp.concatenate([shaping.tail[rows.slot], tokens], axis=1)
    window = jnp.take_along_axis(text, count[:, None] + jnp.arange(length), axis=1)
    return dataclasses.replace(
        shaping,
        marks=shaping.marks.at[at[:, None], local].add(1, mode="drop"),
        tail=shaping.tail.at[at].set(window, mode="drop"),
    )
