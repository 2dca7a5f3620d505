"""Ctrl-C and SIGTERM outside of the event loop: while modules are imported, and after serving."""

import os
import signal
from types import FrameType


def exit_on_signals() -> None:
    """Makes SIGINT and SIGTERM end the process at once and silently, with exit code 128 + signal.

    Python's own KeyboardInterrupt would print a traceback of whatever import it hits, and libraries
    that catch it would go on. For the main thread; the event loop's handlers replace these.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
