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
from mtp_jax.models.leaves import Read, merge
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
    others = {kind.attention for kind in layer_kinds(config)} - {"grouped"}
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


def read_target(
    config: ModelConfig, read: Read, dtype: jnp.dtype, report: Callable[[int, int], None]
) -> Target:
    """Reads a target from a checkpoint into host arrays of `dtype`.

    `report` is called with (layers done, layers in all).
    """

    def array(values: np.ndarray, own: jnp.dtype | None = None) -> np.ndarray:
        return np.asarray(values).astype(own or dtype)

    runs: list[dict[str, np.ndarray]] = []
    for kind, layers in layer_runs(config):
        rows: list[dict[str, np.ndarray]] = []
        for layer in layers:
            leaves = layer_leaves(config, kind)
            rows.append(
                {leaf.name: array(leaf.read(read, layer_prefix(layer)), leaf.dtype) for leaf in leaves}
            )
            report(layer + 1, config.num_hidden_layers)
        runs.append({name: np.stack([row[name] for row in rows]) for name in rows[0]})
    whole = Target(
        layers=tuple(runs),  # type: ignore[arg-type]
        embedding=array(read(EMBEDDING)),  # type: ignore[arg-type]
        lm_head=None if config.tie_word_embeddings else array(read(LM_HEAD)),  # type: ignore[arg-type]
        final_norm=array(read(FINAL_NORM)),  # type: ignore[arg-type]
    )
    return whole


def residual_stream(
    config: ModelConfig, target: Target, rows: Packed, implementation: Implementation, remat: bool = False
) -> jax.Array:
    """What leaves the last layer, [B, S, D].

    `remat` computes each layer again for the gradient (for targets that are trained).
    """
    b, s = rows.tokens.shape
    x = target.embedding[rows.tokens].reshape(b * s, -1)
    rope = rope_tables(rows.positions.reshape(-1), config)
    attend = PackedAttention(causal_mask(rows.segments), implementation)
    with jax.named_scope("trunk"):
        for (kind, _), layers in zip(layer_runs(config), target.layers, strict=True):
            run = _layer(config, kind, x, Around(rope, attend))
            x, _ = jax.lax.scan(jax.checkpoint(run) if remat else run, x, layers)
        return x.reshape(b, s, -1)


def _layer(
    config: ModelConfig, kind: LayerKind, x: jax.Array, around: Around
) -> Callable[[jax.Array, dict[str, jax.Array]], tuple[jax.Array, None]]:
    """One layer of a kind, as `lax.scan` wants it, over rows like x [M, D]."""
    leaves, graphdef = layer_leaves(config, kind), make_layer(config, kind, x.dtype)
    cache = empty_cache(layer_caches(config, kind), x.shape[0], x.dtype)

    def run(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        module = merge(graphdef, leaves, [layer[leaf.name] for leaf in leaves])
        return module(x, None, cache, around)[0], None

    return run


def hidden_states(
    config: ModelConfig, target: Target, rows: Packed, implementation: Implementation, remat: bool = False
) -> jax.Array:
    """The target's hidden states after its final norm, [B, S, D]."""
    x = residual_stream(config, target, rows, implementation, remat)
    return rms_norm(x, target.final_norm, config.rms_norm_eps)
