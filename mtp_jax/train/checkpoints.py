"""Orbax checkpoints of a run: weights, optimiser state and the number of updates, which is also the place
in the data. A run that was killed goes on from the last one."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from mtp_jax.train.step import TrainState


class Checkpoints:
    """The checkpoints of one run, below `folder`; the last two are kept. Writing is in the background."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """Updates in the last checkpoint that was written whole; None before the first."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Copies the state to the host before it returns: its buffers may be donated at once."""
        if self.latest != step:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState:
        """The last checkpoint, placed as `like` is."""
        step = self.latest
        assert step is not None
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        state = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        assert isinstance(state, TrainState)
        return state

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()
