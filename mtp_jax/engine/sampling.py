"""Noise and the target distribution.

Noise is a function of (seed, position, vocabulary id, stream) alone: a counter-based hash, not a
key that is split along the way. So a seed gives the same text on any mesh, in any batch, with any K.
Sampling from logits l at temperature t is the argmax of l / t + g with standard Gumbel noise g.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

TARGET, DRAFT, ACCEPT = 0, 1, 2  # independent noise streams at one (seed, position)
_STREAM_SHIFT = 29  # vocabulary ids stay below 2 ** 29


@dataclasses.dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of rows, each array [..., rows]; `position` is that of the token to sample."""

    temperature: jax.Array  # float32; 0 is greedy
    top_k: jax.Array  # int32; 0 is off
    top_p: jax.Array  # float32
    seed: jax.Array  # uint32 [..., rows, 2]
    position: jax.Array  # int32

    def map(self, f) -> "RowSampling":
        """Applies f to every array."""
        return RowSampling(**{field.name: f(getattr(self, field.name)) for field in dataclasses.fields(self)})


def uniform(seed: jax.Array, position: jax.Array, vocab_ids: jax.Array, stream: int) -> jax.Array:
    """Uniforms in the open (0, 1), fp32, [..., V]: seed [..., 2] uint32, position [...], vocab_ids [V]."""
    counter = vocab_ids.astype(jnp.uint32) | jnp.uint32(stream << _STREAM_SHIFT)
    # The hash wants operands of one shape and, inside shard_map, of one varying type: adding a zero made
    # of all of them gives both.
    words = (seed[..., 0, None], seed[..., 1, None], position.astype(jnp.uint32)[..., None], counter)
    zero = sum((word & 0 for word in words[1:]), words[0] & 0)
    words = [word + zero for word in words]
    bits, _ = threefry2x32_p.bind(*words)
    return ((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24


def gumbel(seed: jax.Array, position: jax.Array, vocab_ids: jax.Array, stream: int) -> jax.Array:
    """Standard Gumbel noise, [..., V]; arguments as for `uniform`."""
    return -jnp.log(-jnp.log(uniform(seed, position, vocab_ids, stream)))


def scale_by_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """logits [..., V] over temperature [...]; rows of temperature 0 stay as they are."""
    return logits / jnp.where(temperature > 0, temperature, 1.0)[..., None]


def add_noise(scaled: jax.Array, rows: RowSampling, vocab_ids: jax.Array, stream: int) -> jax.Array:
    """scaled [..., V] plus Gumbel noise in the rows that sample; its argmax is their sample."""
    noise = gumbel(rows.seed, rows.position, vocab_ids, stream)
    return scaled + jnp.where((rows.temperature > 0)[..., None], noise, 0.0)


def keep_top(logits: jax.Array, rows: RowSampling) -> jax.Array:
    """Sets to -inf what top-k, then top-p, leave out. logits [..., V] already at temperature; whole rows.

    top-k keeps every logit equal to the k-th largest; top-p keeps the smallest set of most likely tokens
    with mass of at least top_p (of what top-k left), ties with its last member included. At least one
    token stays; greedy rows keep everything.
    """
    vocab = logits.shape[-1]
    warm = rows.temperature > 0
    ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    last = jnp.where(warm & (rows.top_k > 0), jnp.minimum(rows.top_k, vocab), vocab) - 1
    kth = jnp.take_along_axis(ordered, last[..., None], axis=-1)
    ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
    mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    # Index of the nucleus' last token. Rounding may leave the whole mass under top_p: then all stay.
    needed = jnp.sum(mass < rows.top_p[..., None], axis=-1, dtype=jnp.int32)
    cut = jnp.take_along_axis(ordered, jnp.minimum(needed, vocab - 1)[..., None], axis=-1)
    everything = ~(warm & (rows.top_p < 1))[..., None]
    return jnp.where((logits >= kth) & (everything | (logits >= cut)), logits, -jnp.inf)
