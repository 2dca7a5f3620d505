"""What the chat reads and shows: turns from stdin, answers to stdout, everything else to stderr."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self, TextIO

ACCEPTED, RESET = "\x1b[32m", "\x1b[0m"  # green
PROMPT = "> "
# A model may write anything; a terminal must not obey it.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def use_color(choice: str, stream: TextIO) -> bool:
    """Whether `--color CHOICE` means colours on this stream."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Terminal:
    """The two ends of the chat.

    Args:
      color: show text of accepted drafts in green.
    """

    def __init__(self, color: bool, stdin: TextIO, stdout: TextIO, stderr: TextIO):
        self.color = color
        self._stdin, self._out, self._err = stdin, stdout, stderr
        self._answers_to_terminal = stdout.isatty()
        self.interactive = stdin.isatty() and stdout.isatty()
        if self.interactive:
            import readline  # noqa: F401 - gives `input` its line editing

    def read(self) -> str | None:
        """The next turn without its line end; None at the end of the input."""
        if self.interactive:
            try:
                return input(PROMPT)
            except EOFError:
                self.line("")
                return None
        text = self._stdin.readline()
        return text.rstrip("\r\n") if text else None

    def answer(self, text: str, accepted: Sequence[tuple[int, int]] = ()) -> None:
        """Shows a piece of an answer; `accepted` are the ranges that came from accepted drafts."""
        text = _colored(text, accepted, self._clean) if self.color else self._clean(text)
        self._out.write(text)
        self._out.flush()

    def line(self, text: str) -> None:
        """A line that is no part of an answer."""
        self._err.write(text + "\n")
        self._err.flush()

    def _clean(self, text: str) -> str:
        return text.translate(_CONTROLS) if self._answers_to_terminal else text


def _colored(text: str, accepted: Sequence[tuple[int, int]], clean) -> str:
    # Each range is closed in the same write, so that nothing can leave the terminal green.
    pieces, done = [], 0
    for start, end in accepted:
        pieces += [clean(text[done:start]), ACCEPTED, clean(text[start:end]), RESET]
        done = end
    return "".join([*pieces, clean(text[done:])])


class Interrupts:
    """Ctrl-C while an answer is made: the first sets `requested`, the second ends the process at once."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            sys.stderr.flush()
            os._exit(128 + number)
        self.requested = True
