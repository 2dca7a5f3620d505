"""Draft steps 0 to K - 1 of every position at once: what the engine does at serving, in parallel.

At base position p step 0 takes the target's hidden state h_p and token p + 1, at position p; step j takes
step j - 1's output y_{j-1} and token p + 1 + j, at position p + j. Output y_j predicts token p + 2 + j: the
target says how from h_{p+1+j}. The cache that step j sees is that of `mtp_jax/engine/draft.py`.
"""

import jax
import jax.numpy as jnp

from mtp_jax.config import ModelConfig
from mtp_jax.models.layers import Around, rope_tables
from mtp_jax.models.leaves import merge
from mtp_jax.models.registry import make_mtp, mtp_caches, mtp_table
from mtp_jax.train.attention import (
    Implementation,
    LineAttention,
    PackedAttention,
    causal_mask,
    empty_cache,
)
from mtp_jax.train.notes import Notes
from mtp_jax.train.trunk import Packed, with_notes

Params = dict[str, jax.Array]  # leaves of an `MTPModule` by their names


def ahead(x: jax.Array, count: int) -> jax.Array:
    """x [B, S, ...] at p + count instead of p; zeros behind the end."""
    s = x.shape[1]
    widths = [(0, 0), (0, count), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths)[:, count : count + s]


def behind(x: jax.Array, count: int) -> jax.Array:
    """x [B, S, ...] at p - count instead of p; zeros before the start."""
    widths = [(0, 0), (count, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths)[:, : x.shape[1]]


def draft_outputs(
    config: ModelConfig,
    params: Params,
    hidden: jax.Array,
    embedding: jax.Array,
    rows: Packed,
    num_drafts: int,
    implementation: Implementation,
    notes: Notes | None = None,
) -> jax.Array:
    """The module's post-norm outputs y_j at every base position, [K, B, S, D].

    Args:
      hidden: the target's hidden states after its final norm, [B, S, D].
      embedding: embeddings of `rows.tokens`, [B, S, D].
      notes: get what the module's layer wants to learn at step 0 beside the drafts.

    Where base and token p + 1 + j are not in one segment the output means nothing.
    """
    b, s, d = hidden.shape
    leaves = mtp_table(config)
    module = merge(make_mtp(config, hidden.dtype), leaves, [params[leaf.name] for leaf in leaves])
    mask = causal_mask(rows.segments)
    cache = empty_cache(mtp_caches(config), b * s, hidden.dtype)
    shared = config.indexer is not None and config.indexer.share_in_drafts
    places, y, outputs = None, hidden.reshape(b * s, d), []
    for step in range(num_drafts):
        with jax.named_scope(f"draft{step}"):
            attend = LineAttention(mask) if step else PackedAttention(mask, implementation)
            rope = rope_tables((rows.positions + step).reshape(-1), config)
            token = ahead(embedding, 1 + step).reshape(b * s, d)
            around = Around(rope, attend, reuse_indices=places is not None)
            if notes is not None and step == 0:
                around = with_notes(around, notes)
            y, chosen, cache = module(y, token, places, cache, around)
            places = chosen if shared else None
            outputs.append(y.reshape(b, s, d))
    return jnp.stack(outputs)


def live_lines(rows: Packed, num_drafts: int) -> jax.Array:
    """[K, B, S] bool: output y_j at base p counts in the loss.

    A line counts as long as all its tokens, p + 1 to p + 2 + j, are the model's own and in p's segment:
    the engine drafts behind a token that it sampled, never behind one that it was given.
    """
    written = rows.loss_mask & (rows.segments > 0)

    def own(count: int) -> jax.Array:
        return ahead(written, count) & (ahead(rows.segments, count) == rows.segments)

    live = [own(1) & own(2)]
    for step in range(1, num_drafts):
        live.append(live[-1] & own(2 + step))
    return jnp.stack(live)


def cast_params(config: ModelConfig, params: Params, dtype: jnp.dtype) -> Params:
    """A module's leaves in `dtype`, but for those that have a type of their own."""
    return {leaf.name: params[leaf.name].astype(leaf.dtype or dtype) for leaf in mtp_table(config)}
