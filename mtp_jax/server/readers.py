"""How flags are read off a command line: functions for `type=` of argparse."""

import argparse
import math
import re
from collections.abc import Callable

from mtp_jax.config import AUTO

# (help, how to read it, choices)
Flag = tuple[str, Callable[[str], object], tuple[str, ...] | None]

_ORIGIN = re.compile(r"https?://[^/\s,]+|null")


def number(
    kind: type[int] | type[float], low: float, high: float | None = None
) -> Callable[[str], int | float]:
    """Reads a number from `low` to `high` off a command line; for `type=` of a flag."""
    word = "an integer" if kind is int else "a finite number"
    legal = f"{word} of at least {low}" if high is None else f"{word} from {low} to {high}"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < math.inf or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"got {text!r}; expected {legal}")
        return value

    return parse


def any_text(text: str) -> str:
    """Any text but none: an empty variable in a script must not become an empty API key or address."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a text that is not empty")
    return text


def number_or_auto(text: str) -> int | float | str:
    """Reads an integer of at least 0, or `auto`."""
    try:
        return AUTO if text == AUTO else number(int, 0)(text)
    except argparse.ArgumentTypeError:
        legal = f"{AUTO!r} or an integer of at least 0"
        raise argparse.ArgumentTypeError(f"got {text!r}; expected {legal}") from None


def layer_counts(text: str) -> tuple[int, ...]:
    """Reads the layers of each stage, such as `16,15,15,15`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        legal = "integers with commas between them, such as 16,15,15,15"
        raise argparse.ArgumentTypeError(f"got {text!r}; expected {legal}") from None


def origins(text: str) -> tuple[str, ...]:
    """Reads origins of web pages, `https://example.org,http://localhost:3000`, or `*`."""
    items = tuple(item.strip() for item in text.split(","))
    for item in items:
        if item != "*" and not _ORIGIN.fullmatch(item):
            legal = "'*', or origins such as https://example.org, with commas between and no path"
            raise argparse.ArgumentTypeError(f"got {item!r}; expected {legal}")
    return items
