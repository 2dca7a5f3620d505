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
        """The tensor: float32, bfloat16 or float16 as stored; quantised formats come as float32.

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
      CheckpointError: a tensor is missing, has another shape, or is not understood.
    """
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: {name}", "no such tensor", f"a tensor of shape {list(shape)}")
        if found[name] != shape:
            raise CheckpointError(f"{where}: {name}", list(found[name]), f"shape {list(shape)}")
    extra = sorted(set(found) - set(expected) - set(unread))
    if extra:
        raise CheckpointError(f"{where}: {extra[0]}", "a tensor that this model type does not have", "none")


def count_text(config: ModelConfig) -> str:
    """Parameter count of the target in words, such as `135M`."""
    target = dataclasses.replace(config, num_nextn_predict_layers=0)
    total = sum(int(np.prod(shape)) for shape in expected_tensors(target).values())
    return f"{total / 1e9:.1f}B" if total >= 1e9 else f"{total / 1e6:.0f}M" if total >= 1e6 else str(total)
