"""The result: a table for people, JSON for programs."""

import dataclasses
import json
from collections.abc import Sequence

from mtp_jax.bench.acceptance import SpeculationCounts
from mtp_jax.bench.circumstances import circumstances, load_average, machine_and_versions
from mtp_jax.bench.records import PERCENTILES, Distribution, Record, summarize

PACKAGES = ("jax", "jaxlib", "httpx")
LABELS = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "inter-token latency",
    "time_per_output_token": "time per output token",
    "end_to_end": "end to end",
}
_WIDTH = 10
_LABEL = 23


@dataclasses.dataclass(frozen=True)
class Report:
    """One benchmark."""

    mode: str  # serve or offline
    model: str
    target: str  # how the model was reached
    device: str | None  # where the engine ran, if that is known here
    settings: dict[str, object]
    records: Sequence[Record]
    speculation: SpeculationCounts | None

    def as_json(self) -> str:
        """Everything, every request included; times are seconds."""
        summary = summarize(self.records)
        first = min((record.sent for record in self.records), default=0.0)
        prompt, output = summary.num_prompt_tokens, summary.num_output_tokens
        values = {
            "mode": self.mode,
            "model": self.model,
            "target": self.target,
            "device": self.device,
            "circumstances": machine_and_versions(PACKAGES),
            "settings": self.settings,
            "requests": {"completed": summary.num_completed, "failed": summary.num_failed},
            "failures": summary.failures,
            "seconds": summary.seconds,
            "tokens": {"prompt": prompt, "output": output, "from_usage": summary.has_usage},
            "throughput": {
                "requests_per_second": summary.rate(summary.num_completed),
                "output_tokens_per_second": summary.rate(output),
                "total_tokens_per_second": summary.rate(prompt + output),
            },
            "latency_seconds": {name: found and found.as_json() for name, found in summary.latencies.items()},
            "speculation": self.speculation and self.speculation.as_json(),
            "per_request": [record.as_json(first) for record in self.records],
        }
        return json.dumps(values, indent=1, default=str) + "\n"

    def table(self) -> str:
        """A few lines; latencies in milliseconds."""
        summary = summarize(self.records)
        prompt, output = summary.num_prompt_tokens, summary.num_output_tokens
        each, out, all_ = map(summary.rate, (summary.num_completed, output, prompt + output))
        counted = "" if summary.has_usage else " (the server sends no usage: chunks are taken for tokens)"
        lines = [
            *circumstances(self.device, PACKAGES),
            load_average(),
            "",
            f"{self.model} {self.target}",
            _line(
                "requests",
                f"{summary.num_completed} completed, {summary.num_failed} failed, {summary.seconds:.2f} s",
            ),
            _line("tokens", f"{prompt} prompt, {output} output{counted}"),
            _line(
                "throughput", f"{each:.2f} requests/s, {out:.1f} output tokens/s, {all_:.1f} total tokens/s"
            ),
            _line("latency, ms", "".join(f"{name:>{_WIDTH}}" for name in _columns())),
        ]
        lines += [_line("  " + LABELS[name], _row(d)) for name, d in summary.latencies.items()]
        lines.append(_line("acceptance", _acceptance(self.speculation)))
        lines += [f"failed: {count} x {reason}" for reason, count in summary.failures.items()]
        return "\n".join(lines)


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}} {text}"


def _columns() -> list[str]:
    return ["mean", *(f"p{percentile}" for percentile in PERCENTILES)]


def _row(found: Distribution | None) -> str:
    if found is None:
        return f"{'-':>{_WIDTH}}" * len(_columns())
    return "".join(f"{1000 * seconds:>{_WIDTH}.2f}" for seconds in (found.mean, *found.percentiles))


def _acceptance(counts: SpeculationCounts | None) -> str:
    if counts is None:
        return "the server does not say"
    if not counts.num_drafts:
        return "nothing was drafted"
    rates = ", ".join(f"{rate:.1%}" for rate in counts.rate_per_position)
    parts = [f"by position {rates}", f"of all drafts {counts.acceptance_rate:.1%}"]
    return "; ".join([*parts, f"accepted length {counts.mean_accepted_length:.2f}"])
