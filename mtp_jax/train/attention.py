"""Attention over packed rows: several samples a row, no pages, every position at once.

Both classes are the `Attend` of a `DecoderLayer`. Their cache is not paged: it holds one set of keys
and values for each draft step so far, [J, M, G, H], and every call appends its own.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from mtp_jax.errors import UnsupportedHereError
from mtp_jax.models.delta import DeltaInputs, DeltaWeights
from mtp_jax.models.delta_net import DeltaHeads
from mtp_jax.models.layers import Cache, CacheRows, split_qkv
from mtp_jax.train.products import product
from mtp_jax.train.refused import NoBlocks

Implementation = Literal["xla", "cudnn"]
_MASKED = -1e30  # finite, so that a row of masked scores has a gradient that is a number


def empty_cache(caches: tuple[CacheRows, ...], rows: int, dtype: jnp.dtype) -> Cache:
    """The caches of a layer before the first step, over `rows` token rows."""
    return tuple(jnp.zeros((0, rows, *cache.shape), dtype) for cache in caches)


def causal_mask(segments: jax.Array) -> jax.Array:
    """[B, S, S] bool: query p sees key s where s <= p lies in the same segment. Padding is a segment too."""
    length = segments.shape[1]
    earlier = jnp.tril(jnp.ones((length, length), jnp.bool_))
    return earlier & (segments[:, :, None] == segments[:, None, :])


class _GroupedOnly(NoBlocks):
    """The other kinds of attention, which the trainer does not have."""

    def latent(
        self,
        q: jax.Array,
        row: jax.Array,
        cache: jax.Array,
        scale: float,
        width: int,
        indices: jax.Array | None,
        reused: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        raise UnsupportedHereError("training of models with latent attention is not supported yet")

    def select(
        self, q: jax.Array, weights: jax.Array, key: jax.Array, cache: jax.Array, topk: int
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        raise UnsupportedHereError("training of models with an indexer is not supported yet")

    def recurrent(
        self,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        heads: DeltaHeads,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        raise UnsupportedHereError("training of models with recurrent layers is not supported yet")


@dataclasses.dataclass(frozen=True)
class PackedAttention(_GroupedOnly):
    """Causal attention inside each segment of a packed row."""

    mask: jax.Array  # B S S, of `causal_mask`
    implementation: Implementation

    def grouped(self, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        q, k, v = split_qkv(qkv)
        if self.implementation == "xla":
            return _attention(self.mask, q, k[None], v[None]), _append(cache, k, v)
        b, s, _ = self.mask.shape
        _, g, per_kv, h = q.shape
        out = jax.nn.dot_product_attention(
            q.reshape(b, s, g * per_kv, h),
            k.reshape(b, s, g, h),
            v.reshape(b, s, g, h),
            mask=self.mask[:, None],
            implementation=self.implementation,
        )
        return out.reshape(q.shape), _append(cache, k, v)


@dataclasses.dataclass(frozen=True)
class LineAttention(_GroupedOnly):
    """Attention of draft step j >= 1, of the lines that start at every position at once.

    The line of base position p is at position p + j. It sees what the engine's cache holds there: step
    0's rows at positions <= p, and the rows that this line itself wrote in steps 1 to j.
    """

    mask: jax.Array  # B S S, of `causal_mask`

    def grouped(self, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        q, k, v = split_qkv(qkv)
        cache = _append(cache, k, v)
        return _attention(self.mask, q, *cache), cache


def _append(cache: Cache, *new: jax.Array) -> Cache:
    return tuple(jnp.concatenate([old, rows[None]]) for old, rows in zip(cache, new, strict=True))


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
def _attention(mask: jax.Array, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """One softmax over step 0's rows and the line's own. q [M, G, Q, H], keys and values [1 + j, M, G, H].

    Scores are [B, G, S, Q, S] in fp32, as the product leaves them: they are computed again for the gradient
    instead of kept.
    """
    b, s, _ = mask.shape
    _, g, per_kv, h = q.shape
    q = q.reshape(b, s, g, per_kv, h)
    keys, values = keys.reshape(-1, b, s, g, h), values.reshape(-1, b, s, g, h)
    scale = h**-0.5
    shared = product("bpgqh,bsgh->bgpqs", q, keys[0]) * scale
    shared = jnp.where(mask[:, None, :, None], shared, _MASKED)
    own = product("bpgqh,jbpgh->bgpqj", q, keys[1:]) * scale
    top = jnp.maximum(jnp.max(shared, axis=-1), jnp.max(own, axis=-1, initial=_MASKED))
    top = jax.lax.stop_gradient(top)[..., None]
    shared, own = jnp.exp(shared - top), jnp.exp(own - top)
    total = jnp.sum(shared, axis=-1) + jnp.sum(own, axis=-1)  # b g p q
    out = product("bgpqs,bsgh->bgpqh", shared.astype(values.dtype), values[0])
    out = out + product("bgpqj,jbpgh->bgpqh", own.astype(values.dtype), values[1:])
    out = jnp.transpose(out / total[..., None], (0, 2, 1, 3, 4))
    return out.reshape(b * s, g, per_kv, h).astype(values.dtype)


def best_implementation(dtype: jnp.dtype, head_dim: int) -> Implementation:
    """`cudnn` where this process can compile it, else `xla`: found out by compiling a small case."""
    if jax.default_backend() != "gpu" or dtype == jnp.float32:
        return "xla"
    x = jax.ShapeDtypeStruct((1, 64, 1, head_dim), dtype)
    mask = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.bool_)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, k, v, mask=mask).astype(jnp.float32))

    try:
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, mask).compile()
    except Exception:  # whatever cuDNN says: absent, too old, this head size, this device
        return "xla"
    return "cudnn"
