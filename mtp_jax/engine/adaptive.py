"""Automatic K: how many drafts a round pay, from measured acceptance and measured times.

With k drafts a round emits 1 + c_1 + c_1 c_2 + ... + c_1 ... c_k tokens on average, where c_j is how often
draft j stands when the ones before it did. The best k has the most tokens a second. What a round takes
depends on how many rows there are, and hardly on what is in them, so every row bucket has its own choice:
from the k that it has it tries its neighbours outward, keeps the best, and does so again now and then,
because contexts grow and acceptance drifts. k = 0 is always tried: speculation that does not pay is left.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

SETTLE = 1  # dispatches after a change of k whose times do not count: pipeline and caches refill
SAMPLES = 5  # times of a trial; their median counts
FIRST_PAUSE = 75  # dispatches until the second round of trials: the first one knows little of acceptance
PAUSE = 600  # pauses double up to this: 3 x 6 dispatches of the lesser k then cost about 1 %
HOPELESS = 1.1  # behind the best by so much: tokens / time has one peak, so what lies beyond is worse
MARGIN = 1.02  # a challenger must be this much better: times are noisy, and a change may cost compiles
MEMORY = 2000.0  # rounds after which old acceptance has lost most of its weight
PRIOR_ROUNDS, PRIOR = 4.0, 0.7  # what acceptance is taken for before there is any


class Acceptance:
    """How often each draft stands, given that those before it did; the far past counts less."""

    def __init__(self, most: int):
        self._tried = [PRIOR_ROUNDS] * most
        self._stood = [PRIOR_ROUNDS * PRIOR] * most

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One round of one request: drafts 1..num_accepted stood, the next one, if any, did not."""
        for position in range(min(num_accepted + 1, num_drafts)):
            if self._tried[position] >= MEMORY:
                self._tried[position] /= 2
                self._stood[position] /= 2
            self._tried[position] += 1
            self._stood[position] += position < num_accepted

    def tokens_a_round(self, k: int) -> float:
        """Expected tokens with k drafts, the target's own included."""
        tokens = chain = 1.0
        for tried, stood in zip(self._tried[:k], self._stood[:k], strict=True):
            chain *= stood / tried
            tokens += chain
        return tokens


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is in use for a row bucket, and why; for logs and metrics."""

    rows: int
    drafts: int
    tokens_a_second: dict[int, float]  # by k, a row: as measured so far

    def describe(self) -> str:
        """One line for people."""
        rates = ", ".join(f"K = {k}: {rate:.1f}" for k, rate in sorted(self.tokens_a_second.items()))
        return f"K = {self.drafts} for up to {self.rows} rows (tokens/s a row: {rates})"


class _Row:
    """One row bucket: its best k, and the trials under way."""

    def __init__(self, initial: int):
        self.best = initial
        self.trial: int | None = initial
        self.taken = 0  # dispatches of this trial
        self.times: dict[int, list[float]] = {}  # seconds a round by k, of this round of trials
        self.idle = 0  # dispatches since the last round of trials
        self.pause = FIRST_PAUSE  # and how many there will be
        self.offered = initial  # most drafts that a request of the last dispatch wanted

    def begin(self, trial: int | None) -> None:
        """Starts a trial, or a pause."""
        self.trial = trial
        self.taken = self.idle = 0

    @property
    def drafts(self) -> int:
        return self.best if self.trial is None else self.trial


class DraftChooser:
    """Chooses k for every dispatch.

    Args:
      most: K, the largest k.
      initial: the k to begin with.
      row_buckets: sizes that get a choice of their own.
    """

    def __init__(self, most: int, initial: int, row_buckets: Sequence[int]):
        self._most = most
        self._acceptance = Acceptance(most)
        self._rows = {rows: _Row(initial) for rows in row_buckets}
        self._decided: list[Choice] = []

    def choose(self, rows: int, offered: int) -> int:
        """The k for a dispatch of this row bucket; no request in it wants more than `offered` drafts."""
        row = self._rows[rows]
        row.offered = offered
        if row.trial is not None and row.trial > offered:  # nobody would tell how it goes
            row.best, row.times = min(row.best, offered), {}
            row.begin(row.best)
        return min(row.drafts, offered)

    def best(self, rows: int, offered: int) -> int:
        """The same outside of any trial: the best k that is known."""
        return min(self._rows[rows].best, offered)

    def cannot(self, rows: int, drafts: int) -> None:
        """There is no program for this k: its trial is over, and it was hopeless."""
        row = self._rows[rows]
        if drafts == row.trial and drafts != row.best:
            row.times[drafts] = [math.inf]
            self._advance(rows, row)

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Tells of one round of one request."""
        self._acceptance.add(num_drafts, num_accepted)

    def timed(self, rows: int, drafts: int, seconds_a_round: float) -> None:
        """Tells what the rounds of a dispatch took that ran between two others, with nothing beside them."""
        row = self._rows[rows]
        if row.trial is None:
            row.idle += 1
            if row.idle >= row.pause:
                row.pause = min(2 * row.pause, PAUSE)
                row.times = {}
                row.begin(row.best)
        elif drafts == row.trial:  # else it was launched before the trial began
            row.taken += 1
            if row.taken > SETTLE:
                row.times.setdefault(drafts, []).append(seconds_a_round)
            if row.taken == SETTLE + SAMPLES:
                self._advance(rows, row)

    def _advance(self, rows: int, row: _Row) -> None:
        """On to the next trial, or to a decision."""
        row.begin(self._next_trial(row))
        if row.trial is None:
            self._decide(rows, row)

    def _rates(self, row: _Row) -> dict[int, float]:
        """Tokens a second by k, a row, of this round of trials."""
        return {
            k: self._acceptance.tokens_a_round(k) / statistics.median(times) for k, times in row.times.items()
        }

    def _next_trial(self, row: _Row) -> int | None:
        """The next k outward from the best one, on either side until it is hopeless; and 0 always."""
        rates = self._rates(row)
        hopeless = max(rates.values()) / HOPELESS
        for step in (1, -1):
            k = row.best + step
            while k in rates and rates[k] > hopeless:
                k += step
            if k not in rates and 0 <= k <= min(self._most, row.offered):
                return k
        return None if 0 in rates else 0

    def _decide(self, rows: int, row: _Row) -> None:
        rates = self._rates(row)
        challenger = max(rates, key=rates.__getitem__)
        if rates[challenger] > rates[row.best] * MARGIN:
            row.best = challenger
        self._decided.append(Choice(rows, row.best, rates))

    def take_decided(self) -> list[Choice]:
        """What rounds of trials came to since the last call."""
        decided, self._decided = self._decided, []
        return decided

    def in_use(self) -> dict[int, int]:
        """k by row bucket."""
        return {rows: row.drafts for rows, row in self._rows.items()}
