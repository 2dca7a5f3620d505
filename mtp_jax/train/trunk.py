"""The target over packed rows: every position's hidden state in one pass, without a cache."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UnsupportedHereError
from mtp_jax.models.block import LayerKind, layer_caches, layer_leaves
from mtp_jax.models.layers import Around, rms_norm, rope_tables
from mtp_jax.models.leaves import Leaf, Read, merge, norm
from mtp_jax.models.registry import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    check_supported,
    layer_kinds,
    layer_prefix,
    make_layer,
)
from mtp_jax.train.attention import Implementation, PackedAttention, causal_mask, empty_cache
from mtp_jax.train.notes import Notes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Target:
    """A target's weights, whole on every device. Runs of equal layers are stacked: each is one `lax.scan`."""

    layers: tuple[dict[str, jax.Array], ...]  # per run of layers of one kind: leaf name -> its layers, ...
    embedding: jax.Array  # V D
    lm_head: jax.Array | None  # V D; None where the model ties it to the embedding
    final_norm: jax.Array  # D

    @property
    def head(self) -> jax.Array:
        """Rows of the LM head, [V, D]."""
        return self.embedding if self.lm_head is None else self.lm_head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed rows, [B, S] each: samples one after another, each a segment with positions from 0."""

    tokens: jax.Array  # int32
    segments: jax.Array  # int32; 0 is padding
    positions: jax.Array  # int32, inside the segment
    loss_mask: jax.Array  # bool: the model wrote this token
    greedy: jax.Array  # bool: its sample was written greedily


def check_trainable(config: ModelConfig) -> None:
    """Raises InvalidValueError or UnsupportedHereError where the trainer cannot run the model."""
    check_supported(config)
    if config.streams is not None:
        raise UnsupportedHereError("training of models with several residual streams is not supported yet")
    others = {kind.attention for kind in layer_kinds(config)} - {"grouped", "latent", "indexed", "delta"}
    if others:
        raise UnsupportedHereError(f"training of models with {others.pop()} attention is not supported yet")


def layer_runs(config: ModelConfig) -> tuple[tuple[LayerKind, range], ...]:
    """Runs of consecutive layers of one kind, and which layers they are."""
    runs: list[tuple[LayerKind, range]] = []
    for layer, kind in enumerate(layer_kinds(config)):
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, range(runs[-1][1].start, layer + 1)
        else:
            runs.append((kind, range(layer, layer + 1)))
    return tuple(runs)


def final_norm_leaf(config: ModelConfig) -> Leaf:
    """The target's final norm."""
    return norm("final_norm", config.hidden_size, FINAL_NORM, config.zero_centred_norms)


def read_target(
    config: ModelConfig,
    read: Read,
    dtype: jnp.dtype,
    report: Callable[[int, int], None],
    names: frozenset[str] = frozenset(),
) -> Target:
    """Reads a target from a checkpoint into host arrays of `dtype`.

    `report` is called with (layers done, layers in all); `names` are the checkpoint's, where it may store
    something in several ways.
    """

    def array(values: np.ndarray, own: jnp.dtype | None = None) -> np.ndarray:
        return np.asarray(values).astype(own or dtype)

    runs: list[dict[str, np.ndarray]] = []
    for kind, layers in layer_runs(config):
        rows: list[dict[str, np.ndarray]] = []
        for layer in layers:
            leaves = layer_leaves(config, kind)
            rows.append(
                {leaf.name: array(leaf.read(read, layer_prefix(layer), names), leaf.dtype) for leaf in leaves}
            )
            report(layer + 1, config.num_hidden_layers)
        runs.append({name: np.stack([row[name] for row in rows]) for name in rows[0]})
    last = final_norm_leaf(config)
    whole = Target(
        layers=tuple(runs),  # type: ignore[arg-type]
        embedding=array(read(EMBEDDING)),  # type: ignore[arg-type]
        lm_head=None if config.tie_word_embeddings else array(read(LM_HEAD)),  # type: ignore[arg-type]
        final_norm=array(last.read(read, ""), last.dtype),  # type: ignore[arg-type]
    )
    return whole


