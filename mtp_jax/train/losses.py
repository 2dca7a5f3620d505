"""Cross entropies over a vocabulary, in chunks of positions, and what drafts would have been accepted.

Logits of a batch would fill the memory: chunks are computed one after another, their products take the
compute type and sum in fp32, and the gradient computes them again (`jax.checkpoint`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mtp_jax.train.products import product
from mtp_jax.train.trunk import Packed
from mtp_jax.train.unroll import ahead, behind

CHUNK_LOGITS = 1 << 27  # fp32 logits alive at once: 512 MiB for one step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
    """LM head rows that drafts choose among, and all of them."""

    whole: jax.Array  # V D
    draft: jax.Array  # Vd D: the same array where drafts use the whole vocabulary
    draft_ids: jax.Array | None  # Vd int32, ascending: the token id of each row of `draft`

    def token(self, row: jax.Array) -> jax.Array:
        """Token ids of rows of `draft`."""
        return row if self.draft_ids is None else self.draft_ids[row]


def logits(x: jax.Array, head: jax.Array) -> jax.Array:
    """x [M, D], head [V, D] -> [M, V] fp32."""
    return product("md,vd->mv", x, head)


def chunk_length(rows: int, vocab: int) -> int:
    """Positions a chunk: a power of two."""
    most = max(1, CHUNK_LOGITS // vocab)
    return min(1 << (most.bit_length() - 1), 1 << (rows - 1).bit_length())


def _chunks(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Cuts axis `axis` of x into chunks along a new first axis; the last is padded with zeros."""
    count = -(-x.shape[axis] // length)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count * length - x.shape[axis])
    x = jnp.pad(x, widths)
    x = x.reshape(*x.shape[:axis], count, length, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def best_tokens(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """hidden [B, S, D] -> the target's best token there, [B, S] int32."""
    b, s, d = hidden.shape
    length = chunk_length(b * s, head.shape[0])

    def best(x: jax.Array) -> jax.Array:
        return jnp.argmax(logits(x, head), axis=-1).astype(jnp.int32)

    with jax.named_scope("best_tokens"):
        found = jax.lax.map(best, _chunks(hidden.reshape(b * s, d), 0, length))
        return found.reshape(-1)[: b * s].reshape(b, s)


def draft_cross_entropies(
    outputs: jax.Array, hidden: jax.Array, best: jax.Array, weights: jax.Array, heads: Heads
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross entropies of drafts against the target's distribution (over the draft vocabulary) and best token.

    Args:
      outputs: y_j at base positions, [K, B, S, D].
      hidden: the target's, [B, S, D]; has no gradient.
      best: of `best_tokens`, [B, S].
      weights: of lines, [K, B, S] fp32; 0 where one does not count.

    Returns:
      soft [K]: weighted sums of the cross entropy against the distribution.
      labels [K]: against the best token; 0 where the draft vocabulary lacks it. Both fp32.
      drafts [K, B, S] int32 at base positions: the best tokens.
    """
    k, b, s, d = outputs.shape
    length = chunk_length(b * s, heads.draft.shape[0])
    # A chunk holds positions of the target, so that its distribution is computed once for all steps.
    y = jnp.stack([behind(outputs[j], 1 + j) for j in range(k)]).reshape(k, b * s, d)
    weights = jnp.stack([behind(weights[j], 1 + j) for j in range(k)]).reshape(k, b * s)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def chunk(y: jax.Array, h: jax.Array, best: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        said = logits(h, heads.draft)
        wanted, label = jax.nn.softmax(said, axis=-1), jnp.argmax(said, axis=-1).astype(jnp.int32)
        at_label = jax.lax.broadcasted_iota(jnp.int32, said.shape, 1) == label[:, None]
        drafted = heads.token(label) == best
        soft, labels, drafts = [], [], []
        for j in range(k):
            scores = logits(y[j], heads.draft)
            drafts.append(jnp.argmax(scores, axis=-1).astype(jnp.int32))
            total = jax.nn.logsumexp(scores, axis=-1)
            loss = total - jnp.sum(wanted * scores, axis=-1)
            # Not a gather, whose gradient would be a scatter.
            label_loss = total - jnp.sum(jnp.where(at_label, scores, 0.0), axis=-1)
            soft.append(_weighted(loss, weights[j]))
            labels.append(_weighted(label_loss, jnp.where(drafted, weights[j], 0.0)))
        return jnp.stack(soft), jnp.stack(labels), jnp.stack(drafts)

    hidden = jax.lax.stop_gradient(hidden).reshape(b * s, d)
    flat = ((y, 1), (hidden, 0), (best.reshape(-1), 0), (weights, 1))
    parts = tuple(_chunks(x, axis, length) for x, axis in flat)
    with jax.named_scope("draft_cross_entropies"):
        soft, labels, drafts = jax.lax.map(lambda part: chunk(*part), parts)
    drafts = jnp.moveaxis(drafts, 0, 1).reshape(k, -1)[:, : b * s].reshape(k, b, s)
    drafts = jnp.stack([ahead(drafts[j], 1 + j) for j in range(k)])
    return jnp.sum(soft, axis=0), jnp.sum(labels, axis=0), heads.token(drafts)


def _weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum of values times weights; what has weight 0 may be anything."""
    return jnp.sum(jnp.where(weights > 0, values * weights, 0.0))


def hard_cross_entropy(
    hidden: jax.Array, labels: jax.Array, counted: jax.Array, head: jax.Array
) -> jax.Array:
    """Cross entropy of hidden [B, S, D] by head [V, D] against labels [B, S]: a sum over counted ones."""
    b, s, d = hidden.shape
    length = chunk_length(b * s, head.shape[0])

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def chunk(x: jax.Array, label: jax.Array, weight: jax.Array) -> jax.Array:
        scores = logits(x, head)
        loss = jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, label[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(weight, loss, 0.0))

    flat = (hidden.reshape(b * s, d), labels.reshape(-1), counted.reshape(-1))
    parts = tuple(_chunks(x, 0, length) for x in flat)
    with jax.named_scope("hard_cross_entropy"):
        return jnp.sum(jax.lax.map(lambda part: chunk(*part), parts))


def accepted_counts(
    drafts: jax.Array, wanted: jax.Array, rows: Packed, live: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many lines accept drafts 1 to j + 1, over lines that are live to the end.

    Args:
      drafts: [K, B, S], token that the line of base p drafts at step j.
      wanted: [B, S], the target's best token behind each position.
      live: of `live_lines`.

    Returns:
      lines (a number), accepted [K] where all earlier drafts and this one are the target's best token
      (greedy decoding's rule), and accepted [K] where they are the text's own (the rule at the
      temperature the text was sampled at). All fp32 sums.
    """
    whole = live[-1]
    greedy = sampled = whole
    greedy_counts, sampled_counts = [], []
    for step in range(drafts.shape[0]):
        greedy = greedy & (drafts[step] == ahead(wanted, 1 + step))
        sampled = sampled & (drafts[step] == ahead(rows.tokens, 2 + step))
        greedy_counts.append(jnp.sum(greedy, dtype=jnp.float32))
        sampled_counts.append(jnp.sum(sampled, dtype=jnp.float32))
    return jnp.sum(whole, dtype=jnp.float32), jnp.stack(greedy_counts), jnp.stack(sampled_counts)
