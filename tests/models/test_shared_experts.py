"""Experts that replicas share: tokens of all meet at the experts' devices, and come back to their own."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtp_jax.config import ExpertsConfig
from mtp_jax.models.ffn import Experts
from mtp_jax.models.layers import UNSPLIT, Around, SumOver
from sharding.mesh import DATA, TENSOR, make_mesh
from sharding.placement import make_placement
from tests.parity.rig import TINY

EXPERTS = ExpertsConfig(num_experts=8, per_token=2, width=16, shared_width=20, sparse=(True,))
MODEL = dataclasses.replace(TINY, experts=EXPERTS)
TOLERANCE = 2e-5  # float32 sums over 32 features and two experts, in another order


def weights(bias: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """By shape: no two of them have the same."""
    rng, shapes = np.random.default_rng(0), [leaf.shape for leaf in Experts.leaves(MODEL)]
    assert len(set(shapes)) == len(shapes)
    drawn = {shape: rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5 for shape in shapes}
    return drawn | {(EXPERTS.num_experts,): bias}


def run(
    leaves: dict[tuple[int, ...], jax.Array],
    x: jax.Array,
    sum_ffn: SumOver = UNSPLIT,
    sum_experts: SumOver = UNSPLIT,
) -> jax.Array:
    """The layer over the rows of x, with the devices' own parts of the leaves."""
    module = Experts(MODEL, jnp.dtype("float32"), lambda shape, dtype: leaves[tuple(shape)])
    nothing = cast(Any, None)  # rotation and attention, which an ffn does not ask for
    return module(x, Around(nothing, nothing, sum_ffn=sum_ffn, sum_experts=sum_experts))


@pytest.mark.parametrize("rows", [5, 40])  # all experts on all tokens; tokens sorted by expert
@pytest.mark.parametrize("favourites", [(), (6, 7), (0,)])
def test_the_same_as_on_one_device(rows: int, favourites: tuple[int, ...]) -> None:
    """Also where all tokens choose the experts of one device: none is dropped."""
    bias = np.zeros(EXPERTS.num_experts, np.float32)
    bias[list(favourites)] = 100
    drawn, rng = weights(bias), np.random.default_rng(1)
    x = rng.standard_normal((2 * rows, MODEL.hidden_size)).astype(np.float32)
    mesh = make_mesh(1, 2, 2)
    placement = make_placement(mesh, {}, frozenset({"experts"}))
    specs = {leaf.shape: placement.spec(*leaf.axes) for leaf in Experts.leaves(MODEL)}
    assert specs[8, 32, 16] == P((DATA, TENSOR), None, None)
    sums = SumOver((TENSOR,)), SumOver((DATA, TENSOR), rows=(DATA,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(DATA)), out_specs=P(DATA))
    def shared(leaves: dict[tuple[int, ...], jax.Array], x: jax.Array) -> jax.Array:
        return run(leaves, x, *sums)

    wanted = run(jax.tree.map(jnp.asarray, drawn), jnp.asarray(x))
    np.testing.assert_allclose(jax.jit(shared)(drawn, x), wanted, rtol=TOLERANCE, atol=TOLERANCE)
