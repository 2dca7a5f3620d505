"""Latent rows as words of 32 bits, so that a TPU can address one row: what a cache holds there.

Rows of bfloat16 lie in tiles of several rows, of which a DMA cannot take one; a row of words it can. Word w
holds two features, the first in its lower half, so that unpacking moves nothing between lanes:

    words [0, V / 2):           features w and V / 2 + w of the V that are the value
    words [V / 2, R / 2):       the rotated features likewise
    words behind, up to 128s:   zeros
"""

import jax
import jax.numpy as jnp

LANES = 128


def num_words(width: int) -> int:
    """Words of a row of `width` bfloat16 features."""
    return -(-width // (2 * LANES)) * LANES


def pack_rows(cache: jax.Array, value_width: int = 512) -> jax.Array:
    """Rows [..., R] bfloat16 as [..., num_words(R)] int32; R and value_width must be even."""
    lower, upper = halves(cache, value_width)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (lower, upper))
    low, high = bits
    return jax.lax.bitcast_convert_type(low | high << 16, jnp.int32)


def unpack_rows(words: jax.Array, width: int, value_width: int) -> jax.Array:
    """The rows [..., width] bfloat16 that `pack_rows` was given."""
    bits = jax.lax.bitcast_convert_type(words, jnp.uint32)
    low, high = (
        jax.lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.bfloat16) for x in (bits & 0xFFFF, bits >> 16)
    )
    value, end = value_width // 2, width // 2
    parts = (low[..., :value], high[..., :value], low[..., value:end], high[..., value:end])
    return jnp.concatenate(parts, axis=-1)


def halves(x: jax.Array, value_width: int) -> tuple[jax.Array, jax.Array]:
    """What of [..., R] lies in lower halves of words, and what in upper ones: both [..., num_words(R)]."""
    width = x.shape[-1]
    value, rotated = value_width // 2, (width - value_width) // 2
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_words(width) - value - rotated)]

    def half(start: int) -> jax.Array:
        own = (
            x[..., start * value : (start + 1) * value],
            x[..., value_width + start * rotated : value_width + (start + 1) * rotated],
        )
        return jnp.pad(jnp.concatenate(own, axis=-1), padding)

    return half(0), half(1)
