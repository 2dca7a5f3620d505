"""The hashed n-gram embedding of Qwen4Exp: the hash, and what one layer makes of the rows found.

A token's n-gram of order n is hashed to x = t_0 m_0 ^ t_1 m_1 ^ ... (t_j the token j places back) in
wrapping 64-bit integers; head h of that order takes row (x mod p_h) + offset_h of one table, p_h a prime. An
n-gram does not reach behind an end-of-sequence token, nor before the text: such tokens count as
end-of-sequence ones.

The rows are read where tokens are embedded and travel to the layer as values, for their table is as large as
many layers and is spread over all devices, as the embedding is. JAX has no 64-bit integers unless all of it
does, so the hash works on pairs of 32-bit words.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig, NgramConfig
from mtp_jax.models.layers import Around, Cache, CacheRows, linear, rms_norm
from mtp_jax.models.leaves import Leaf, Make, Stored, never_float8, norm, plain, whole

_LOW, _WORD = (1 << 16) - 1, (1 << 32) - 1
_GAMMA, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_LAYER_STEP = 10007  # between the seeds of two layers
LEAST_GATE = 1e-6  # of a gate's argument before the square root

Words = tuple[jax.Array, jax.Array]  # high and low halves of 64-bit integers, uint32


# The hash


def ngram_rows(tokens: jax.Array, ngram: NgramConfig) -> jax.Array:
    """Rows of the table for n-grams, int32 [M, heads of all orders].

    Args:
      tokens: [M, order] int32, the token itself last.
      ngram: the hash's constants.
    """
    back = tokens[:, ::-1]
    # Behind an end-of-sequence token on the way back all count as one.
    cut = jnp.cumsum(back[:, 1:] == ngram.eos, axis=1, dtype=jnp.int32) > 0
    back = jnp.concatenate([back[:, :1], jnp.where(cut, ngram.eos, back[:, 1:])], axis=1)
    mixed, by_head = multiply(back[:, 0], ngram.multipliers[0]), []
    for order in range(1, ngram.order):
        more = multiply(back[:, order], ngram.multipliers[order])
        mixed = (mixed[0] ^ more[0], mixed[1] ^ more[1])
        by_head += [mixed] * ngram.heads
    high, low = (jnp.stack(words, axis=1) for words in zip(*by_head, strict=True))  # M heads
    offsets = (0, *itertools.accumulate(ngram.sizes[:-1]))
    return remainder((high, low), ngram.sizes) + jnp.array(offsets, jnp.int32)


def multiply(x: jax.Array, factor: int) -> Words:
    """int32 x times a constant in wrapping 64-bit integers."""
    factor &= _MASK
    low, high = factor & _WORD, factor >> 32
    a, sign = x.astype(jnp.uint32), (x >> 31).astype(jnp.uint32)  # the high word of a negative x is all ones
    a0, a1 = a & _LOW, a >> 16
    b0, b1 = jnp.uint32(low & _LOW), jnp.uint32(low >> 16)
    corner, cross, other = a0 * b0, a1 * b0, a0 * b1
    middle = (corner >> 16) + (cross & _LOW) + (other & _LOW)
    carried = a1 * b1 + (cross >> 16) + (other >> 16) + (middle >> 16)
    return carried + a * jnp.uint32(high) + sign * jnp.uint32(low), (middle << 16) | (corner & _LOW)


def remainder(x: Words, sizes: tuple[int, ...]) -> jax.Array:
    """Signed 64-bit integers [M, heads] modulo constants [heads] below 2^31: int32, from 0 to size - 1."""
    high, low = x
    divisor, step = jnp.array(sizes, jnp.uint32), 32 - max(sizes).bit_length()  # bits beside a remainder
    rest = high % divisor
    for first in range(32, 0, -step):
        bits = min(step, first)
        part = (low >> (first - bits)) & ((1 << bits) - 1)
        rest = ((rest << bits) | part) % divisor
    below = jnp.array([size - (1 << 64) % size for size in sizes], jnp.uint32)  # negative: 2^64 less
    return jnp.where(high >> 31 > 0, (rest + below) % divisor, rest).astype(jnp.int32)


def hash_constants(
    vocab_size: int, order: int, heads: int, base: int, seed: int, index: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Multipliers, one a token of an n-gram, and primes, one a head, of the index-th layer with a table."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    start = seed + _LAYER_STEP * index
    multipliers = (2 * (_splitmix64(start + _GAMMA * (i + 1)) % half) + 1 for i in range(order))
    primes, candidate, count = [], base, (order - 1) * heads
    while len(primes) < count * (index + 1):
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(multipliers), tuple(primes[count * index :])


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1))


# The table and the layer's part


def table_leaf(config: ModelConfig) -> Leaf:
    """The table as [parts, rows a part, width of a head]; checkpoints have it in parts, or whole."""
    ngram = ngram_of(config)
    name = f"model.layers.{ngram.layer}.ple.ple_embedding.ngram_embedding."
    part = (ngram.rows // ngram.parts, ngram.width // len(ngram.sizes))
    parts = Stored(((name + "shard_{e}.weight", part),), lambda found: found[0], lambda array: [array])
    one = whole(f"{name}weight", (ngram.rows, part[1]))
    return Leaf(("ngram_table",), (ngram.parts, *part), ("ngram_parts", None, None), (parts, one))


def constant_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The hash's constants as checkpoints repeat them: name -> values."""
    if config.ngram is None:
        return {}
    prefix, sizes = f"model.layers.{config.ngram.layer}.ple.ple_embedding.", config.ngram.sizes
    return {
        f"{prefix}layer_multipliers": config.ngram.multipliers,
        f"{prefix}ngram_heads_vocab_sizes": sizes,
        f"{prefix}ngram_heads_offsets": tuple(sum(sizes[:head]) for head in range(len(sizes))),
    }


