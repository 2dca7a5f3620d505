"""What every checkpoint offers, whatever it is stored in, and the shapes it must have."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.errors import CheckpointError
from mtp_jax.models.registry import expected_tensors
from mtp_jax.text import Tokenizer

Shape = tuple[int, ...]

MAX_NAMES = 20  # that one message lists
MAX_LAYERS = 10_000  # more is a broken file, and its list of tensors would fill the memory


class WeightSource(Protocol):
    """A checkpoint, read one tensor at a time. Reads are safe from several threads.

    Names and orientation are Hugging Face's: `model.layers.0.self_attn.q_proj.weight` is [out, in]
    with rotary halves split, not interleaved. `lm_head.weight` is absent when embeddings are tied.
    """

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> frozenset[str]:
        """Names of every tensor that `read` answers."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor: float32, bfloat16 or float16 as stored. What is quantised comes as
        bfloat16 from Hugging Face's formats and as float32 from GGUF.

        The array may be a read-only view of the mapped file.
        """
        ...

    def shape(self, name: str) -> Shape: ...

    def dtype(self, name: str) -> np.dtype:
        """Type that `read` returns."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes of the array that `read` returns."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, built at the first call."""
        ...

    def describe(self) -> str:
        """One line for the start-up print."""
        ...


def check_shapes(
    where: str,
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    unread: Mapping[str, Shape] = MappingProxyType({}),
) -> None:
    """Compares a checkpoint's tensors with what its configuration asks for.

    Tensors that nobody asked for are an error too: a model with parts that we would leave out
    gives wrong answers instead of none. `unread` ones may be there.

    Raises:
      CheckpointError: tensors are missing, have another shape, or are not understood; it names them all,
        up to `MAX_NAMES`.
    """
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    misshapen = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    extra = sorted(set(found) - set(expected) - set(unread))
    problems = {"missing": missing, "of another shape": misshapen, "unexpected": extra}
    count = sum(map(len, problems.values()))
    if count == 1:
        _raise_one(where, expected, found, extra)
    if count:
        got, room = [], MAX_NAMES
        for what, names in problems.items():
            shown = names[:room]
            room -= len(shown)
            if shown and len(shown) < len(names):
                shown = [*shown, f"and {len(names) - len(shown)} more"]
            if names:
                got.append(f"{len(names)} {what}" + (": " + ", ".join(shown) if shown else ""))
        raise CheckpointError(f"{where}: tensors", "; ".join(got), "those that config.json asks for")


def _raise_one(
    where: str, expected: Mapping[str, Shape], found: Mapping[str, Shape], extra: list[str]
) -> None:
    if extra:
        raise CheckpointError(f"{where}: {extra[0]}", "a tensor that this model type does not have", "none")
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: {name}", "no such tensor", f"a tensor of shape {list(shape)}")
        if found[name] != shape:
            raise CheckpointError(f"{where}: {name}", list(found[name]), f"shape {list(shape)}")


def count_text(config: ModelConfig) -> str:
    """Parameter count of the target in words, such as `135M`."""
    target = dataclasses.replace(config, num_nextn_predict_layers=0)
    total = sum(int(np.prod(shape)) for shape in expected_tensors(target).values())
    return f"{total / 1e9:.1f}B" if total >= 1e9 else f"{total / 1e6:.0f}M" if total >= 1e6 else str(total)