def cast_target(config: ModelConfig, target: Target, dtype: jnp.dtype) -> Target:
    """The target in `dtype`, but for leaves that have a type of their own."""
    layers = []
    for (kind, _), run in zip(layer_runs(config), target.layers, strict=True):
        own = {leaf.name: leaf.dtype for leaf in layer_leaves(config, kind)}
        layers.append({name: leaf.astype(own[name] or dtype) for name, leaf in run.items()})
    return Target(
        layers=tuple(layers),
        embedding=target.embedding.astype(dtype),
        lm_head=None if target.lm_head is None else target.lm_head.astype(dtype),
        final_norm=target.final_norm.astype(final_norm_leaf(config).dtype or dtype),
    )


Stream = tuple[jax.Array, jax.Array | None]  # x [M, D], and the places of the last indexer [M, J]


def residual_stream(
    config: ModelConfig,
    target: Target,
    rows: Packed,
    implementation: Implementation,
    remat: bool = False,
    notes: Notes | None = None,
) -> jax.Array:
    """What leaves the last layer, [B, S, D].

    `remat` computes each layer again for the gradient (for targets that are trained); `notes` get what
    layers want to learn beside the model's own loss.
    """
    b, s = rows.tokens.shape
    x = target.embedding[rows.tokens].reshape(b * s, -1)
    stream = x, _no_places(config, b * s)
    rope = rope_tables(rows.positions.reshape(-1), config)
    attend = PackedAttention(causal_mask(rows.segments), implementation)
    with jax.named_scope("trunk"):
        for (kind, _), layers in zip(layer_runs(config), target.layers, strict=True):
            run = _layer(config, kind, x, Around(rope, attend), None if notes is None else notes.counted)
            stream, losses = jax.lax.scan(jax.checkpoint(run) if remat else run, stream, layers)
            if notes is not None and losses is not None:
                notes.add(jnp.sum(losses))
        return stream[0].reshape(b, s, -1)


def _no_places(config: ModelConfig, rows: int) -> jax.Array | None:
    """Before the first indexer; None where the model has none."""
    return None if config.indexer is None else jnp.full((rows, config.indexer.topk), -1, jnp.int32)


def _layer(
    config: ModelConfig, kind: LayerKind, x: jax.Array, around: Around, counted: jax.Array | None
) -> Callable[[Stream, dict[str, jax.Array]], tuple[Stream, jax.Array | None]]:
    """One layer of a kind, as `lax.scan` wants it, over rows like x [M, D]; it also gives what it noted."""
    leaves, graphdef = layer_leaves(config, kind), make_layer(config, kind, x.dtype)
    cache = empty_cache(layer_caches(config, kind), x.shape[0], x.dtype)

    def run(stream: Stream, layer: dict[str, jax.Array]) -> tuple[Stream, jax.Array | None]:
        module = merge(graphdef, leaves, [layer[leaf.name] for leaf in leaves])
        if counted is None:
            x, places, _ = module(*stream, cache, around)
            return (x, places), None
        notes = Notes(counted)
        x, places, _ = module(*stream, cache, with_notes(around, notes))
        return (x, places), notes.total

    return run


def with_notes(around: Around, notes: Notes) -> Around:
    """The same, and what layers want to learn is noted."""
    attend = dataclasses.replace(around.attend, notes=notes)  # type: ignore[type-var]
    return dataclasses.replace(around, attend=attend, routed=notes.routed)


def hidden_states(
    config: ModelConfig,
    target: Target,
    rows: Packed,
    implementation: Implementation,
    remat: bool = False,
    notes: Notes | None = None,
) -> jax.Array:
    """The target's hidden states after its final norm, [B, S, D]."""
    x = residual_stream(config, target, rows, implementation, remat, notes)
    return rms_norm(x, target.final_norm, config.rms_norm_eps)
