"""Multi-token-prediction modules: two norms, a projection, one decoder layer, a final norm.

For position p a module takes the target's hidden state h_p (after the target's final norm) and the next
token's embedding E[t_{p+1}], and its output, through the target's own LM head, predicts t_{p+2}.
Embedding and LM head are the target's, handed in, and are never stored twice: checkpoints that repeat them
beside the module (DeepSeek) repeat the same numbers.
vLLM zeroes the embedding at position 0; the published modelling code does not, and neither do we.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtp_jax.config import ModelConfig
from mtp_jax.models.block import DecoderLayer, LayerKind, layer_leaves
from mtp_jax.models.layers import Around, Cache, linear, rms_norm
from mtp_jax.models.leaves import Leaf, Make, inside, never_float8, norm, plain, reordered
from mtp_jax.models.streams import StreamMixer

# The engine's name of each logical axis where the weights are the MTP module's: these are spread over the
# head's devices, not over those of one stage.
_HEAD_AXES = {"kv_heads": "mtp_kv_heads", "heads": "mtp_heads", "ffn": "mtp_ffn", "experts": "mtp_experts"}


@dataclasses.dataclass(frozen=True)
class MTPNames:
    """How checkpoints of a family name an MTP module's own tensors."""

    hidden_norm: str
    token_norm: str
    projection: str
    final_norm: str
    layer: str  # prefix of the decoder layer inside the module
    hidden_first: bool  # columns of the projection: [hidden | embedding], or the reverse


MIMO = MTPNames("hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm", "", True)
QWEN = MTPNames("pre_fc_norm_hidden", "pre_fc_norm_embedding", "fc", "norm", "layers.0.", False)
STREAM_MIXER = "hyper_connection_mixer."
DEEPSEEK = MTPNames("hnorm", "enorm", "eh_proj", "shared_head.norm", "", False)


class MTPModule(nnx.Module):
    """One MTP module; recycling its own output predicts further tokens (drafts 2, 3, ...)."""

    def __init__(self, config: ModelConfig, kind: LayerKind, dtype: jnp.dtype, make: Make):
        d = config.hidden_size
        self.eps = config.rms_norm_eps
        self.hidden_norm = nnx.Param(make((d,), dtype))
        self.token_norm = nnx.Param(make((d,), dtype))
        self.input_proj = nnx.Param(make((d, 2 * d), dtype))
        self.layer = DecoderLayer(config, kind, dtype, make)
        self.final_norm = nnx.Param(make((d,), dtype))

    def __call__(
        self,
        hidden: jax.Array,
        embedding: jax.Array,
        indices: jax.Array | None,
        cache: Cache,
        around: Around,
        gather_proj: Callable[[jax.Array], jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """hidden [M, D], embedding [M, D] -> (post-norm output [M, D], positions attended to, cache).

        The output is both what the LM head takes and the `hidden` of the next draft step.
        """
        with jax.named_scope("mtp"):
            normed = [
                rms_norm(hidden, self.hidden_norm[...], self.eps),
                rms_norm(embedding, self.token_norm[...], self.eps),
            ]
            x = linear(jnp.concatenate(normed, axis=-1), self.input_proj[...])
            x = x if gather_proj is None else gather_proj(x)
            x, indices, cache = self.layer(x, indices, cache, around)
            return rms_norm(x, self.final_norm[...], self.eps), indices, cache

    def to_head(self, output: jax.Array) -> jax.Array:
        """What the LM head takes, [M, D], of the module's output."""
        return output


class StreamMTPModule(nnx.Module):
    """The module of a model with residual streams (Qwen4Exp): two projections, whose products are added.

    It takes the target's streams as they are before the final mixer, and its output are streams again.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, dtype: jnp.dtype, make: Make):
        self.eps = config.rms_norm_eps
        shapes = {leaf.path[0]: leaf for leaf in _stream_leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(shapes[name].shape, shapes[name].dtype or dtype))

        self.hidden_norm, self.token_norm = parameter("hidden_norm"), parameter("token_norm")
        self.hidden_proj, self.token_proj = parameter("hidden_proj"), parameter("token_proj")
        self.layer = DecoderLayer(config, kind, dtype, make)
        self.mixer = StreamMixer(config, dtype, make)

    def __call__(
        self,
        hidden: jax.Array,
        embedding: jax.Array,
        indices: jax.Array | None,
        cache: Cache,
        around: Around,
        gather_proj: Callable[[jax.Array], jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """hidden [M, S D], embedding [M, D] -> (streams [M, S D], positions attended to, cache)."""
        with jax.named_scope("mtp"):
            m, d = embedding.shape
            normed = rms_norm(hidden, self.hidden_norm[...], self.eps)  # over all streams at once
            x = linear(normed.reshape(-1, d), self.hidden_proj[...]).reshape(m, hidden.shape[1] // d, -1)
            token = rms_norm(embedding, self.token_norm[...], self.eps)
            x = (x + linear(token, self.token_proj[...])[:, None]).reshape(-1, x.shape[2])
            x = (x if gather_proj is None else gather_proj(x)).reshape(hidden.shape)
            return self.layer(x, indices, cache, around)

    def to_head(self, output: jax.Array) -> jax.Array:
        """What the LM head takes, [M, D], of the module's output."""
        return self.mixer(output)


def mtp_leaves(config: ModelConfig, kind: LayerKind, names: MTPNames) -> tuple[Leaf, ...]:
    """The weights of a module; its projection takes [hidden | embedding] in the engine."""
    d = config.hidden_size
    inner = inside("layer", (_on_head_devices(leaf, names.layer) for leaf in layer_leaves(config, kind)))
    if config.streams is not None:
        return _stream_leaves(config) + inner + inside("mixer", StreamMixer.leaves(config, STREAM_MIXER))

    def own_norm(path: str, name: str) -> Leaf:
        return norm(path, d, f"{name}.weight", config.zero_centred_norms)

    order = np.arange(2 * d) if names.hidden_first else np.roll(np.arange(2 * d), d)
    projection = reordered(f"{names.projection}.weight", (d, 2 * d), (d, 2 * d), 1, order)
    own = (
        own_norm("hidden_norm", names.hidden_norm),
        own_norm("token_norm", names.token_norm),
        never_float8(Leaf(("input_proj",), (d, 2 * d), ("mtp_out", None), (projection,))),
        own_norm("final_norm", names.final_norm),
    )
    return own + inner


def _stream_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """What a `StreamMTPModule` has before its layer."""
    d, zero_centred = config.hidden_size, config.zero_centred_norms
    return (
        norm("hidden_norm", config.residual_width, "pre_fc_norm_hidden.weight", zero_centred),
        norm("token_norm", d, "pre_fc_norm_embedding.weight", zero_centred),
        plain("hidden_proj", (d, d), ("mtp_out", None), "fc_hidden.weight"),
        plain("token_proj", (d, d), ("mtp_out", None), "fc_embedding.weight"),
    )


def _on_head_devices(leaf: Leaf, prefix: str) -> Leaf:
    axes = tuple(_HEAD_AXES.get(axis, axis) if axis else None for axis in leaf.axes)
    stored = tuple(
        dataclasses.replace(way, tensors=tuple((prefix + name, shape) for name, shape in way.tensors))
        for way in leaf.stored
    )
    return dataclasses.replace(leaf, axes=axes, stored=stored)
