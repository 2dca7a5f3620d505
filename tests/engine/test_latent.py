"""Sparse attention's XLA forms: the kernels' way of choosing against them, and what they gather at once."""

import functools

import jax
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


@pytest.mark.parametrize("context", [4096, 131072])
def test_a_long_context_makes_no_more_blocks(context: int) -> None:
    """Attention over chosen positions gathers these, not the table: 32 rows of 2048 go at once."""
    rows, chosen = 32, 2048
    shapes = (
        jax.ShapeDtypeStruct((rows, 4, 80), jnp.float32),
        jax.ShapeDtypeStruct((64, PAGE, 80), jnp.float32),
        jax.ShapeDtypeStruct((rows, context // PAGE), jnp.int32),
        jax.ShapeDtypeStruct((rows, chosen), jnp.int32),
    )
    attend = functools.partial(latent.attend_chosen, scale=1.0, width=64)
    assert "scan" not in str(jax.make_jaxpr(attend)(*shapes))
    more = (*shapes[:3], jax.ShapeDtypeStruct((rows, 4 * chosen), jnp.int32))
    assert "scan" in str(jax.make_jaxpr(attend)(*more))
