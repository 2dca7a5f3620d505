"""The training text on disk: shards of prompts with the completions that the target wrote.

A shard is a safetensors file. Its samples lie one after another:

    tokens          int32 [total]           prompt and completion of each sample
    offsets         int64 [samples + 1]     where each sample begins; the last is the end
    prompt_lengths  int32 [samples]         tokens of each sample that are its prompt
    temperatures    float32 [samples]       that the completion was sampled at

and its metadata has one entry, `corpus`, the JSON of a `ShardHeader`.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from mtp_jax.errors import InvalidValueError
from mtp_jax.text.tokenizer import Tokenizer

FORMAT = 1
SUFFIX = ".safetensors"
_KEY = "corpus"
_DTYPES = {
    "tokens": np.dtype(np.int32),
    "offsets": np.dtype(np.int64),
    "prompt_lengths": np.dtype(np.int32),
    "temperatures": np.dtype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose text it is: shards of different origins do not mix."""

    target: str  # name of the model that wrote it
    vocab_size: int  # V: token ids lie below it
    tokenizer: str  # fingerprint


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself."""

    origin: Origin
    num_requests: int = 0  # prompts that its writer had taken from its source when this was written
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)  # for people
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt and what the target wrote after it, its end token included where it came to one."""

    prompt: Sequence[int]
    completion: Sequence[int]
    temperature: float


