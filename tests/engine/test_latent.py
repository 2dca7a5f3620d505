"""The indexer's choice: the kernels' way, by their references, against the engine's own code."""

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.engine import latent

PAGE = 8


@pytest.mark.parametrize(("rows", "tokens"), [(3, 2), (1, latent.SCORED + 9)], ids=["decode", "chunk"])
def test_the_kernels_way_chooses_the_same(rows: int, tokens: int) -> None:
    random = np.random.default_rng(7)
    width, heads, topk = 12, 4, 16
    cache = jnp.asarray(random.normal(size=(rows * width + 1, PAGE, 32)), jnp.float32)
    table = jnp.asarray(random.permutation(rows * width).reshape(rows, width), jnp.int32)
    q = jnp.asarray(random.normal(size=(rows * tokens, heads, 32)), jnp.float32)
    weights = jnp.asarray(random.normal(size=(rows * tokens, heads)), jnp.float32)
    last = random.integers(tokens - 1, width * PAGE, size=(rows, 1))
    positions = jnp.asarray(last - tokens + 1 + np.arange(tokens), jnp.int32)
    operands = (q, weights, cache, table, positions, topk)
    found = latent._select_by_kernels(*operands, implementation="reference")
    want = latent.select(*operands)
    assert found.shape == want.shape == (rows * tokens, topk)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(want, axis=1))
    seen = np.minimum(np.asarray(positions).reshape(-1) + 1, topk)
    np.testing.assert_array_equal((np.asarray(found) >= 0).sum(axis=1), seen)
