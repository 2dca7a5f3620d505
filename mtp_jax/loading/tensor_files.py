"""Safetensors files as named NumPy arrays, just as they are stored."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mtp_jax.errors import CheckpointError

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype


class TensorFiles:
    """The union of some safetensors files; tensors are read one at a time.

    Files are not kept mapped: pages of a mapping count as this process's memory for as long as it lives,
    and so would in the end the whole checkpoint.

    Args:
      paths: the files.
      rename: the name that a stored tensor goes by here, or None where it is to be left out.

    Raises:
      CheckpointError: a file that is cut short or no safetensors, a name that two files hold, or an
        element type that no format here has.
    """

    def __init__(self, paths: Iterable[Path], rename: Callable[[str], str | None] = lambda name: name):
        self._entries: dict[str, _Entry] = {}
        self._rename = rename
        self.left_out: list[str] = []  # stored names
        self.metadata: dict[str, str] = {}  # of all files; what the format's header keeps beside tensors
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np") as file:  # the library checks sizes and offsets
                self.metadata |= file.metadata() or {}
            start, header = _header(path)
        except FileNotFoundError as error:
            raise CheckpointError(str(path), "no such file", "a safetensors file") from error
        except (SafetensorError, OSError, ValueError) as error:
            got = f"unreadable or cut short ({error})"
            raise CheckpointError(str(path), got, "a safetensors file") from error
        for stored_name, entry in header.items():
            name = self._rename(stored_name)
            if name is None:
                self.left_out.append(stored_name)
                continue
            if name in self._entries:
                other = self._entries[name].path.name
                raise CheckpointError(f"{path.name}: {name}", f"the same name in {other}", "each name once")
            kind = entry["dtype"]
            if kind not in _DTYPES:
                raise CheckpointError(f"{path.name}: {name}", kind, "one of " + ", ".join(_DTYPES))
            offset = start + entry["data_offsets"][0]
            self._entries[name] = _Entry(path, offset, tuple(entry["shape"]), _DTYPES[kind])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._entry(name).dtype

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, a copy. Safe from several threads."""
        entry = self._entry(name)
        count = self.nbytes(name)
        stored = np.fromfile(entry.path, np.uint8, count, offset=entry.offset)
        if stored.size < count:
            raise CheckpointError(f"{entry.path.name}: {name}", "cut short since it was opened", "the file")
        return stored.view(entry.dtype).reshape(entry.shape)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(name, "no such tensor", "a name of names()")
        return self._entries[name]


def _header(path: Path) -> tuple[int, dict[str, dict]]:
    """Where the data begins, and the header's entries. The library reads no float8 into NumPy arrays."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header
