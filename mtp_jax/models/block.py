"""Decoder layers: an attention block and a feed-forward block. Layers of one kind have equal shapes."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig
from mtp_jax.models.attention import GroupedAttention
from mtp_jax.models.blocks import BlockAttention
from mtp_jax.models.delta import DeltaAttention
from mtp_jax.models.ffn import Experts, SwiGLU
from mtp_jax.models.layers import Around, Cache, CacheRows
from mtp_jax.models.leaves import Leaf, Make, inside
from mtp_jax.models.mla import LatentAttention
from mtp_jax.models.ngram import NgramLayer
from mtp_jax.models.streams import HyperConnection

_HYPER = {"attention": "attn_hyper_connection.", "ffn": "mlp_hyper_connection."}  # in checkpoints


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What runs in a layer slot.

    `indexed` attention has an indexer; `latent` attention of a model that has one elsewhere takes the
    positions that the nearest earlier layer chose; `delta` is a gated delta net; `blocks` is grouped
    attention over blocks of tokens that an indexer chooses.
    """

    attention: Literal["grouped", "latent", "indexed", "delta", "blocks"]
    ffn: Literal["dense", "experts"]
    ngrams: bool = False  # takes the tokens' n-gram embeddings

    def describe(self) -> str:
        """Such as `latent attention + experts`."""
        return f"{self.attention} attention + {self.ffn} ffn{' + n-grams' if self.ngrams else ''}"


def joint_kind(one: LayerKind, two: LayerKind) -> LayerKind | None:
    """The kind of a layer slot that can hold layers of both; None: there is none.

    A layer with an indexer does without it where it is given positions, and one with n-grams without those.
    """
    if one.ngrams != two.ngrams:
        same = dataclasses.replace(one, ngrams=two.ngrams) == two
        return dataclasses.replace(one, ngrams=True) if same else None
    indexed = dataclasses.replace(one, attention="indexed")
    if one == two:
        return one
    if {one.attention, two.attention} == {"latent", "indexed"} and one.ffn == two.ffn:
        return indexed
    return None


class DecoderLayer(nnx.Module):
    """Decoder layer: pre-norm blocks, or blocks between hyper-connections."""

    def __init__(self, config: ModelConfig, kind: LayerKind, dtype: jnp.dtype, make: Make):
        if kind.attention == "grouped":
            self.attention = GroupedAttention(config, dtype, make)
        elif kind.attention == "blocks":
            self.attention = BlockAttention(config, dtype, make)
        elif kind.attention == "delta":
            self.attention = DeltaAttention(config, dtype, make)
        else:
            self.attention = LatentAttention(config, kind.attention == "indexed", dtype, make)
        self.ffn = SwiGLU(config, dtype, make) if kind.ffn == "dense" else Experts(config, dtype, make)
        self.ngrams = NgramLayer(config, dtype, make) if kind.ngrams else None
        hyper = config.streams is not None
        self.attention_streams = HyperConnection(config, dtype, make) if hyper else None
        self.ffn_streams = HyperConnection(config, dtype, make) if hyper else None

    def __call__(
        self, x: jax.Array, indices: jax.Array | None, cache: Cache, around: Around
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """x [M, D] -> (x [M, D], positions that the layer attended to [M, J] or None, cache).

        Of S residual streams x is [M, S D].
        """
        ngram_cache: Cache = ()
        if self.ngrams is not None:  # its caches are the last two
            cache, ngram_cache = cache[:-2], cache[-2:]
            if around.ngram is not None:
                with jax.named_scope("ngrams"):
                    x, ngram_cache = self.ngrams(x, around.ngram, ngram_cache, around)
        with jax.named_scope("attention"):
            read, shares = _enter(x, self.attention_streams)
            made, indices, cache = self.attention(read, indices, cache, around)
            x = made if shares is None else HyperConnection.leave(x, made, shares)
        with jax.named_scope("ffn"):
            read, shares = _enter(x, self.ffn_streams)
            made = self.ffn(read, around)
            x = made if shares is None else HyperConnection.leave(x, made, shares)
        return x, indices, (*cache, *ngram_cache)


def _enter(x: jax.Array, streams: HyperConnection | None) -> tuple[jax.Array, jax.Array | None]:
    """What a block reads, and each stream's share of what it makes; None: it returns the sum itself."""
    return (x, None) if streams is None else streams.enter(x)


def layer_leaves(config: ModelConfig, kind: LayerKind) -> tuple[Leaf, ...]:
    """The weights of a layer of this kind."""
    if kind.attention == "grouped":
        attention = GroupedAttention.leaves(config)
    elif kind.attention == "blocks":
        attention = BlockAttention.leaves(config)
    elif kind.attention == "delta":
        attention = DeltaAttention.leaves(config)
    else:
        attention = LatentAttention.leaves(config, kind.attention == "indexed")
    ffn = SwiGLU.leaves(config) if kind.ffn == "dense" else Experts.leaves(config)
    leaves = inside("attention", attention) + inside("ffn", ffn)
    if kind.ngrams:
        leaves += inside("ngrams", NgramLayer.leaves(config))
    for part, prefix in _HYPER.items() if config.streams is not None else ():
        leaves += inside(f"{part}_streams", HyperConnection.leaves(config, prefix))
    return leaves


def layer_caches(config: ModelConfig, kind: LayerKind) -> tuple[CacheRows, ...]:
    """The caches of a layer of this kind; those of its n-grams come last."""
    if kind.attention == "grouped":
        caches = GroupedAttention.caches(config)
    elif kind.attention == "blocks":
        caches = BlockAttention.caches(config)
    elif kind.attention == "delta":
        caches = DeltaAttention.caches(config)
    else:
        caches = LatentAttention.caches(config, kind.attention == "indexed")
    return caches + NgramLayer.caches(config) if kind.ngrams else caches
