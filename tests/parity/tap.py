"""Looks at the logits inside an engine's own program, by host callbacks that are compiled into it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from mtp_jax.engine.head import Head
from sharding.placement import HEAD_AXES


@dataclasses.dataclass
class Row:
    """One row that was verified: T = K + 1 columns, of which `accepted` + 1 emitted a token."""

    drafts: np.ndarray  # K
    tokens: np.ndarray  # T
    accepted: int
    parts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    draft_parts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def logits(self) -> np.ndarray:
        """[T, V]"""
        return np.concatenate([self.parts[device] for device in sorted(self.parts)], axis=-1)

    @property
    def draft_logits(self) -> np.ndarray:
        """[K, V] log q up to a constant, where the engine keeps it."""
        return np.concatenate([self.draft_parts[device] for device in sorted(self.draft_parts)], axis=-1)


class Tap:
    """What came out. A generation is a request: the n-th that a fresh engine admitted has generation n."""

    def __init__(self):
        self._rows: dict[tuple[int, int], Row] = {}
        self._prompt: dict[tuple[int, int], dict[int, np.ndarray]] = {}

    @property
    def rows(self) -> dict[tuple[int, int], Row]:
        """Verified rows by (generation, position of the row's first input token)."""
        jax.effects_barrier()
        return self._rows

    def prompt_logits(self, generation: int, length: int) -> np.ndarray:
        """Logits [length, V] at the positions of a prompt."""
        jax.effects_barrier()
        found = [self._prompt[generation, position] for position in range(length)]
        return np.stack([np.concatenate([parts[d] for d in sorted(parts)]) for parts in found])

    def clear(self) -> None:
        jax.effects_barrier()
        self._rows.clear()
        self._prompt.clear()

    def see_rows(self, device, generation, start, valid, drafts, tokens, accepted, logits, kept) -> None:
        for b in np.flatnonzero(valid):
            key = (int(generation[b]), int(start[b]))
            row = self._rows.setdefault(key, Row(drafts[b], tokens[b], int(accepted[b])))
            row.parts[int(device)] = np.asarray(logits[b])
            if kept is not None:
                row.draft_parts[int(device)] = np.asarray(kept[b])

    def see_chunk(self, device, generation, start, count, valid, logits) -> None:
        for column in range(int(count) if valid else 0):
            parts = self._prompt.setdefault((int(generation), int(start) + column), {})
            parts[int(device)] = np.asarray(logits[column])


@contextmanager
def tapped() -> Iterator[Tap]:
    """Engines compiled inside report to the tap, for as long as they live."""
    tap, verify, call = Tap(), Head._verify, Head.__call__

    def seen_verify(self: Head, slots, rows, hidden):
        tokens, accepted, reports = verify(self, slots, rows, hidden)
        b, t, d = hidden.shape
        logits = self.vocabulary.logits(hidden.reshape(b * t, d)).reshape(b, t, -1)
        kept = None if slots.draft_logits is None else slots.draft_logits[rows.slot]
        device = jax.lax.axis_index(HEAD_AXES)
        fields = (
            device,
            rows.generation,
            rows.start,
            rows.valid,
            rows.drafts,
            tokens,
            accepted,
            logits,
            kept,
        )
        jax.debug.callback(tap.see_rows, *fields)
        return tokens, accepted, reports

    def seen_call(self: Head, slots, mtp_cache, rows, chunk, hidden, lane_hidden):
        if chunk is not None:
            normed = self.final_norm(lane_hidden)
            device = jax.lax.axis_index(HEAD_AXES)
            generation = self.plan.generation[chunk.slot]
            fields = (device, generation, chunk.start, chunk.count, chunk.valid)
            jax.debug.callback(tap.see_chunk, *fields, self.vocabulary.logits(normed))
        return call(self, slots, mtp_cache, rows, chunk, hidden, lane_hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Head, "_verify", seen_verify)
        patch.setattr(Head, "__call__", seen_call)
        yield tap
