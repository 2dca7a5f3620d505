"""Decoder layers: an attention block and a feed-forward block. Layers of one kind have equal shapes."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig
from mtp_jax.models.attention import GroupedAttention
from mtp_jax.models.delta import DeltaAttention
from mtp_jax.models.ffn import Experts, SwiGLU
from mtp_jax.models.layers import Around, Cache, CacheRows
from mtp_jax.models.leaves import Leaf, Make, inside
from mtp_jax.models.mla import LatentAttention


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What runs in a layer slot.

    `indexed` attention has an indexer; `latent` attention of a model that has one elsewhere takes the
    positions that the nearest earlier layer chose; `delta` is a gated delta net.
    """

    attention: Literal["grouped", "latent", "indexed", "delta"]
    ffn: Literal["dense", "experts"]

    def describe(self) -> str:
        """Such as `latent attention + experts`."""
        return f"{self.attention} attention + {self.ffn} ffn"


def joint_kind(one: LayerKind, two: LayerKind) -> LayerKind | None:
    """The kind of a layer slot that can hold layers of both; None: there is none.

    A layer with an indexer does without it where it is given positions.
    """
    indexed = dataclasses.replace(one, attention="indexed")
    if one == two:
        return one
    if {one.attention, two.attention} == {"latent", "indexed"} and one.ffn == two.ffn:
        return indexed
    return None


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, kind: LayerKind, dtype: jnp.dtype, make: Make):
        if kind.attention == "grouped":
            self.attention = GroupedAttention(config, dtype, make)
        elif kind.attention == "delta":
            self.attention = DeltaAttention(config, dtype, make)
        else:
            self.attention = LatentAttention(config, kind.attention == "indexed", dtype, make)
        self.ffn = SwiGLU(config, dtype, make) if kind.ffn == "dense" else Experts(config, dtype, make)

    def __call__(
        self, x: jax.Array, indices: jax.Array | None, cache: Cache, around: Around
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """x [M, D] -> (x [M, D], positions that the layer attended to [M, J] or None, cache)."""
        with jax.named_scope("attention"):
            x, indices, cache = self.attention(x, indices, cache, around)
        with jax.named_scope("ffn"):
            return self.ffn(x, around), indices, cache


def layer_leaves(config: ModelConfig, kind: LayerKind) -> tuple[Leaf, ...]:
    """The weights of a layer of this kind."""
    if kind.attention == "grouped":
        attention = GroupedAttention.leaves(config)
    elif kind.attention == "delta":
        attention = DeltaAttention.leaves(config)
    else:
        attention = LatentAttention.leaves(config, kind.attention == "indexed")
    ffn = SwiGLU.leaves(config) if kind.ffn == "dense" else Experts.leaves(config)
    return inside("attention", attention) + inside("ffn", ffn)


def layer_caches(config: ModelConfig, kind: LayerKind) -> tuple[CacheRows, ...]:
    """The caches of a layer of this kind."""
    if kind.attention == "grouped":
        return GroupedAttention.caches(config)
    if kind.attention == "delta":
        return DeltaAttention.caches(config)
    return LatentAttention.caches(config, kind.attention == "indexed")
