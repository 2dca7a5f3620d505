"""Products with sums in fp32 whose gradients stay in the operands' type."""

import functools

import jax
import jax.numpy as jnp


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`einsum` of two arrays of one type, with an fp32 result.

    By itself JAX would keep the result's fp32 for the gradient's products, which are as large and on a GPU
    several times slower than those of the operands' bfloat16.
    """
    result = _product(equation, a, b)
    assert isinstance(result, jax.Array)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return _einsum(equation, a, b, jnp.dtype("float32"))


def _einsum(equation: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=dtype)


def _forward(equation: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(equation, a, b), (a, b)


def _backward(
    equation: str, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = kept
    _, pull = jax.vjp(lambda a, b: _einsum(equation, a, b, None), a, b)
    return pull(gradient.astype(a.dtype))


_product.defvjp(_forward, _backward)
