"""Attention over packed rows: several samples a row, no pages, every position at once.

Both classes are the `Attend` of a `DecoderLayer`. Their cache is not paged: it holds one set of rows for
each draft step so far, [J, M, ...], and every call appends its own.

Positions that an indexer chose are *places* here: s of the row's S positions, or S + i for the row that the
line itself wrote at step i.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from mtp_jax.models.delta import DeltaInputs, DeltaWeights
from mtp_jax.models.delta_net import DeltaHeads
from mtp_jax.models.layers import Cache, CacheRows, split_qkv
from mtp_jax.train import recurrence
from mtp_jax.train.notes import Notes
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


@dataclasses.dataclass(frozen=True)
class LineAttention(NoBlocks):
    """Attention of draft step j >= 1, of the lines that start at every position at once.

    The line of base position p is at position p + j. It sees what the engine's cache holds there: step
    0's rows at positions <= p, and the rows that this line itself wrote in steps 1 to j.
    """

    mask: jax.Array  # B S S, of `causal_mask`

    def grouped(self, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        q, k, v = split_qkv(qkv)
        cache = _append(cache, k, v)
        return _attention(self.mask, None, q, *cache, q.shape[-1] ** -0.5), cache

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
        """See `Attend`. Nothing depends on `reused`: places mean the same for every token of a line."""
        del reused
        (cache,) = _append((cache,), row)
        mask, own = self.mask, None
        if indices is not None:
            s = mask.shape[1]
            chosen = _chosen(indices, s, s + cache.shape[0] - 1)
            mask, own = mask & chosen[:, :, :s], chosen[:, :, s:]
        keys = cache[:, :, None]  # one KV head
        mixed = _attention(mask, own, q[:, None], keys, keys[..., :width], scale)
        return mixed[:, 0], cache

    def select(
        self, q: jax.Array, weights: jax.Array, key: jax.Array, cache: jax.Array, topk: int
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        (cache,) = _append((cache,), key)
        scores = _index_scores(self.mask, q, weights, cache)
        return _best_places(scores, topk), cache

    def recurrent(
        self,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        heads: DeltaHeads,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        raise AssertionError("no family's MTP module has a recurrent layer")


@dataclasses.dataclass(frozen=True)
class PackedAttention(LineAttention):
    """Causal attention inside each segment of a packed row: what a line is before it has rows of its own.

    `notes` are told what an indexer has to learn.
    """

    implementation: Implementation
    notes: Notes | None = None
    # Scores of the layer's indexer, from `select` to `latent`.
    _scores: list[jax.Array] = dataclasses.field(default_factory=list)

    def grouped(self, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        q, k, v = split_qkv(qkv)
        scale = q.shape[-1] ** -0.5
        if self.implementation == "xla":
            return _attention(self.mask, None, q, k[None], v[None], scale), _append(cache, k, v)
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
        if self.notes is not None and self._scores:
            self.notes.add_rows(_indexer_loss(self.mask, self._scores.pop(), q, row, scale))
        return super().latent(q, row, cache, scale, width, indices, reused)

    def select(
        self, q: jax.Array, weights: jax.Array, key: jax.Array, cache: jax.Array, topk: int
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        (cache,) = _append((cache,), key)
        scores = _index_scores(self.mask, q, weights, cache)
        if self.notes is not None:
            self._scores.append(scores)
        return _best_places(scores, topk), cache

    def recurrent(
        self,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        heads: DeltaHeads,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`. There is nothing to keep: rows are whole sequences."""
        return recurrence.run(self.mask, inputs, weights, heads), cache