def fingerprint(tokenizer: Tokenizer) -> str:
    """The same for tokenizers whose ids stand for the same text."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        digest.update(repr(tokenizer.token_text.piece(token)).encode())
    return digest.hexdigest()[:16]


def write_shard(
    path: Path, header: ShardHeader, samples: Sequence[Sample], *, overwrite: bool = True
) -> None:
    """Writes a shard whole or not at all: under another name first, which no reader looks at.

    Raises:
      FileExistsError: not `overwrite`, and the file is there, however short a time.
    """
    lengths = [len(sample.prompt) + len(sample.completion) for sample in samples]
    flat = [token for sample in samples for part in (sample.prompt, sample.completion) for token in part]
    values = {
        "tokens": flat,
        "offsets": np.cumsum([0, *lengths]),
        "prompt_lengths": [len(sample.prompt) for sample in samples],
        "temperatures": [sample.temperature for sample in samples],
    }
    arrays = {name: np.asarray(value, _DTYPES[name]) for name, value in values.items()}
    partial = path.with_suffix(f".partial-{os.getpid()}")
    safetensors.numpy.save_file(arrays, partial, {_KEY: json.dumps(dataclasses.asdict(header))})
    if overwrite:
        os.replace(partial, path)
        return
    try:
        os.link(partial, path)  # unlike a rename, it fails where the name is taken
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(path) from None
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def shard_paths(folder: str | Path) -> list[Path]:
    """Shards of a folder in the order of their names."""
    return sorted(Path(folder).glob(f"*{SUFFIX}"))


def read_header(path: Path) -> ShardHeader:
    """A shard's header.

    Raises:
      InvalidValueError: the file is no shard of this format.
    """
    return _read(path, with_arrays=False)[0]


def read_shard(path: Path) -> tuple[ShardHeader, dict[str, np.ndarray]]:
    """A shard's header and arrays.

    Raises:
      InvalidValueError: the file is broken, or no shard of this format.
    """
    header, arrays = _read(path, with_arrays=True)
    problem = _problem(arrays, header.origin.vocab_size)
    if problem:
        raise InvalidValueError(str(path), problem, "a corpus shard that is whole")
    return header, arrays


def _read(path: Path, *, with_arrays: bool) -> tuple[ShardHeader, dict[str, np.ndarray]]:
    legal = f"a corpus shard of format {FORMAT}"
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            raw = json.loads((file.metadata() or {})[_KEY])
            if raw["format"] != FORMAT:
                raise InvalidValueError(str(path), f"format {raw['format']}", legal)
            header = ShardHeader(**(raw | {"origin": Origin(**raw["origin"])}))
            arrays = {name: file.get_tensor(name) for name in _DTYPES} if with_arrays else {}
    except InvalidValueError:
        raise
    except (OSError, safetensors.SafetensorError, ValueError, TypeError, KeyError) as error:
        raise InvalidValueError(str(path), f"{type(error).__name__}: {error}", legal) from error
    return header, arrays


def _problem(arrays: Mapping[str, np.ndarray], vocab_size: int) -> str | None:
    """What is wrong with a shard's arrays, if anything."""
    for name, dtype in _DTYPES.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            return f"{name} of type {arrays[name].dtype} and shape {arrays[name].shape}"
    tokens, offsets, prompts = arrays["tokens"], arrays["offsets"], arrays["prompt_lengths"]
    if len(offsets) != len(prompts) + 1 or len(arrays["temperatures"]) != len(prompts):
        return f"{len(offsets)} offsets of {len(prompts)} samples"
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < prompts).any():
        return f"offsets that do not fit {len(tokens)} tokens"
    if (prompts < 0).any() or (len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size):
        return f"numbers outside of the vocabulary of {vocab_size}"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Samples in memory. Arrays are those of a shard; see the module."""

    origin: Origin
    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    temperatures: np.ndarray

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Reads all shards of a folder. Of completions that are equal, token for token, the first stays.

        Raises:
          InvalidValueError: no shards, a broken one, or one that another target wrote; names the file.
        """
        paths = shard_paths(folder)
        if not paths:
            raise InvalidValueError("--data", str(folder), "a folder with shards of generated text")
        origin, parts = None, []
        for path in paths:
            header, arrays = read_shard(path)
            origin = origin or header.origin
            check_origin(path, header.origin, origin, f"text of the same target as {paths[0].name}")
            parts.append(arrays)
        assert origin is not None
        ends = np.cumsum([0, *(len(part["tokens"]) for part in parts)])
        shifted = [part["offsets"][:-1] + start for part, start in zip(parts, ends, strict=False)]
        whole = cls(
            origin,
            tokens=np.concatenate([part["tokens"] for part in parts]),
            offsets=np.concatenate([*shifted, ends[-1:]]),
            prompt_lengths=np.concatenate([part["prompt_lengths"] for part in parts]),
            temperatures=np.concatenate([part["temperatures"] for part in parts]),
        )
        firsts: dict[bytes, int] = {}
        for index in range(whole.num_samples):
            firsts.setdefault(digest(whole.sample(index)[1]), index)
        unique = np.fromiter(firsts.values(), np.int64, len(firsts))
        return whole if len(unique) == whole.num_samples else whole.select(unique)

    @property
    def num_samples(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, prompt and completion, int64 [samples]."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        """Tokens that the target wrote; prompts are not counted."""
        return int(len(self.tokens) - self.prompt_lengths.sum(dtype=np.int64))

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt ids and completion ids, views."""
        start, end = self.offsets[index], self.offsets[index + 1]
        middle = start + self.prompt_lengths[index]
        return self.tokens[start:middle], self.tokens[middle:end]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return map(self.sample, range(self.num_samples))

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often the target wrote each token, int64 [V]."""
        place = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)
        written = self.tokens[place >= np.repeat(self.prompt_lengths, self.lengths)]
        return np.bincount(written, minlength=vocab_size)

    def select(self, indices: np.ndarray) -> "Corpus":
        """The corpus of these samples, in this order."""
        lengths = self.lengths[indices]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # Where in the flat tokens of all samples each token of the selected ones lies.
        source = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][indices] - offsets[:-1], lengths)
        return Corpus(
            self.origin,
            tokens=self.tokens[source],
            offsets=offsets,
            prompt_lengths=self.prompt_lengths[indices],
            temperatures=self.temperatures[indices],
        )

    def split(self, held_out_samples: int, seed: int) -> tuple["Corpus", "Corpus"]:
        """A training part and `held_out_samples` random samples; no prompt is in both.

        Raises:
          InvalidValueError: nothing would be left to train on.
        """
        legal = f"fewer than the {self.num_samples} samples there are"
        if not 0 <= held_out_samples < self.num_samples:
            raise InvalidValueError("--held-out-samples", held_out_samples, legal)
        order = np.random.default_rng([seed, 7]).permutation(self.num_samples)
        held = np.sort(order[:held_out_samples])
        prompts = {digest(self.sample(index)[0]) for index in held}
        rest = np.sort(order[held_out_samples:])
        keep = np.array([digest(self.sample(index)[0]) not in prompts for index in rest], bool)
        if not keep.any():
            raise InvalidValueError("--held-out-samples", held_out_samples, f"{legal}, with other prompts")
        return self.select(rest[keep]), self.select(held)


def check_origin(path: Path, got: Origin, expected: Origin, legal: str) -> None:
    """Raises InvalidValueError, naming the file, where a shard is another target's."""
    for field in dataclasses.fields(Origin):
        mine, other = getattr(expected, field.name), getattr(got, field.name)
        if mine != other:
            raise InvalidValueError(str(path), f"{field.name} {other!r}", f"{legal} ({mine!r})")


def digest(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Equal for equal token ids, and in practice only for these."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=12).digest()