class NgramLayer(nnx.Module):
    """Adds gated n-gram values to the streams before a layer, and their convolution over the text."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        leaves = {leaf.path[0]: leaf for leaf in self.leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(leaves[name].shape, leaves[name].dtype or dtype))

        self.eps, self.width, self.dilation = config.rms_norm_eps, config.hidden_size, ngram_of(config).order
        self.key, self.value, self.conv = parameter("key"), parameter("value"), parameter("conv")
        self.key_norm, self.query_norm = parameter("key_norm"), parameter("query_norm")
        self.conv_norm = parameter("conv_norm")

    def __call__(
        self, x: jax.Array, found: jax.Array, cache: Cache, around: Around
    ) -> tuple[jax.Array, Cache]:
        """x [M, S D] and the tokens' rows of the table [M, X] -> (x [M, S D], cache)."""
        keys = self._norm(linear(found, self.key[...]), self.key_norm)  # M S D
        agreed = jnp.sum(keys * self._norm(x, self.query_norm), axis=-1, keepdims=True) / self.width**0.5
        gate = jnp.sqrt(jnp.maximum(jnp.abs(agreed), LEAST_GATE)) * jnp.sign(agreed)
        value = jax.nn.sigmoid(gate) * linear(found, self.value[...])[:, None]
        normed = self._norm(value.reshape(x.shape), self.conv_norm).reshape(x.shape)
        mixed, cache = around.attend.convolve(normed, self.conv[...], self.dilation, cache)
        return x + value.reshape(x.shape) + jax.nn.silu(mixed).astype(x.dtype), cache

    def _norm(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        """x [M, S D] -> [M, S, D], each stream normalised for itself."""
        apart = x.reshape(x.shape[0], -1, self.width)
        return rms_norm(apart, weight[...].reshape(apart.shape[1:]), self.eps)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights, whole on every device; the table is not among them."""
        ngram, d, wide = ngram_of(config), config.hidden_size, config.residual_width
        taps, zero_centred = ngram.conv_taps, config.zero_centred_norms
        return (
            plain("key", (wide, ngram.width), (None, None), "ple.key_proj.weight"),
            plain("value", (d, ngram.width), (None, None), "ple.value_proj.weight"),
            never_float8(plain("conv", (wide, taps), (None, None), "ple.conv1d.weight", (wide, 1, taps))),
            norm("key_norm", wide, "ple.norm_key.weight", zero_centred),
            norm("query_norm", wide, "ple.norm_query.weight", zero_centred),
            norm("conv_norm", wide, "ple.norm_conv.weight", zero_centred),
        )

    @staticmethod
    def caches(config: ModelConfig) -> tuple[CacheRows, ...]:
        """The convolution's window of a slot, and its inputs in the slot's last round."""
        ngram, wide = ngram_of(config), config.residual_width
        window = ((ngram.conv_taps - 1) * ngram.order, wide)
        return CacheRows(window, (None, None), "slot"), CacheRows((wide,), (None,), "round")


def ngram_of(config: ModelConfig) -> NgramConfig:
    """The model's n-gram embedding."""
    assert config.ngram is not None
    return config.ngram
