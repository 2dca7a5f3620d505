"""Progress of loading: what reports it, and the bars that show it to a person."""

import sys
from collections.abc import Callable

from tqdm import tqdm

Report = Callable[[str, float, float], None]  # phase, done, total


class PhaseBars:
    """A `Report` that shows one bar for each phase, on stderr."""

    def __init__(self):
        self._bar: tqdm | None = None
        self._phase = ""

    def __call__(self, phase: str, done: float, total: float) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            form = "{desc:<10}{percentage:4.0f}% |{bar:30}| {elapsed}"
            # Into a file, a line now and then is enough.
            interval = 0.1 if sys.stderr.isatty() else 5.0
            self._bar = tqdm(total=total, desc=phase, bar_format=form, mininterval=interval, file=sys.stderr)
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def close(self) -> None:
        """Ends the bar of the running phase."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
