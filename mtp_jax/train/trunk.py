"""The target over packed rows: every position's hidden state in one pass, without a cache."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.models.layers import rms_norm, rope_tables
from mtp_jax.models.registry import Leaf, Read, layer_leaves, make_layer, merge
from mtp_jax.train.attention import Implementation, PackedAttention, causal_mask, empty_cache

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Target:
    """A target's weights, whole on every device. Layers are stacked, for they run in one `lax.scan`."""

    layers: dict[str, jax.Array]  # leaf name -> L ...
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


def leaf_name(leaf: Leaf) -> str:
    """The name a leaf has in trees of parameters: `layer.qkv`."""
    return ".".join(leaf.path)


def trunk_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """Leaves of one trunk layer. The trainer shards data only, so their logical axes do not matter."""
    return layer_leaves(config, kv_heads="kv_heads", ffn="ffn")


def read_target(
    config: ModelConfig, read: Read, dtype: jnp.dtype, report: Callable[[int, int], None]
) -> Target:
    """Reads a target from a checkpoint into host arrays of `dtype`.

    `report` is called with (layers done, layers in all).
    """

    def array(values: np.ndarray) -> np.ndarray:
        return np.asarray(values).astype(dtype)

    rows: list[dict[str, np.ndarray]] = []
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        rows.append({leaf_name(leaf): array(leaf.read(read, prefix)) for leaf in trunk_leaves(config)})
        report(index + 1, config.num_hidden_layers)
    whole = Target(
        layers={name: np.stack([row[name] for row in rows]) for name in rows[0]},  # type: ignore[misc]
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
    leaves, graphdef = trunk_leaves(config), make_layer(config, target.embedding.dtype)
    x = target.embedding[rows.tokens].reshape(b * s, -1)
    rope = rope_tables(rows.positions.reshape(-1), config)
    attend = PackedAttention(causal_mask(rows.segments), implementation)
    cache = empty_cache(b * s, config.num_key_value_heads, config.head_dim, x.dtype)

    def run(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        module = merge(graphdef, leaves, [layer[leaf_name(leaf)] for leaf in leaves])
        return module(x, cache, rope, attend)[0], None

    with jax.named_scope("trunk"):
        x, _ = jax.lax.scan(jax.checkpoint(run) if remat else run, x, target.layers)
        return x.reshape(b, s, -1)


def hidden_states(
    config: ModelConfig, target: Target, rows: Packed, implementation: Implementation, remat: bool = False
) -> jax.Array:
    """The target's hidden states after its final norm, [B, S, D]."""
    x = residual_stream(config, target, rows, implementation, remat)
    return rms_norm(x, target.final_norm, config.rms_norm_eps)
