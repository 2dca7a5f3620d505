"""Hyper-connections: several residual streams, and gates between them and each block (Qwen4Exp).

The residual of a token is S streams of D features, side by side: [M, S D]. A block reads one row [M, D], the
mean of the normalised streams times gates, and each stream takes a share of what the block makes:

    n = norm of each stream;  g = sigmoid(up(silu(down(n) / S)));  input = mean over streams of g n
    stream_s += 2 sigmoid(inject_s(n) / S) * block(input)

No norm comes before a block, and in place of a final norm there is a mixer: such gates without shares.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig, StreamsConfig
from mtp_jax.models.layers import linear, rms_norm
from mtp_jax.models.leaves import Leaf, Make, norm, plain

FINAL_MIXER = "model.hyper_connection_mixer."


class StreamMixer(nnx.Module):
    """One row of D features from all streams."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        self.count, self.eps = streams_of(config).count, config.rms_norm_eps
        leaves = {leaf.path[0]: leaf for leaf in self.leaves(config, "")}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(leaves[name].shape, leaves[name].dtype or dtype))

        self.norm, self.down, self.up = parameter("norm"), parameter("down"), parameter("up")

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [M, S D] -> [M, D]."""
        return self._mixed(self._normed(x))

    def _normed(self, x: jax.Array) -> jax.Array:
        """x [M, S D] -> [M, S D], each stream normalised for itself."""
        apart = x.reshape(x.shape[0], self.count, -1)
        return rms_norm(apart, self.norm[...].reshape(self.count, -1), self.eps).reshape(x.shape)

    def _mixed(self, normed: jax.Array) -> jax.Array:
        gates = linear(jax.nn.silu(linear(normed, self.down[...]) / self.count), self.up[...])
        gated = jax.nn.sigmoid(gates) * normed
        return jnp.mean(gated.reshape(normed.shape[0], self.count, -1), axis=1)

    @staticmethod
    def leaves(config: ModelConfig, prefix: str) -> tuple[Leaf, ...]:
        """Its weights, whole on every device; `prefix` of their names in a checkpoint."""
        streams, wide = streams_of(config), config.residual_width
        down, up = f"{prefix}input_mix_weight_down.weight", f"{prefix}input_mix_weight_up.weight"
        return (
            norm("norm", wide, f"{prefix}hc_norm.weight", config.zero_centred_norms),
            plain("down", (streams.rank, wide), (None, None), down),
            plain("up", (wide, streams.rank), (None, None), up),
        )


class HyperConnection(StreamMixer):
    """A mixer before a block, and each stream's share of what the block makes."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        super().__init__(config, dtype, make)
        self.inject = nnx.Param(make((self.count, config.residual_width), dtype))

    def enter(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [M, S D] -> (what the block reads [M, D], shares of what it makes [M, S])."""
        normed = self._normed(x)
        shares = 2 * jax.nn.sigmoid(linear(normed, self.inject[...]) / self.count)
        return self._mixed(normed), shares

    @staticmethod
    def leave(x: jax.Array, made: jax.Array, shares: jax.Array) -> jax.Array:
        """The streams x [M, S D] with their shares [M, S] of what the block made, [M, D]."""
        return x + (shares[:, :, None] * made[:, None]).reshape(x.shape)

    @staticmethod
    def leaves(config: ModelConfig, prefix: str) -> tuple[Leaf, ...]:
        """As for a mixer."""
        shape = (streams_of(config).count, config.residual_width)
        inject = plain("inject", shape, (None, None), f"{prefix}block_inject_weight.weight")
        return (*StreamMixer.leaves(config, prefix), inject)


def repeat_streams(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Embeddings [..., D] as the streams begin, [..., S D]; as they are where there is one stream."""
    if config.streams is None:
        return x
    return jnp.tile(x, (*(1 for _ in x.shape[:-1]), config.streams.count))


def streams_of(config: ModelConfig) -> StreamsConfig:
    """The model's streams."""
    assert config.streams is not None
    return config.streams
