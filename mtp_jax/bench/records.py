"""What one request did, and what many of them come to.

Definitions, which are those of vLLM's `bench serve`; times are seconds and start when the request is sent:

  time to first token     to the first chunk that carries text (or the end, where none does)
  inter-token latency     between two chunks that carry text; a chunk with several tokens is one interval
  time per output token   (end to end - time to first token) / (output tokens - 1), from two tokens on
  end to end              to the last chunk of the answer
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclasses.dataclass(frozen=True)
class Record:
    """One request. Times are of one monotonic clock, in seconds."""

    sent: float
    ended: float  # the last chunk of the answer, or the failure
    chunks: tuple[float, ...] = ()  # when text came
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = True  # False: the server does not count, and chunks are taken for tokens
    error: str | None = None  # why it failed

    @property
    def first_token_seconds(self) -> float:
        return (self.chunks[0] if self.chunks else self.ended) - self.sent

    @property
    def end_to_end_seconds(self) -> float:
        return self.ended - self.sent

    @property
    def intervals(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks)]

    @property
    def seconds_per_output_token(self) -> float | None:
        """None for answers of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.end_to_end_seconds - self.first_token_seconds) / (self.num_output_tokens - 1)

    def as_json(self, start: float) -> dict[str, object]:
        """The request by itself, with every interval; `sent` counts from `start`."""
        return {
            "sent": self.sent - start,
            "time_to_first_token": self.first_token_seconds,
            "end_to_end": self.end_to_end_seconds,
            "intervals": self.intervals,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "error": self.error,
        }


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Mean and percentiles; a percentile between two values is interpolated linearly."""

    count: int
    mean: float
    percentiles: tuple[float, ...]  # as PERCENTILES

    def as_json(self) -> dict[str, float]:
        names = [f"p{percentile}" for percentile in PERCENTILES]
        return {"count": self.count, "mean": self.mean, **dict(zip(names, self.percentiles, strict=True))}


def distribution(values: Iterable[float]) -> Distribution | None:
    """None where there are no values."""
    array = np.fromiter(values, np.float64)
    if not array.size:
        return None
    found = np.percentile(array, PERCENTILES)
    return Distribution(array.size, float(array.mean()), tuple(float(value) for value in found))


@dataclasses.dataclass(frozen=True)
class Summary:
    """All requests together; failed ones are only in `failures`. Times are seconds."""

    num_completed: int
    failures: dict[str, int]  # description -> requests
    seconds: float  # from the first request sent to the last answer's end
    num_prompt_tokens: int
    num_output_tokens: int
    has_usage: bool
    latencies: dict[str, Distribution | None]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def rate(self, count: int) -> float:
        """`count` a second."""
        return count / self.seconds if self.seconds > 0 else 0.0


def summarize(records: Sequence[Record]) -> Summary:
    """The figures of all requests."""
    good = [record for record in records if record.error is None]
    failures: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            failures[record.error] = failures.get(record.error, 0) + 1
    per_token = (record.seconds_per_output_token for record in good)
    return Summary(
        num_completed=len(good),
        failures=failures,
        seconds=max(r.ended for r in good) - min(r.sent for r in good) if good else 0.0,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in good),
        num_output_tokens=sum(record.num_output_tokens for record in good),
        has_usage=all(record.has_usage for record in good),
        latencies={
            "time_to_first_token": distribution(record.first_token_seconds for record in good),
            "inter_token_latency": distribution(gap for record in good for gap in record.intervals),
            "time_per_output_token": distribution(value for value in per_token if value is not None),
            "end_to_end": distribution(record.end_to_end_seconds for record in good),
        },
    )
