"""Stop strings over text that arrives in pieces."""

from collections.abc import Sequence


class StopChecker:
    """Cuts a stream of text at the first stop string that completes.

    Text that may still become a stop string is held back until that is decided. The outcome is the
    same however the text is split: the match that *ends* first wins, as if characters came singly,
    and of several that end together the longest.

    Args:
      stops: non-empty strings; none at all passes everything through.
      keep: show the stop string itself too.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False):
        assert all(stops), "stop strings must not be empty"
        self._keep = keep
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, exempt: bool = False) -> tuple[str, str | None]:
        """Takes the next piece; returns what may be shown now, and the stop string once found.

        A stop string that ends in an exempt piece is none; one that begins there and ends later is. After a
        match everything is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        known = len(self._held)  # what ended in there was none
        text = self._held + text
        stops = () if exempt else self._stops
        starts = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep else start], self.matched
        held = self._undecided(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """Releases the held text at the end of the stream; empty after a match."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
