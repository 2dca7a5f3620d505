"""One optimiser update as one jitted program: gradients over micro-batches and devices, metrics.

Weights are fp32 and whole on every device; losses cast them. Rows are spread over the mesh's data axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.train.optimizer import Schedule
from mtp_jax.train.trunk import Packed
from sharding.mesh import DATA

Sums = dict[str, jax.Array]  # sums over rows; "weight" is what the loss and the gradient are divided by


class Loss[Trained, Fixed](Protocol):
    """A loss as a sum over rows [B, S], so that micro-batches and devices add up."""

    def __call__(self, params: Trained, frozen: Fixed, rows: Packed) -> tuple[jax.Array, Sums]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update takes and gives back (donated)."""

    params: optax.Params  # fp32
    average: optax.Params | None  # moving average of `params`, if one is kept
    optimizer: optax.OptState
    step: jax.Array  # int32: updates so far, which is also the position in the data

    @property
    def best(self) -> optax.Params:
        """What is measured and exported."""
        return self.params if self.average is None else self.average


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, P())


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Batches [A, B, S]: micro-batches, rows over devices, positions."""
    return NamedSharding(mesh, P(None, DATA))


def init_state(params: optax.Params, schedule: Schedule, mesh: Mesh) -> TrainState:
    """The state before the first update."""
    average = jax.tree.map(jnp.copy, params) if schedule.ema else None  # a copy: both are donated
    optimizer = schedule.transformation().init(params)
    state = TrainState(params, average, optimizer, jnp.zeros((), jnp.int32))
    return jax.device_put(state, replicated(mesh))


Update = Callable[[TrainState, object, Packed], tuple[TrainState, Sums]]
Evaluate = Callable[[object, object, Packed], Sums]


def make_update(loss: Loss, schedule: Schedule, mesh: Mesh) -> Update:
    """(state, frozen, rows [A, B, S]) -> (state, sums over the batch with grad_norm and learning_rate)."""
    optimizer, rate = schedule.transformation(), schedule.rate()

    def gradients(params: object, frozen: object, batch: Packed) -> tuple[object, Sums]:
        """This device's rows, one micro-batch after another, then summed over devices."""

        def add(total: object, rows: Packed) -> tuple[object, Sums]:
            found, sums = jax.grad(loss, has_aux=True)(params, frozen, rows)
            return jax.tree.map(jnp.add, total, found), sums

        total, sums = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        return jax.lax.psum((total, sums), DATA)

    spread = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P(), P(), P(None, DATA)), out_specs=P(), check_vma=False
    )

    def update(state: TrainState, frozen: object, batch: Packed) -> tuple[TrainState, Sums]:
        total, sums = spread(state.params, frozen, batch)
        mean = jax.tree.map(lambda x: x / jnp.maximum(sums["weight"], 1.0), total)
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies by its integer counts
            changes, optimizer_state = optimizer.update(mean, state.optimizer, state.params)
            params = optax.apply_updates(state.params, changes)
            speed = jnp.asarray(rate(state.step), jnp.float32)
            keep = schedule.averaged(state.step)
            average = state.average
            if average is not None:
                average = jax.tree.map(lambda mean, new: new + keep * (mean - new), average, params)
        sums = sums | {"grad_norm": optax.tree.norm(mean), "learning_rate": speed}
        return TrainState(params, average, optimizer_state, state.step + 1), sums

    return jax.jit(update, donate_argnums=0)


def make_evaluate(loss: Loss, mesh: Mesh) -> Evaluate:
    """(params, frozen, rows [A, B, S]) -> sums over the batch."""

    def evaluate(params: object, frozen: object, batch: Packed) -> Sums:
        sums = jax.lax.map(lambda rows: loss(params, frozen, rows)[1], batch)
        return jax.lax.psum(jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), DATA)

    spread = jax.shard_map(
        evaluate, mesh=mesh, in_specs=(P(), P(), P(None, DATA)), out_specs=P(), check_vma=False
    )
    return jax.jit(spread)
