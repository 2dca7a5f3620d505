"""Look-ups in the JSON files of Hugging Face directories, whose errors name file and field."""

import json
from collections.abc import Mapping
from pathlib import Path

from mtp_jax.errors import CheckpointError

_HUGE = 1e30  # JSON has integers that no float holds, and Python reads Infinity


class Fields:
    """Typed look-ups in a JSON object whose errors name file and field."""

    def __init__(self, where: str, values: Mapping[str, object]):
        self.where, self.values = where, values

    def fail(self, key: str, legal: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}", self.values.get(key), legal)

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bound = f" and at most {most}" if isinstance(value, int) and value > most else ""
            raise self.fail(key, f"an integer of at least {least}{bound}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _HUGE:
            raise self.fail(key, "a number above 0")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: absent, null, one or several."""
        value = self.values.get(key)
        several = value if isinstance(value, list) else [] if value is None else [value]
        ids = tuple(one for one in several if isinstance(one, int) and not isinstance(one, bool))
        if len(ids) < len(several):
            raise self.fail(key, "a token id or a list of them")
        return ids

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def words(self, key: str, legal: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """A list of `count` words, each one of `legal`; None where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or not set(value[:count]) <= set(legal):
            raise self.fail(key, f"a list of {count} times one of {', '.join(legal)}")
        return tuple(value[:count])

    def must_be(self, key: str, legal: tuple[object, ...]) -> None:
        """Refuses features that we would silently leave out."""
        if key in self.values and self.values[key] not in legal:
            raise self.fail(key, " or ".join(repr(one) for one in legal))

    def mapping(self, key: str) -> "Fields":
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return Fields(f"{self.where}: {key}", value)

    def get(self, key: str, default: object = None) -> object:
        """The value, or the default where there is none or null."""
        value = self.values.get(key)
        return default if value is None else value


def read_json(path: Path) -> Mapping[str, object]:
    """A JSON object from a file.

    Raises:
      CheckpointError: no such file, or no JSON object in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(str(path), "no such file", "a model directory with this file") from error
    except OSError as error:
        raise CheckpointError(str(path), error.strerror, "a readable file") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"unreadable ({error})", "JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), type(value).__name__, "a JSON object")
    return value
