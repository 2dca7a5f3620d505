"""Families by `model_type`: which layers run them, and how their checkpoints name things."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig
from mtp_jax.errors import InvalidValueError
from mtp_jax.models.block import DecoderLayer, LayerKind, layer_caches, layer_leaves
from mtp_jax.models.layers import CacheRows, rms_norm
from mtp_jax.models.leaves import Leaf, Shape, abstract, merge, norm, structure
from mtp_jax.models.mtp import DEEPSEEK, MIMO, QWEN, MTPModule, MTPNames, StreamMTPModule, mtp_leaves
from mtp_jax.models.ngram import constant_tensors, table_leaf
from mtp_jax.models.streams import FINAL_MIXER, StreamMixer

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Family:
    """What the registry knows of a `model_type`."""

    mtp_names: MTPNames
    mtp_prefix: Callable[[ModelConfig], str]  # of the MTP module's tensors
    repeats: tuple[str, ...] = ()  # tensors beside the module that repeat the target's; may be there or not


_MIMO = Family(MIMO, lambda config: "model.mtp_layers.0.")
_DEEPSEEK = Family(
    DEEPSEEK,
    lambda config: f"model.layers.{config.num_hidden_layers}.",
    ("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN = Family(QWEN, lambda config: "mtp.")
FAMILIES: dict[str, Family] = {
    "llama": _MIMO,
    "qwen2": _MIMO,
    "mimo": _MIMO,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen4_exp": _QWEN,
}


def check_supported(config: ModelConfig) -> None:
    """Raises InvalidValueError where no family here runs the model."""
    if config.model_type not in FAMILIES:
        raise InvalidValueError("config.json: model_type", config.model_type, " or ".join(FAMILIES))


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of each trunk layer."""
    return tuple(_kind(config, layer) for layer in range(config.num_hidden_layers))


def mtp_kind(config: ModelConfig) -> LayerKind:
    """The kind of the MTP module's layer: as the trunk's, with attention and with an indexer of its own."""
    last = dataclasses.replace(_kind(config, config.num_hidden_layers - 1), ngrams=False)
    if config.latent is None:
        return dataclasses.replace(last, attention="grouped" if config.blocks is None else "blocks")
    return last if config.indexer is None else dataclasses.replace(last, attention="indexed")


def _kind(config: ModelConfig, layer: int) -> LayerKind:
    ffn = "experts" if config.experts is not None and config.experts.sparse[layer] else "dense"
    ngrams = config.ngram is not None and config.ngram.layer == layer
    if config.delta is not None and config.delta.layers[layer]:
        return LayerKind("delta", ffn, ngrams)
    if config.latent is None:
        return LayerKind("grouped" if config.blocks is None else "blocks", ffn, ngrams)
    indexed = config.indexer is not None and config.indexer.owners[layer]
    return LayerKind("indexed" if indexed else "latent", ffn)


def layer_sizes(config: ModelConfig) -> tuple[float, ...]:
    """Weights of each trunk layer, in elements: what a stage reads of it at every tick, and keeps."""
    kinds = layer_kinds(config)
    sizes = {
        kind: float(sum(math.prod(leaf.shape) for leaf in layer_leaves(config, kind)))
        for kind in dict.fromkeys(kinds)
    }
    return tuple(sizes[kind] for kind in kinds)


def make_layer(config: ModelConfig, kind: LayerKind, dtype: jnp.dtype) -> nnx.GraphDef[DecoderLayer]:
    """A trunk layer's structure, without arrays."""
    return structure(lambda: DecoderLayer(config, kind, dtype, abstract))


def make_mtp(config: ModelConfig, dtype: jnp.dtype) -> nnx.GraphDef[MTPModule | StreamMTPModule]:
    """The MTP module's structure, without arrays."""
    if config.streams is not None:
        return structure(lambda: StreamMTPModule(config, mtp_kind(config), dtype, abstract))
    return structure(lambda: MTPModule(config, mtp_kind(config), dtype, abstract))


def final_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """Leaves of what comes before the LM head: the final norm or, of several streams, their mixer."""
    if config.streams is not None:
        return StreamMixer.leaves(config, FINAL_MIXER)
    return (norm("final_norm", config.hidden_size, FINAL_NORM, config.zero_centred_norms),)


def make_final(
    config: ModelConfig, dtype: jnp.dtype, arrays: tuple[jax.Array, ...]
) -> Callable[[jax.Array], jax.Array]:
    """What comes before the LM head: from the residual [..., S D] to what it takes, [..., D]."""
    if config.streams is None:
        return lambda x: rms_norm(x, arrays[0], config.rms_norm_eps)
    mixer = merge(structure(lambda: StreamMixer(config, dtype, abstract)), final_leaves(config), arrays)
    return lambda x: mixer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def mtp_table(config: ModelConfig) -> tuple[Leaf, ...]:
    """Leaves of the MTP module."""
    return mtp_leaves(config, mtp_kind(config), FAMILIES[config.model_type].mtp_names)


def mtp_prefix(config: ModelConfig) -> str:
    """What the MTP module's tensors are called in front."""
    return FAMILIES[config.model_type].mtp_prefix(config)


def layer_prefix(layer: int) -> str:
    """What a trunk layer's tensors are called in front."""
    return f"model.layers.{layer}."


def mtp_caches(config: ModelConfig) -> tuple[CacheRows, ...]:
    """Caches of the MTP module, the same on all devices but for KV heads."""
    axes = {"kv_heads": "mtp_kv_heads"}
    return tuple(
        dataclasses.replace(rows, axes=tuple(axes.get(axis or "", axis) for axis in rows.axes))
        for rows in layer_caches(config, mtp_kind(config))
    )


def expected_tensors(config: ModelConfig, names: frozenset[str] = frozenset()) -> dict[str, Shape]:
    """Every tensor that a model of this configuration needs, its MTP module included.

    Args:
      config: the model's.
      names: the checkpoint's tensors: they decide where there are several ways to store something.
    """
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {EMBEDDING: table} | _stored_shapes(final_leaves(config), "", names)
    if config.ngram is not None:
        shapes |= _stored_shapes((table_leaf(config),), "", names)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = table
    for layer, kind in enumerate(layer_kinds(config)):
        shapes |= _stored_shapes(layer_leaves(config, kind), layer_prefix(layer), names)
    if config.num_nextn_predict_layers:
        shapes |= mtp_tensors(config, names)
    return shapes


def mtp_tensors(config: ModelConfig, names: frozenset[str] = frozenset()) -> dict[str, Shape]:
    """The tensors of the MTP module."""
    return _stored_shapes(mtp_table(config), mtp_prefix(config), names)


def optional_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Tensors that may be there, and repeat others or what the configuration says."""
    constants = {name: (len(values),) for name, values in constant_tensors(config).items()}
    if not config.num_nextn_predict_layers:
        return constants
    table = (config.vocab_size, config.hidden_size)
    return constants | {mtp_prefix(config) + name: table for name in FAMILIES[config.model_type].repeats}


def _stored_shapes(leaves: tuple[Leaf, ...], prefix: str, names: frozenset[str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for leaf in leaves:
        shapes |= dict(leaf.chosen(prefix, names).names(prefix, leaf.shape[0]))
    return shapes
