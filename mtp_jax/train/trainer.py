"""The loop of a training run: batches in, updates, held-out measurements, checkpoints, curves."""

import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from tqdm import tqdm

from mtp_jax.train.checkpoints import Checkpoints
from mtp_jax.train.curves import Curves, Number, summarise
from mtp_jax.train.optimizer import Schedule
from mtp_jax.train.step import (
    Loss,
    Sums,
    TrainState,
    init_state,
    make_evaluate,
    make_update,
    row_sharding,
)
from mtp_jax.train.trunk import Packed

Means = dict[str, Number | list[float]]
_IN_FLIGHT = 2  # updates dispatched before the host waits: the device is busy, the deadline is kept
_MAX_TRAIN_RECORDS = 2000


class Batch(Protocol):
    """Packed rows on the host, [B, S] each."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def segments(self) -> np.ndarray: ...
    @property
    def positions(self) -> np.ndarray: ...
    @property
    def loss_mask(self) -> np.ndarray: ...
    @property
    def greedy(self) -> np.ndarray: ...


def arrays_of(batch: Batch) -> tuple[np.ndarray, ...]:
    """In the order of `Packed`."""
    return batch.tokens, batch.segments, batch.positions, batch.loss_mask, batch.greedy


class Batches(Protocol):
    """Batches by number: a run that goes on needs no more than the number of updates."""

    def batch(self, step: int) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """How long a run is, and what it stops for on its way. Counts are updates."""

    schedule: Schedule
    micro_batches: int  # A: gradients that are added up for one update
    evaluate_every: int
    evaluate_batches: int
    checkpoint_every: int
    time_limit: float | None  # seconds, from the start of the loop


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    state: TrainState
    held_out: Means  # of the last held-out measurement
    steps: int  # updates in all, those before a resume too
    updates: int  # of this process
    seconds: float  # of this process
    tokens_per_second: float  # text tokens, of this process, without the first update (it compiles)


class Run:
    """One training run in a folder: `checkpoints/` and `curves.jsonl`."""

    def __init__(self, folder: Path, plan: RunPlan, mesh: Mesh, loss: Loss, frozen: object):
        self._folder, self._plan, self._mesh, self._frozen = folder, plan, mesh, frozen
        self._update = make_update(loss, plan.schedule, mesh)
        self._evaluate = make_evaluate(loss, mesh)
        self._record_every = max(1, plan.schedule.steps // _MAX_TRAIN_RECORDS)

    def __call__(self, params: optax.Params, train: Batches, held_out: Batches) -> Outcome:
        """Trains from `params`, or from the folder's last checkpoint, until steps or time are over."""
        begin = time.monotonic()
        state = init_state(params, self._plan.schedule, self._mesh)
        with contextlib.closing(Checkpoints(self._folder / "checkpoints")) as checkpoints:
            step = checkpoints.latest or 0
            if step:
                state = checkpoints.restore(state)
            first = step
            curves = Curves(self._folder / "curves.jsonl", first)
            with tqdm(total=self._plan.schedule.steps, initial=step, unit="update", file=sys.stderr) as bar:
                progress = _Progress(curves, bar, self._record_every)
                state, step, speed = self._loop(state, step, train, held_out, checkpoints, progress)
                means = self.measure(state.best, held_out)
                progress.measured(step, means)
        return Outcome(state, means, step, step - first, time.monotonic() - begin, speed)

    def _loop(
        self,
        state: TrainState,
        step: int,
        train: Batches,
        held_out: Batches,
        checkpoints: Checkpoints,
        progress: "_Progress",
    ) -> tuple[TrainState, int, float]:
        """Returns the last state, its number of updates, and tokens a second."""
        plan, steps = self._plan, self._plan.schedule.steps
        begin = warm = time.monotonic()
        first, tokens = step, 0
        while step < steps:
            if plan.time_limit is not None and time.monotonic() - begin > plan.time_limit:
                tqdm.write(f"The time limit of {plan.time_limit:g} s ends it after {step} updates.")
                break
            batch = train.batch(step)
            state, sums = self._update(state, self._frozen, self._place(batch))
            step += 1
            progress.updated(step, sums)
            if step == first + 1:  # it was compiled
                progress.wait(0)
                warm = time.monotonic()
            else:
                tokens += int(np.count_nonzero(batch.segments))
            if step % plan.evaluate_every == 0 and step < steps:
                progress.wait(0)
                progress.measured(step, self.measure(state.best, held_out))
            if step % plan.checkpoint_every == 0 and step < steps:
                progress.wait(0)  # a run that goes on from here does not do these again
                checkpoints.save(step, state)
        progress.wait(0)
        speed = tokens / max(time.monotonic() - warm, 1e-9)
        checkpoints.save(step, state)
        return state, step, speed

    def measure(self, params: object, held_out: Batches) -> Means:
        """Loss and acceptance on the held-out batches."""
        totals: dict[str, np.ndarray] = {}
        for number in range(self._plan.evaluate_batches):
            sums = self._evaluate(params, self._frozen, self._place(held_out.batch(number)))
            for name, value in sums.items():
                totals[name] = totals.get(name, np.zeros(value.shape)) + np.asarray(value, np.float64)
        return summarise(totals)

    def _place(self, batch: Batch) -> Packed:
        """Rows [B, S] as micro-batches [A, B / A, S], spread over the devices."""
        sharding = row_sharding(self._mesh)

        def place(x: np.ndarray) -> jax.Array:
            return jax.device_put(x.reshape(self._plan.micro_batches, -1, x.shape[-1]), sharding)

        return Packed(*map(place, arrays_of(batch)))


class _Progress:
    """Records and shows what updates came to, some updates behind, so that the device does not wait."""

    def __init__(self, curves: Curves, bar: tqdm, every: int):
        self._curves, self._bar, self._every = curves, bar, every
        self._pending: collections.deque[tuple[int, Sums]] = collections.deque()

    def updated(self, step: int, sums: Sums) -> None:
        """An update was dispatched: waits for the one that is `_IN_FLIGHT` before it."""
        self._pending.append((step, sums))
        self.wait(_IN_FLIGHT)

    def wait(self, in_flight: int) -> None:
        """Waits until no more than `in_flight` updates are not done; one record in `every` is written."""
        while len(self._pending) > in_flight:
            step, sums = self._pending.popleft()
            host = jax.device_get(sums)
            self._bar.update()
            if step % self._every == 0:
                self._curves.add("train", step, summarise(host))

    def measured(self, step: int, means: Means) -> None:
        """A held-out measurement after `step` updates."""
        self._curves.add("held_out", step, means)
        self._bar.set_postfix_str(_progress(means))


def _progress(means: Means) -> str:
    """`loss 1.203  accepted 71 45 27 %  length 2.43`, of held-out data."""
    losses, accepted = means["loss"], means["accepted"]
    assert isinstance(losses, list) and isinstance(accepted, list)
    text = f"held out: loss {_mean(losses):.3f}, accepted {_percents(accepted)} %"
    greedy = means.get("accepted_greedy")
    if isinstance(greedy, list) and means["greedy_lines"]:
        text += f" (of greedy text {_percents(greedy)} %)"
    return f"{text}, length {means['accepted_length']:.2f}"


def _percents(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.1f}" for share in shares)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
