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
    return unit_interval(bits)


def unit_interval(bits: jax.Array) -> jax.Array:
    """Random uint32 words as fp32 in the open (0, 1): from 2**-24 to 1 - 2**-24.

    23 bits and a half are exact in fp32. With one bit more the largest would round to 1, whose Gumbel noise
    is infinite: one token in some millions of draws would win whatever its logit.
    """
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


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
    warm = rows.temperature > 0
    order = _order(logits)
    by_count = _threshold(order, jnp.ones_like(logits), jnp.maximum(rows.top_k, 1).astype(jnp.float32))
    by_count = jnp.where(warm & (rows.top_k > 0), by_count, jnp.uint32(0))
    kept = order >= by_count[..., None]
    weights = jnp.where(kept, jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    by_mass = _threshold(order, weights, rows.top_p * jnp.sum(weights, axis=-1))
    # A top_p that flushes to zero asks for no mass at all: the best token stays.
    by_mass = jnp.minimum(by_mass, jnp.max(order, axis=-1))
    by_mass = jnp.where(warm & (rows.top_p < 1), by_mass, jnp.uint32(0))
    return jnp.where(kept & (order >= by_mass[..., None]), logits, -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
    """fp32 as uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """The largest t [...] such that the weights [..., V] of `order` >= t add up to at least `needed` [...].

    Found bit by bit, from the highest: 32 sums instead of a sort, which is slower to run and to compile.
    """

    def try_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | jnp.uint32(1) << (31 - index).astype(jnp.uint32)
        mass = jnp.sum(jnp.where(order >= higher[..., None], weights, 0.0), axis=-1)
        return jnp.where(mass >= needed, higher, threshold)

    return jax.lax.fori_loop(0, 32, try_bit, (order[..., 0] & 0))
