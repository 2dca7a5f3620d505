"""What process 0 tells the others to do, as messages: compile this, launch that."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mtp_jax.engine.buckets import Bucket, Report, Sampling
from mtp_jax.engine.channel import Message
from mtp_jax.engine.plan_arrays import GuidedRows, PlanChanges
from mtp_jax.engine.shaping_state import ShapingState

COMPILE, LAUNCH = "compile", "launch"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One dispatch: the executable, what changed in the plan, and requests to install for shaping."""

    bucket: Bucket
    changes: PlanChanges
    installations: Sequence[tuple[int, ShapingState]] = ()  # (slot, its rows, on the host)

    def encode(self) -> Message:
        parts: dict[str, Mapping[str, np.ndarray]] = {"plan": self.changes.fields}
        if self.changes.chunks is not None:
            parts["chunks"] = self.changes.chunks
        if self.changes.guided is not None:
            parts["guided"] = vars(self.changes.guided)
        for index, (_, rows) in enumerate(self.installations):
            parts[f"install{index}"] = {name: np.asarray(array) for name, array in vars(rows).items()}
        arrays = {f"{part} {name}": array for part, named in parts.items() for name, array in named.items()}
        slots = [slot for slot, _ in self.installations]
        return Message(LAUNCH, {"bucket": bucket_fields(self.bucket), "slots": slots}, arrays)

    @classmethod
    def decode(cls, message: Message) -> "Launch":
        parts: dict[str, dict[str, np.ndarray]] = {"plan": {}}
        for key, array in message.arrays.items():
            part, name = key.split(" ")
            parts.setdefault(part, {})[name] = array
        slots = message.fields["slots"]
        assert isinstance(slots, list)
        rows = [ShapingState(**parts[f"install{index}"]) for index in range(len(slots))]  # pyright: ignore[reportArgumentType]
        guided = GuidedRows(**parts["guided"]) if "guided" in parts else None
        changes = PlanChanges(parts["plan"], parts.get("chunks"), guided)
        return cls(read_bucket(message), changes, list(zip(slots, rows, strict=True)))


def compile_order(bucket: Bucket) -> Message:
    """Asks for an executable. The answer has the same fields, and an `error` where there is one."""
    return Message(COMPILE, {"bucket": bucket_fields(bucket)})


def bucket_fields(bucket: Bucket) -> dict[str, int]:
    """A bucket as JSON has it."""
    return {name: int(value) for name, value in vars(bucket).items()}


def read_bucket(message: Message) -> Bucket:
    """The bucket that a message names."""
    fields = message.fields["bucket"]
    assert isinstance(fields, dict)
    sizes = {name: int(value) for name, value in fields.items()}
    sampling, report = Sampling(sizes.pop("sampling")), Report(sizes.pop("report"))
    return Bucket(**sizes, sampling=sampling, report=report)
