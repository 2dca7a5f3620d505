"""What speculation did meanwhile: from a server's /metrics, or from the engine's counters."""

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from mtp_jax.engine.stats import EngineStats

_NAME = "spec_decode_num_"


@dataclasses.dataclass(frozen=True)
class SpeculationCounts:
    """Counters, of which the growth over a benchmark matters. Rounds without drafts are in none of them."""

    num_drafts: int  # rounds that verified drafts
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """What was counted after `before`."""
        early = before.accepted_per_position + (0,) * len(self.accepted_per_position)
        return SpeculationCounts(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, early, strict=False)),
        )

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round, the target's own included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def rate_per_position(self) -> tuple[float, ...]:
        """Share of the rounds in which the draft at this position, and so all before it, stood."""
        return tuple(
            count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position
        )

    def as_json(self) -> dict[str, object]:
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_per_position": list(self.rate_per_position),
        }


def from_engine(stats: EngineStats) -> SpeculationCounts:
    """The counters of an engine in this process."""
    return SpeculationCounts(
        stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_accepted_per_position
    )


@dataclasses.dataclass(frozen=True)
class Scrape:
    """What a benchmark reads of /metrics."""

    num_unfinished: int  # requests that run or wait
    speculation: SpeculationCounts | None  # None where the server counts nothing of the kind


def from_metrics(text: str) -> Scrape:
    """Reads Prometheus' text, whatever the prefix (`vllm:`, `mtp_jax:`); engines and replicas are added up.

    Raises:
      ValueError: not Prometheus' text.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2]
            if name == _NAME + "accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0.0) + sample.value
            else:
                totals[name] = totals.get(name, 0.0) + sample.value
    unfinished = totals.get("num_requests_running", 0.0) + totals.get("num_requests_waiting", 0.0)
    names = [f"{_NAME}{each}_total" for each in ("drafts", "draft_tokens", "accepted_tokens")]
    if not all(name in totals for name in names):
        return Scrape(int(unfinished), None)
    per_position = tuple(int(positions.get(p, 0.0)) for p in range(max(positions, default=-1) + 1))
    counts = (int(totals[names[0]]), int(totals[names[1]]), int(totals[names[2]]))
    return Scrape(int(unfinished), SpeculationCounts(*counts, per_position))
