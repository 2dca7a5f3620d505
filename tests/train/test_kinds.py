"""What layers learn beside the model's own loss, and delta nets over packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.config import ExpertsConfig
from mtp_jax.models.delta import DeltaInputs, DeltaWeights
from mtp_jax.models.delta_net import DeltaHeads
from mtp_jax.train import recurrence
from mtp_jax.train.attention import PackedAttention, causal_mask
from mtp_jax.train.notes import BALANCE_WEIGHT, Notes
from mtp_jax.train.optimizer import decayed, matrix_axes

EXPERTS = ExpertsConfig(num_experts=4, per_token=2, width=8, shared_width=0, sparse=(True,))


def balance(logits: np.ndarray, chosen: np.ndarray, counted: np.ndarray) -> float:
    notes = Notes(jnp.asarray(counted))
    notes.routed(jnp.asarray(logits, jnp.float32), jnp.asarray(chosen), EXPERTS)
    return float(notes.total) / (BALANCE_WEIGHT * counted.sum())


def test_balance_is_one_where_all_experts_are_used_alike_and_more_elsewhere() -> None:
    even = np.array([[0, 1], [2, 3], [1, 2], [3, 0]])
    assert balance(np.zeros((4, 4)), even, np.ones(4, bool)) == pytest.approx(1)
    logits = np.array([[9.0, 9, -9, -9]] * 4)
    assert balance(logits, np.array([[0, 1]] * 4), np.ones(4, bool)) == pytest.approx(2, rel=1e-3)
    padded = np.array([True, True, False, False])  # padding counts for nothing
    assert balance(logits, np.array([[0, 1]] * 4), padded) == pytest.approx(2, rel=1e-3)


def test_balance_pushes_the_router_away_from_what_is_overused() -> None:
    def loss(logits: jax.Array) -> jax.Array:
        notes = Notes(jnp.ones(4, bool))
        notes.routed(logits, jnp.asarray([[0, 1]] * 4), EXPERTS)
        return notes.total

    gradient = np.asarray(jax.grad(loss)(jnp.zeros((4, 4))))
    assert (gradient[:, :2] > 0).all() and (gradient[:, 2:] < 0).all()


def indexed(q_index: jax.Array, seed: int = 0) -> jax.Array:
    """The loss of an indexer of one head whose queries are these [1 * 6, 1, 4]; attention prefers itself."""
    rng = np.random.default_rng(seed)
    row = jnp.asarray(rng.standard_normal((6, 4)), jnp.float32)
    notes = Notes(jnp.ones(6, bool))
    attend = PackedAttention(causal_mask(jnp.ones((1, 6), jnp.int32)), "xla", notes)
    nothing = jnp.zeros((0, 6, 4))
    places, _ = attend.select(q_index, jnp.ones((6, 1)), row, nothing, 2)
    attend.latent(3 * row[:, None], row, nothing, 1.0, 2, places, False)
    return notes.total


def test_an_indexer_learns_where_attention_looks() -> None:
    """Its loss is a divergence: never below 0, and gradient steps make it smaller.

    By a third here: one head whose scores are never negative cannot say all that attention does.
    """
    q = jnp.asarray(np.random.default_rng(1).standard_normal((6, 1, 4)), jnp.float32)
    losses, step = [], jax.jit(jax.value_and_grad(indexed))
    for _ in range(60):
        loss, gradient = step(q)
        losses.append(float(loss))
        q = q - 0.3 * gradient
    assert min(losses) >= 0 and losses[-1] < 2 / 3 * losses[0]


def test_a_delta_net_starts_anew_in_each_segment() -> None:
    """The second segment's outputs are those of a row that has it alone, to the last bits."""
    heads = DeltaHeads(num_key_heads=1, num_value_heads=2, key_width=4, value_width=3)
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    weights = DeltaWeights(drawn(heads.num_channels, 4), drawn(2), drawn(2))
    length, first = 20, 7
    inputs = DeltaInputs(drawn(length, heads.num_channels), drawn(length, 2), drawn(length, 2))
    alone = DeltaInputs(inputs.channels[first:], inputs.b[first:], inputs.a[first:])
    both = jnp.asarray([[1] * first + [2] * (length - first)], jnp.int32)
    together = recurrence.run(causal_mask(both), inputs, weights, heads)[first:]
    apart = recurrence.run(causal_mask(both[:, first:]), alone, weights, heads)
    assert np.abs(apart).max() > 0.1
    np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-6)  # sums of decays in another order


def test_muon_knows_the_matrices_of_every_kind() -> None:
    """`o` gives its first axis, whatever else it has; stacks of layers and experts are matrices each."""
    params = {"layer.attention.o": jnp.zeros((8, 2, 4)), "layer.ffn.down": jnp.zeros((3, 8, 4))}
    params |= {"layer.attention.a_log": jnp.zeros((2, 2)), "layer.ffn.router": jnp.zeros((3, 8))}
    axes = matrix_axes(params)
    assert (axes["layer.attention.o"].reduction_axis, axes["layer.attention.o"].output_axis) == ((-2, -1), -3)
    assert (axes["layer.ffn.down"].reduction_axis, axes["layer.ffn.down"].output_axis) == (-1, -2)
    assert axes["layer.attention.a_log"] is None and axes["layer.ffn.router"] is None
    assert not decayed(params)["layer.attention.a_log"] and decayed(params)["layer.ffn.router"]
