"""Verification: how many drafts stand, and which tokens a round emits.

One-hot drafts: the target samples its own token at every row (argmax of logits plus Gumbel noise) and
a draft stands where it equals that sample. This accepts with probability p(draft), and on rejection
the emitted token is the target's sample given that it is not the draft: exact rejection sampling. The
output is the very text that plain decoding gives under the same seed, whatever is drafted.

Probabilistic drafts: the draft was sampled from q; it stands with probability min(1, p / q), and a
rejection is replaced by a sample of max(p - q, 0) (Leviathan et al. 2023; Chen et al. 2023). Exact in
distribution; more drafts stand than with one-hot drafts where p and q are both flat.
"""

import jax
import jax.numpy as jnp

from mtp_jax.engine.sampling import ACCEPT, TARGET, RowSampling, gumbel, uniform


def count_prefix(stands: jax.Array) -> jax.Array:
    """Length of the leading run of True: stands [B, K] bool -> [B] int32."""
    return jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def accept_one_hot(samples: jax.Array, drafts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """samples [B, K+1] of the target, drafts [B, K] (-1: none) -> (tokens [B, K+1], accepted [B]).

    Tokens up to and including index `accepted` are what the round emits.
    """
    return samples, count_prefix(samples[:, :-1] == drafts)


def accept_probabilistic(
    target: jax.Array, draft_logits: jax.Array, drafts: jax.Array, rows: RowSampling
) -> tuple[jax.Array, jax.Array]:
    """Rejection sampling over whole rows.

    target [B, K+1, V]: logits after temperature, top-k and top-p. draft_logits [B, K, V]: log q up to a
    constant. drafts [B, K], -1 never stands. rows: [B, K+1] parameters. Greedy rows compare argmaxes.
    Returns (tokens [B, K+1], accepted [B]).
    """
    k = drafts.shape[1]
    vocab_ids = jnp.arange(target.shape[-1], dtype=jnp.int32)
    log_p = jax.nn.log_softmax(target, axis=-1)
    log_q = jax.nn.log_softmax(draft_logits, axis=-1)
    chosen = jnp.maximum(drafts, 0)[..., None]
    p_draft = jnp.take_along_axis(log_p[:, :k], chosen, axis=-1)[..., 0]
    q_draft = jnp.take_along_axis(log_q, chosen, axis=-1)[..., 0]
    u = uniform(rows.seed[:, :k], rows.position[:, :k], jnp.zeros(1, jnp.int32), ACCEPT)[..., 0]
    greedy = rows.temperature <= 0
    best = jnp.argmax(target, axis=-1).astype(jnp.int32)
    stands = jnp.where(greedy[:, :k], best[:, :k] == drafts, jnp.log(u) + q_draft < p_draft) & (drafts >= 0)
    accepted = count_prefix(stands)

    noise = gumbel(rows.seed, rows.position, vocab_ids, TARGET)
    # Where a draft was proposed and fell, the replacement avoids what q already covered.
    ratio = jnp.exp(jnp.minimum(log_q - log_p[:, :k], 0.0))
    residual = jnp.where(log_q < log_p[:, :k], log_p[:, :k] + jnp.log1p(-ratio), -jnp.inf)
    proposed = (drafts >= 0)[..., None]
    source = jnp.concatenate([jnp.where(proposed, residual, log_p[:, :k]), log_p[:, k:]], axis=1)
    replacement = jnp.where(greedy, best, jnp.argmax(source + noise, axis=-1).astype(jnp.int32))
    column = jnp.arange(k + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(column < accepted[:, None], padded, replacement), accepted


def cut_at_stop(tokens: jax.Array, count: jax.Array, stop_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cuts runs after their first stop token.

    tokens [B, T], count [B] valid ones, stop_ids [B, X] (-1: none) -> (count [B], stopped [B] bool).
    """
    column = jnp.arange(tokens.shape[1])
    is_stop = jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1) & (tokens >= 0)
    is_stop &= column < count[:, None]
    first = jnp.argmax(is_stop, axis=1).astype(jnp.int32)
    stopped = jnp.any(is_stop, axis=1)
    return jnp.where(stopped, first + 1, count), stopped
