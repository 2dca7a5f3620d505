"""Products of float8 weights are those of the weights that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.models.ffn import FEW_ROWS, experts_ffn
from mtp_jax.models.layers import linear, product
from mtp_jax.models.scaled import BlockScaled

GROUP = 16


def drawn(*shape: int, group: int = GROUP) -> tuple[BlockScaled, np.ndarray]:
    """A weight, and what it stands for: rounded to bfloat16, in float32."""
    rng = np.random.default_rng(sum(shape))
    codes = jnp.asarray(rng.normal(size=shape) * 50, jnp.float32).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(0.001, 0.01, (*shape[:-1], -(-shape[-1] // group))).astype(np.float32)
    columns = np.arange(shape[-1]) // group
    twin = np.asarray(codes).astype(np.float32) * scales[..., columns]
    return BlockScaled(codes, jnp.asarray(scales), group), twin.astype(jnp.bfloat16).astype(np.float32)


def rows(count: int, width: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(count).normal(size=(count, width)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [64, 40])  # 40: the last group has 8
@pytest.mark.parametrize("count", [3, 20])
def test_products(dtype: str, columns: int, count: int) -> None:
    weight, twin = drawn(6, 4, columns)
    x, plain = rows(count, columns, dtype), jnp.asarray(twin, dtype)
    got, expected = (jax.jit(product, static_argnums=0)("md,ehd->emh", x, one) for one in (weight, plain))
    np.testing.assert_allclose(got.astype("float32"), expected.astype("float32"), **near(dtype))
    got, expected = jax.jit(linear)(x, weight), jax.jit(linear)(x, plain)
    assert got.shape == (count, 6, 4) and got.dtype == x.dtype
    np.testing.assert_allclose(got.astype("float32"), expected.astype("float32"), **near(dtype))


def near(dtype: str) -> dict[str, float]:
    """The same values are multiplied; sums of up to 64 may have another order, and are rounded once."""
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 2**-7, "atol": 2**-7}


@pytest.mark.parametrize("count", [8, FEW_ROWS + 16])  # every expert for every row; rows sorted by expert
def test_experts(count: int) -> None:
    e, f, d, j = 4, 32, 48, 2
    (gate_up, plain_gate_up), (down, plain_down) = drawn(e, 2, f, d), drawn(e, d, f)
    x = rows(count, d, "float32")
    rng = np.random.default_rng(1)
    chosen = jnp.asarray(rng.integers(-1, e + 1, (count, j)), jnp.int32)  # the outer ones: another device's
    shares = jnp.asarray(rng.uniform(size=(count, j)), jnp.float32)
    run = jax.jit(experts_ffn)
    got = run(x, chosen, shares, gate_up, down)
    expected = run(x, chosen, shares, jnp.asarray(plain_gate_up), jnp.asarray(plain_down))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4 * float(np.abs(expected).max()))


def test_shapes() -> None:
    """Columns of heads join into a row's, as those of an output projection."""
    weight, twin = drawn(8, 2, 32)
    flat = weight.reshape(8, -1)
    assert flat.shape == (8, 64) and flat.scales.shape == (8, 4)
    x = rows(5, 64, "float32")
    expected = linear(x, jnp.asarray(twin.reshape(8, 64)))
    np.testing.assert_allclose(linear(x, flat), expected, rtol=1e-5, atol=1e-5)
    ragged, _ = drawn(8, 2, 40)
    with pytest.raises(AssertionError):
        ragged.reshape(8, -1)
