"""Hugging Face directories of safetensors as a `WeightSource`."""

import dataclasses
import logging
import math
import threading
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.loading.hf_fields import read_json
from mtp_jax.loading.source import check_shapes, count_text
from mtp_jax.models.registry import expected_tensors, mtp_prefix, optional_tensors
from mtp_jax.text import Tokenizer
from mtp_jax.text.from_hf import tokenizer_from_directory

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
MTP_HEAD_FILE = "mtp_head.safetensors"  # a head beside the target's weights, and none of them

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),  # vocabulary ids of an MTP head
}


def canonical(name: str) -> str:
    """A tensor's name without what models with parts for images put in front of those for text."""
    return name.replace("model.language_model.", "model.", 1)


class TensorFiles:
    """The union of some safetensors files, mapped; tensors are copied out one at a time.

    Raises:
      CheckpointError: a file that is cut short or no safetensors, a name that two files hold, or an
        element type other than float32, float16, bfloat16 and int32.
    """

    def __init__(self, paths: Iterable[Path]):
        self._files: dict[str, tuple[Path, safe_open, str]] = {}  # and its name in the file
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self.metadata: dict[str, str] = {}  # of all files; what the format's header keeps beside tensors
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="np")
        except FileNotFoundError as error:
            raise CheckpointError(str(path), "no such file", "a safetensors file") from error
        except (SafetensorError, OSError, ValueError) as error:
            got = f"unreadable or cut short ({error})"
            raise CheckpointError(str(path), got, "a safetensors file") from error
        self.metadata |= file.metadata() or {}
        for stored in file.keys():  # noqa: SIM118 - not a mapping
            name = canonical(stored)
            if name in self._files:
                other = self._files[name][0].name
                raise CheckpointError(f"{path.name}: {name}", f"the same name in {other}", "each name once")
            view = file.get_slice(stored)
            kind = view.get_dtype()
            if kind not in _DTYPES:
                raise CheckpointError(f"{path.name}: {name}", kind, "one of " + ", ".join(_DTYPES))
            self._files[name] = (path, file, stored)
            self._shapes[name] = tuple(view.get_shape())
            self._dtypes[name] = _DTYPES[kind]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def drop(self, names: Iterable[str]) -> None:
        """Forgets tensors that the model does not use."""
        for name in names:
            del self._files[name], self._shapes[name], self._dtypes[name]

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        self._known(name)
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        self._known(name)
        return self._dtypes[name]

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> np.ndarray:
        self._known(name)
        _, file, stored = self._files[name]
        return file.get_tensor(stored)

    def _known(self, name: str) -> None:
        if name not in self._files:
            raise CheckpointError(name, "no such tensor", "a name of names()")


class SafetensorsDir(TensorFiles):
    """A directory with config.json and safetensors, as Hugging Face lays it out (a `WeightSource`).

    Raises:
      CheckpointError: names the file, tensor or configuration field that is wrong.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.config = config_from_directory(self.directory)
        super().__init__(_shards(self.directory))
        self._check_index()
        self.drop([name for name in self.names() if self._is_unused(name)])
        self._check_mtp()
        expected = expected_tensors(self.config, self.names())
        check_shapes(self.directory.name, expected, self.shapes, optional_tensors(self.config))
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    def tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_from_directory(self.directory)
            return self._tokenizer

    def describe(self) -> str:
        stored = sum(self.nbytes(name) for name in self.names()) / 1e6
        kinds = ", ".join(sorted({str(self.dtype(name)) for name in self.names()}))
        size, modules = count_text(self.config), self.config.num_nextn_predict_layers
        mtp = f", {modules} MTP module{'s' * (modules > 1)}" if modules else ""
        weights = f"{stored / 1e3:.1f} GB of {kinds}" if stored >= 1e3 else f"{stored:.1f} MB of {kinds}"
        return f"{self.config.model_type}, {size} parameters{mtp}, {self.directory}, {weights}"

    def _is_unused(self, name: str) -> bool:
        # Tied wins over a stored head, as in transformers; old Llama files store rotary tables.
        tied_head = name == "lm_head.weight" and self.config.tie_word_embeddings
        vision = name.startswith(("model.visual.", "visual."))  # text only, so far
        return tied_head or vision or name.endswith("rotary_emb.inv_freq")

    def _check_index(self) -> None:
        index = self.directory / INDEX
        if not index.is_file():
            return
        listed = {canonical(name): shard for name, shard in _weight_map(index).items()}
        missing = sorted(set(listed) - self.names())
        if missing:
            shard = listed[missing[0]]
            raise CheckpointError(f"{shard}: {missing[0]}", "no such tensor", f"the tensor, as {INDEX} says")

    def _check_mtp(self) -> None:
        modules = self.config.num_nextn_predict_layers
        prefix = mtp_prefix(self.config)
        stored = any(name.startswith(prefix) for name in self.names())
        if stored and not modules:
            legal = f"1, for there is an MTP module ({prefix}*) among the weights"
            raise CheckpointError("config.json: num_nextn_predict_layers", modules, legal)
        if modules and not stored:
            log.warning("%s has no MTP weights (%s*), though config.json says so", self.directory, prefix)
            self.config = dataclasses.replace(self.config, num_nextn_predict_layers=0)


def _weight_map(index: Path) -> dict[str, str]:
    value = read_json(index).get("weight_map")
    named = isinstance(value, dict) and value and all(isinstance(file, str) for file in value.values())
    if not isinstance(value, dict) or not named:
        raise CheckpointError(f"{index.name}: weight_map", value, "an object: tensor name to file name")
    return value


def _shards(directory: Path) -> list[Path]:
    """The directory's weight files: those of the index, or else every one there is."""
    index = directory / INDEX
    if not index.is_file():
        found = sorted(path for path in directory.glob("*.safetensors") if path.name != MTP_HEAD_FILE)
        if not found:
            raise CheckpointError(str(directory), "no weights", "safetensors files beside config.json")
        return found
    shards = [directory / name for name in sorted(set(_weight_map(index).values()))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(str(shard), "no such file", f"a shard, as {INDEX} names it")
    return shards