def _append(cache: Cache, *new: jax.Array) -> Cache:
    return tuple(jnp.concatenate([old, rows[None]]) for old, rows in zip(cache, new, strict=True))


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, static_argnums=(5,))
def _attention(
    mask: jax.Array,
    own_mask: jax.Array | None,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    scale: float,
) -> jax.Array:
    """One softmax over step 0's rows and the line's own -> [M, G, Q, H of the values].

    Scores are [B, G, S, Q, S] in fp32, as the product leaves them: they are computed again for the gradient
    instead of kept.

    Args:
      mask: which of step 0's rows each line sees, [B, S, S].
      own_mask: which of its own, [B, S, j]; None: all.
      q: [M, G, Q, H].
      keys, values: [1 + j, M, G, ...].
    """
    b, s, _ = mask.shape
    _, g, per_kv, h = q.shape
    q = q.reshape(b, s, g, per_kv, h)
    keys, values = (x.reshape(-1, b, s, g, x.shape[-1]) for x in (keys, values))
    shared = product("bpgqh,bsgh->bgpqs", q, keys[0]) * scale
    shared = jnp.where(mask[:, None, :, None], shared, _MASKED)
    own = product("bpgqh,jbpgh->bgpqj", q, keys[1:]) * scale
    if own_mask is not None:
        own = jnp.where(own_mask[:, None, :, None], own, _MASKED)
    top = jnp.maximum(jnp.max(shared, axis=-1), jnp.max(own, axis=-1, initial=_MASKED))
    top = jax.lax.stop_gradient(top)[..., None]
    shared, own = jnp.exp(shared - top), jnp.exp(own - top)
    total = jnp.sum(shared, axis=-1) + jnp.sum(own, axis=-1)  # b g p q
    out = product("bgpqs,bsgh->bgpqh", shared.astype(values.dtype), values[0])
    out = out + product("bgpqj,jbpgh->bgpqh", own.astype(values.dtype), values[1:])
    out = jnp.transpose(out / total[..., None], (0, 2, 1, 3, 4))
    return out.reshape(b * s, g, per_kv, -1).astype(values.dtype)


def _index_scores(mask: jax.Array, q: jax.Array, weights: jax.Array, cache: jax.Array) -> jax.Array:
    """An indexer's scores of all places, [B, S, S + j] fp32; masked where a line does not see them.

    Args:
      mask: [B, S, S].
      q: [M, I, H].
      weights: of its heads, [M, I] fp32.
      cache: its keys, [1 + j, M, H].
    """
    b, s, _ = mask.shape
    q, weights = q.reshape(b, s, *q.shape[1:]), weights.reshape(b, s, -1)
    keys = cache.reshape(-1, b, s, cache.shape[-1])
    shared = jax.nn.relu(product("bpih,bsh->bpis", q, keys[0]))
    own = jax.nn.relu(product("bpih,jbph->bpij", q, keys[1:]))
    scores = product("bpis,bpi->bps", jnp.concatenate([shared, own], axis=-1), weights)
    seen = jnp.concatenate([mask, jnp.ones((b, s, own.shape[-1]), jnp.bool_)], axis=-1)
    return jnp.where(seen, scores, _MASKED)


def _best_places(scores: jax.Array, topk: int) -> jax.Array:
    """scores [B, S, places] -> the best places, [M, topk] int32, -1 where a token sees fewer."""
    count = min(topk, scores.shape[-1])
    best, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), count)
    chosen = jnp.where(best > _MASKED, chosen.astype(jnp.int32), -1).reshape(-1, count)
    return jnp.pad(chosen, ((0, 0), (0, topk - count)), constant_values=-1)


def _chosen(indices: jax.Array, length: int, places: int) -> jax.Array:
    """indices [M, J] as [B, S, places] bool, for S = length."""
    m = indices.shape[0]
    at = jnp.where(indices < 0, places, indices)  # past the end, and so dropped
    rows = jnp.arange(m, dtype=jnp.int32)[:, None]
    chosen = jnp.zeros((m, places), jnp.bool_).at[rows, at].set(True, mode="drop")
    return chosen.reshape(-1, length, places)


def _indexer_loss(
    mask: jax.Array, scores: jax.Array, q: jax.Array, row: jax.Array, scale: float
) -> jax.Array:
    """How far an indexer is from the attention that it serves, a token row [M]: KL(attention || indexer).

    The best positions have no gradient, so an indexer learns from this alone: the mean of the heads'
    attention weights over *all* positions, as in the dense warm-up of DeepSeek-V3.2 (arXiv:2512.02556,
    section 2.1). Attention itself is sparse from the start here. Over the chosen positions only, the later
    stage's loss, an indexer that starts at random would never hear of the others.

    Args:
      mask, scores: of `_index_scores`, without rows of a line's own.
      q: [M, N, R + Hr]; row: [M, R + Hr].
    """
    b, s, _ = mask.shape
    q, row = jax.lax.stop_gradient((q.reshape(b, s, *q.shape[1:]), row.reshape(b, s, -1)))
    attention = jnp.where(mask[:, :, None], product("bpnr,bsr->bpns", q, row) * scale, _MASKED)
    wanted = jnp.mean(jax.nn.softmax(attention, axis=-1), axis=2)  # B S S
    said = jax.nn.log_softmax(scores, axis=-1)
    terms = jnp.where(mask, wanted * (jnp.log(jnp.maximum(wanted, 1e-20)) - said), 0.0)
    return jnp.sum(terms, axis=-1).reshape(-1)


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
