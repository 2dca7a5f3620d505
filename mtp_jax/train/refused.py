"""What layers of Qwen4Exp ask of an `Attend`, and the trainer does not have."""

from collections.abc import Callable

import jax

from mtp_jax.config import BlocksConfig
from mtp_jax.errors import UnsupportedHereError
from mtp_jax.models.layers import Cache


class NoBlocks:
    """Neither attention over chosen blocks nor convolutions of n-grams; `check_trainable` says so earlier."""

    def grouped_chosen(
        self, qkv: jax.Array, cache: Cache, indices: jax.Array, reused: bool
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        raise UnsupportedHereError("training of models with attention over blocks is not supported yet")

    def select_blocks(
        self,
        q: jax.Array,
        key: jax.Array,
        cache: jax.Array,
        blocks: BlocksConfig,
        block_keys: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """See `Attend`."""
        raise UnsupportedHereError("training of models with attention over blocks is not supported yet")

    def convolve(
        self, x: jax.Array, weight: jax.Array, dilation: int, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """See `Attend`."""
        raise UnsupportedHereError("training of models with n-gram embeddings is not supported yet")
