"""What layers report while a target or a module is trained: losses of their own."""

import jax
import jax.numpy as jnp

from mtp_jax.config import ExpertsConfig

BALANCE_WEIGHT = 0.01  # Switch Transformer's (arXiv:2101.03961, section 2.2)


class Notes:
    """Losses that layers add while they run, as sums over the token rows that count.

    Made and read inside one trace: what runs layers in a scan makes one in its body, and returns its total.

    Args:
      counted: which of the M token rows are no padding, [M] bool.
    """

    def __init__(self, counted: jax.Array):
        self._counted = counted
        self._losses: list[jax.Array] = []

    @property
    def counted(self) -> jax.Array:
        return self._counted

    @property
    def total(self) -> jax.Array:
        """The sum so far, a scalar fp32."""
        return sum(self._losses, jnp.float32(0))

    def add(self, loss: jax.Array) -> None:
        """A loss that is a sum over rows already."""
        self._losses.append(loss)

    def add_rows(self, losses: jax.Array) -> None:
        """A loss of each token row, [M]."""
        self.add(jnp.sum(jnp.where(self._counted, losses, 0.0)))

    def routed(self, logits: jax.Array, chosen: jax.Array, experts: ExpertsConfig) -> None:
        """The load-balancing loss of a mixture of experts: E sum f_e P_e, for E experts alike 1.

        f is the share of the choices that fell to an expert, P its mean share of the routers' scores
        (arXiv:2101.03961, eq. 4; DeepSeek-V3's complementary loss, arXiv:2412.19437, eq. 17 to 20, is the
        same with sigmoids). Choosing the best has no gradient: an expert that is never chosen would stay so.
        """
        scores = jax.nn.sigmoid(logits) if experts.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        live = self._counted[:, None]
        count = jnp.maximum(jnp.sum(self._counted, dtype=jnp.float32), 1.0)
        hits = jnp.any(chosen[:, :, None] == jnp.arange(experts.num_experts), axis=1) & live  # M E
        load = jnp.sum(hits, axis=0, dtype=jnp.float32) / (count * experts.per_token)
        mean = jnp.sum(jnp.where(live, shares, 0.0), axis=0) / count
        balance = experts.num_experts * jnp.sum(jax.lax.stop_gradient(load) * mean)
        self.add(BALANCE_WEIGHT * balance * count)
