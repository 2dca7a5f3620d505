"""Files of a run that nobody may lose: they appear whole, in folders that can be written."""

import os
import tempfile
from pathlib import Path

from mtp_jax.errors import InvalidValueError


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a process that is killed here leaves the old one."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


def writable_folder(path: Path, flag: str) -> Path:
    """Makes a folder where there is none, before hours are spent on what it is to hold.

    Raises:
      InvalidValueError: it is a file, or cannot be made or written; names the flag.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        legal = f"a folder that can be written ({error.strerror})"
        raise InvalidValueError(flag, str(path), legal) from error
    return path
