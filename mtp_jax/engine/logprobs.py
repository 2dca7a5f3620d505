"""Log-probabilities: worked out on the device from the spread vocabulary, packed beside the tokens.

A report of a token is REPORT_FIELDS int32: its log-probability, the MAX_LOGPROBS likeliest ids, and their
log-probabilities; floats travel as their bits, so that one array brings home all that a dispatch made.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.engine.vocabulary import Vocabulary
from mtp_jax.request import MAX_LOGPROBS, TokenLogprobs
from sharding.placement import HEAD_AXES

REPORT_FIELDS = 1 + 2 * MAX_LOGPROBS
PROMPT_ROW = -1  # count of a result row that reports a prompt's token
_PIECE = 16  # prompt tokens at a time: logits of a long chunk are large


def report(logits: jax.Array, tokens: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Packed reports [..., REPORT_FIELDS] of tokens [...], from spread logits [..., V / devices]."""
    best = jax.lax.pmax(jnp.max(logits, axis=-1), HEAD_AXES)
    mass = jax.lax.psum(jnp.sum(jnp.exp(logits - best[..., None]), axis=-1), HEAD_AXES)
    normaliser = best + jnp.log(mass)
    local = vocabulary.local_index(tokens)
    found = jnp.take_along_axis(logits, jnp.minimum(local, logits.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    chosen = jax.lax.psum(jnp.where(local < logits.shape[-1], found, 0.0), HEAD_AXES)
    values, at = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    values, ids = (
        jax.lax.all_gather(x, HEAD_AXES, axis=x.ndim - 1, tiled=True, to="invarying")
        for x in (values, vocabulary.ids[at])
    )
    return _pack(chosen, values, ids, normaliser)


def report_whole(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The same from whole rows [..., V], of which tokens may be left out (-inf)."""
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    values, ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    return _pack(chosen, values, ids, normaliser)


def _pack(chosen: jax.Array, values: jax.Array, ids: jax.Array, normaliser: jax.Array) -> jax.Array:
    """Reports from the candidates [..., n] for the likeliest tokens, in order of id where they are equal."""
    values, order = jax.lax.top_k(values, min(MAX_LOGPROBS, values.shape[-1]))
    ids = jnp.take_along_axis(ids, order, axis=-1)
    missing = [(0, 0)] * (ids.ndim - 1) + [(0, MAX_LOGPROBS - ids.shape[-1])]
    ids = jnp.pad(ids, missing, constant_values=-1)
    values = jnp.pad(values - normaliser[..., None], missing, constant_values=-jnp.inf)
    floats = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in ((chosen - normaliser)[..., None], values)]
    return jnp.concatenate([floats[0], ids, floats[1]], axis=-1)


def report_prompt(hidden: jax.Array, following: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Reports [C, REPORT_FIELDS] of the tokens [C] that follow each row of post-norm hidden [C, D]."""
    size = hidden.shape[0]
    piece = min(_PIECE, size)
    pad = -size % piece
    hidden, following = jnp.pad(hidden, ((0, pad), (0, 0))), jnp.pad(following, (0, pad), constant_values=-1)
    pieces = (hidden.reshape(-1, piece, hidden.shape[1]), following.reshape(-1, piece))
    reports = jax.lax.map(lambda x: report(vocabulary.logits(x[0]), x[1], vocabulary), pieces)
    return reports.reshape(-1, REPORT_FIELDS)[:size]


def prompt_rows(
    reports: jax.Array,
    slot: jax.Array,
    generation: jax.Array,
    start: jax.Array,
    following: jax.Array,
    width: int,
) -> jax.Array:
    """Reports [C, REPORT_FIELDS] of a chunk as rows of a result, [C, width]; -1 in `following`: none."""
    position = start + 1 + jnp.arange(following.shape[0], dtype=jnp.int32)
    fields = [
        jnp.broadcast_to(slot, following.shape),
        jnp.broadcast_to(generation, following.shape),
        jnp.where(following >= 0, PROMPT_ROW, 0),
        position,
        following,
    ]
    rows = jnp.concatenate([jnp.stack(fields, axis=1), reports], axis=1)
    return jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def unpack(token_id: int, fields: np.ndarray, count: int) -> TokenLogprobs:
    """One report [REPORT_FIELDS] with `count` alternatives; tokens that cannot be sampled are left out."""
    values = fields.view(np.float32)
    ids, logprobs = fields[1 : 1 + count].tolist(), values[1 + MAX_LOGPROBS :][:count].tolist()
    top = tuple(TokenLogprobs(i, p) for i, p in zip(ids, logprobs, strict=True) if p > -np.inf)
    return TokenLogprobs(token_id, float(values[0]), top)


def unpack_all(token_ids: Sequence[int], packed: np.ndarray, count: int) -> tuple[TokenLogprobs, ...]:
    """Reports of consecutive tokens, [tokens * REPORT_FIELDS or more]."""
    rows = packed[: len(token_ids) * REPORT_FIELDS].reshape(-1, REPORT_FIELDS)
    return tuple(unpack(token, row, count) for token, row in zip(token_ids, rows, strict=True))
