"""Where generated text is collected: duplicates are left out, and shards are written as it goes."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from mtp_jax.train.corpus import (
    SUFFIX,
    Origin,
    Sample,
    ShardHeader,
    check_origin,
    digest,
    read_header,
    read_shard,
    shard_paths,
    write_shard,
)

FLUSH_TOKENS, FLUSH_SECONDS = 1 << 18, 60.0  # a shard is written at either


@dataclasses.dataclass
class Counts:
    """What one process did, earlier runs that it resumed included where it says so."""

    samples: int = 0  # kept, earlier runs included
    tokens: int = 0  # of these samples' completions
    requests: int = 0  # taken from files or templates, earlier runs included
    held_out: int = 0  # prompts dropped because a benchmark holds them out
    turns: int = 0  # user turns kept
    turns_dropped: int = 0  # empty, too long, no text, or said before
    duplicates: int = 0  # completions dropped
    loops_cut: int = 0
    loops_dropped: int = 0
    refused: int = 0  # prompts too long for the engine
    seconds: float = 0.0

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.samples} samples, {self.tokens} tokens in {self.seconds:.0f} s; "
            f"{self.turns} user turns by the target ({self.turns_dropped} dropped), "
            f"{self.duplicates} duplicates, {self.loops_cut} loops cut and {self.loops_dropped} dropped, "
            f"{self.held_out} held out"
        )


class Shelf:
    """What one shard of the work has written and is about to write, and what must not come twice.

    Args:
      folder: made if it is not there. Earlier files of this shard are read, and count.
      name: of this shard; its files are `name-00000.safetensors` and so on.
      origin: the target's. All files of the folder must have it.
      settings: for the headers.
      counts: is kept up to date.

    Raises:
      InvalidValueError: the folder has text of another target, or a broken file; names the file.
    """

    def __init__(
        self, folder: Path, name: str, origin: Origin, settings: Mapping[str, object], counts: Counts
    ):
        self._folder, self._name, self._counts = folder, name, counts
        self._origin, self._settings = origin, settings
        self._samples: list[Sample] = []
        self._tokens = 0
        self._flushed = time.monotonic()
        self._completions: set[bytes] = set()
        self._prompts: set[bytes] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self.num_shards = 0
        for path in shard_paths(folder):
            header = read_header(path)
            check_origin(path, header.origin, self._origin, "a folder with this target's text only")
            if path.name.startswith(f"{self._name}-"):
                self._resume(path)

    def _resume(self, path: Path) -> None:
        header, arrays = read_shard(path)
        offsets, prompts = arrays["offsets"], arrays["prompt_lengths"]
        for start, length, end in zip(offsets, prompts, offsets[1:], strict=False):
            self._prompts.add(digest(arrays["tokens"][start : start + length]))
            self._completions.add(digest(arrays["tokens"][start + length : end]))
        self._counts.samples += len(prompts)
        self._counts.tokens += int(offsets[-1] - prompts.sum())
        self._counts.requests = max(self._counts.requests, header.num_requests)
        self.num_shards += 1

    def is_new_turn(self, prompt: tuple[int, ...]) -> bool:
        """Whether the target has not written this user's turn before."""
        key = digest(prompt)
        if key in self._prompts:
            return False
        self._prompts.add(key)
        return True

    def put(self, sample: Sample) -> bool:
        """Keeps a sample, unless there is one with the same completion."""
        key = digest(sample.completion)
        if key in self._completions:
            self._counts.duplicates += 1
            return False
        self._completions.add(key)
        self._samples.append(sample)
        self._tokens += len(sample.completion)
        self._counts.samples += 1
        self._counts.tokens += len(sample.completion)
        return True

    def flush_when_due(self) -> bool:
        """Writes a shard if there is enough for one, or the last one was long ago."""
        due = self._tokens >= FLUSH_TOKENS or time.monotonic() - self._flushed >= FLUSH_SECONDS
        if due:
            self.flush()
        return due

    def flush(self) -> None:
        """Writes what is there."""
        self._flushed = time.monotonic()
        if not self._samples:
            return
        header = ShardHeader(self._origin, self._counts.requests, self._settings)
        while True:
            path = self._folder / f"{self._name}-{self.num_shards:05d}{SUFFIX}"
            self.num_shards += 1
            try:
                write_shard(path, header, self._samples, overwrite=False)
            except FileExistsError:  # by another process with the same --shard, or a number was left out
                continue
            break
        self._samples, self._tokens = [], 0
