"""The curves of a run: records in a JSON-lines file, and a picture of them at the end."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from mtp_jax.train.files import write_whole

Number = float | int
Record = dict[str, Number | str | list[float]]


def summarise(sums: Mapping[str, np.ndarray]) -> dict[str, Number | list[float]]:
    """Sums over a batch as means a person reads; exact values, so that equal runs give equal lines.

    `accepted_greedy` is `accepted` of the samples that were written greedily: what greedy serving accepts.
    `accepted` is the share of all lines whose drafts 1..j are the target's best token behind the text so far,
    `accepted_sampled` of those whose drafts are the text's own tokens; `accepted_length` is one more than the
    sum of `accepted`. These two are no figures of serving: text of several temperatures is mixed in them, and
    in sampled text the tokens before a draft need not be the best ones that it was accepted behind. In all of
    them every position begins a line, while serving begins its next round where the last one ended.
    """
    lines = max(float(sums["lines"]), 1.0)
    counts = np.maximum(np.asarray(sums["counts"], np.float64), 1.0)
    accepted = [float(x) / lines for x in sums["accepted"]]
    means: dict[str, Number | list[float]] = {
        "loss": [float(x) for x in np.asarray(sums["loss"], np.float64) / counts],
        "accepted": accepted,
        "accepted_sampled": [float(x) / lines for x in sums["accepted_sampled"]],
        "accepted_length": 1.0 + sum(accepted),
        "lines": int(sums["lines"]),
    }
    if "label_loss" in sums:
        means["label_loss"] = [float(x) for x in np.asarray(sums["label_loss"], np.float64) / counts]
        greedy_lines = max(float(sums["greedy_lines"]), 1.0)
        means["accepted_greedy"] = [float(x) / greedy_lines for x in sums["accepted_greedy"]]
        means["greedy_lines"] = int(sums["greedy_lines"])
    if "main_loss" in sums:
        means["main_loss"] = float(sums["main_loss"]) / max(float(sums["main_count"]), 1.0)
    for name in ("grad_norm", "learning_rate"):
        if name in sums:
            means[name] = float(sums[name])
    return means


class Curves:
    """Appends records to a file, one of a kind and step.

    Those behind `step` are dropped: a resumed run writes them again.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = [record for record in read_curves(path) if int(record["step"]) <= step]  # type: ignore[arg-type]
        self._written = {(record["kind"], record["step"]) for record in kept}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))

    def add(
        self, kind: Literal["train", "held_out"], step: int, means: Mapping[str, Number | list[float]]
    ) -> None:
        """One record: after `step` updates. A run that had ended finds its last one there."""
        if (kind, step) in self._written:
            return
        self._written.add((kind, step))
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **means}) + "\n")


def read_curves(path: Path) -> list[Record]:
    """All whole records of a file; a line that a kill cut short is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def draw_curves(records: Sequence[Record], path: Path) -> None:
    """A PNG: losses of each step on the left, acceptance of each position on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, key, title in (
        (figure.add_subplot(1, 2, 1), "loss", "cross entropy against the target, nats"),
        (figure.add_subplot(1, 2, 2), "accepted", "drafts 1..j all the target's best token"),
    ):
        for kind, alpha, width in (("train", 0.35, 0.8), ("held_out", 1.0, 1.8)):
            chosen = [record for record in records if record["kind"] == kind]
            if not chosen:
                continue
            steps = [record["step"] for record in chosen]
            for j, values in enumerate(np.array([record[key] for record in chosen]).T):
                label = f"draft {j + 1}" + (" (held out)" if kind == "held_out" else "")
                axes.plot(steps, values, color=f"C{j}", label=label, alpha=alpha, linewidth=width)
        axes.set_title(title)
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        if records:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
