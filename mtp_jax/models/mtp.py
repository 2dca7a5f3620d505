"""MiMo's multi-token-prediction module: two norms, a projection, one decoder layer, a final norm.

For position p it takes the target's hidden state h_p (after the target's final norm) and the next
token's embedding E[t_{p+1}], and its output, through the target's own LM head, predicts t_{p+2}.
The projection takes [hidden | embedding] in this order (MiMo; DeepSeek's is the reverse).
Embedding and LM head are the target's, handed in, and are never stored twice.
vLLM zeroes the embedding at position 0; the published modelling code does not, and neither do we.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ModelConfig
from mtp_jax.models.layers import UNSPLIT, Attend, DecoderLayer, KVCache, Rope, SumOver, linear, rms_norm


class MimoMTP(nnx.Module):
    """One MTP module; recycling its own output predicts further tokens (drafts 2, 3, ...)."""

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, make: Callable[[tuple[int, ...], jnp.dtype], jax.Array]
    ):
        d = config.hidden_size
        self.eps = config.rms_norm_eps
        self.hidden_norm = nnx.Param(make((d,), dtype))
        self.token_norm = nnx.Param(make((d,), dtype))
        self.input_proj = nnx.Param(make((d, 2 * d), dtype))
        self.layer = DecoderLayer(config, dtype, make)
        self.final_norm = nnx.Param(make((d,), dtype))

    def __call__(
        self,
        hidden: jax.Array,
        embedding: jax.Array,
        cache: KVCache,
        rope: Rope,
        attend: Attend,
        gather_proj: Callable[[jax.Array], jax.Array] | None = None,
        reduce_attention: SumOver = UNSPLIT,
        reduce_ffn: SumOver = UNSPLIT,
        kernels: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """hidden [M, D], embedding [M, D] -> (post-norm output [M, D], cache).

        The output is both what the LM head takes and the `hidden` of the next draft step.
        """
        with jax.named_scope("mtp"):
            normed = [
                rms_norm(hidden, self.hidden_norm[...], self.eps),
                rms_norm(embedding, self.token_norm[...], self.eps),
            ]
            x = linear(jnp.concatenate(normed, axis=-1), self.input_proj[...])
            x = x if gather_proj is None else gather_proj(x)
            x, cache = self.layer(x, cache, rope, attend, reduce_attention, reduce_ffn, kernels)
            return rms_norm(x, self.final_norm[...], self.eps), cache
