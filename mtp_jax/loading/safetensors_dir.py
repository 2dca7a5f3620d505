"""Hugging Face directories of safetensors as a `WeightSource`."""

import dataclasses
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.formats import format_of
from mtp_jax.loading.hf_config import config_from_directory, mtp_count_field
from mtp_jax.loading.hf_fields import read_json
from mtp_jax.loading.names import canonical_name
from mtp_jax.loading.quantised import RESULT, LogicalTensors
from mtp_jax.loading.source import check_shapes, count_text
from mtp_jax.loading.tensor_files import TensorFiles
from mtp_jax.models.ngram import constant_tensors
from mtp_jax.models.registry import expected_tensors, mtp_prefix, optional_tensors
from mtp_jax.text import Tokenizer
from mtp_jax.text.from_hf import tokenizer_from_directory

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
MTP_HEAD_FILE = "mtp_head.safetensors"  # a head beside the target's weights, and none of them


class SafetensorsDir(LogicalTensors):
    """A directory with config.json and safetensors, as Hugging Face lays it out (a `WeightSource`).

    Quantised weights are dequantised to bfloat16 when they are read; those of `blocks` can be
    read as float8. Of a model for images and text the text model is read, under the names that it would
    have alone.

    Raises:
      CheckpointError: names the file, tensor or configuration field that is wrong.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.config = config_from_directory(self.directory)
        stored = TensorFiles(_shards(self.directory), canonical_name)
        self._check_index(stored)
        if stored.left_out:
            left_out = len(stored.left_out)
            log.info("%s: %d tensors of images and video are not read", self.directory, left_out)
        super().__init__(stored, format_of(self.directory), constant_tensors(self.config))
        self.drop([name for name in self.names() if self._is_unused(name)])
        self._check_mtp()
        expected = expected_tensors(self.config, self.names())
        check_shapes(self.directory.name, expected, self.shapes, optional_tensors(self.config))
        self._check_constants()
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    def tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_from_directory(self.directory, self.config.model_type)
            return self._tokenizer

    def describe(self) -> str:
        size, modules = count_text(self.config), self.config.num_nextn_predict_layers
        mtp = f", {modules} MTP module{'s' * (modules > 1)}" if modules else ""
        line = f"{self.config.model_type}, {size} parameters{mtp}, {self.directory}, "
        plain, packed = self.stored_bytes()
        if not packed:
            return line + f"{_size(sum(plain.values()))} of {', '.join(sorted(plain))}"
        kept = {self.kind(name) for name in self.blocks}
        dequantised = {kind: count for kind, count in packed.items() if kind not in kept}
        parts = [f"{_sizes(plain)}"] if plain else []
        if dequantised:
            memory = sum(self.nbytes(name) for name in self.names() if self.kind(name) not in kept)
            also = " but for float8" if kept else ""
            parts.insert(0, f"{_sizes(dequantised)}, dequantised to {RESULT} at loading")
            parts[-1] += f": {size} parameters{also} take {_size(memory)}"
        if kept:
            sizes = _sizes({kind: packed[kind] for kind in packed if kind in kept})
            parts.insert(0, f"{sizes}, kept in float8")
        return line + ", and ".join(parts)

    def _is_unused(self, name: str) -> bool:
        # Tied wins over a stored head, as in transformers; old Llama files store rotary tables.
        tied_head = name == "lm_head.weight" and self.config.tie_word_embeddings
        return tied_head or name.endswith("rotary_emb.inv_freq")

    def _check_index(self, stored: TensorFiles) -> None:
        index = self.directory / INDEX
        if not index.is_file():
            return
        for name, shard in sorted(_weight_map(index).items()):
            canonical = canonical_name(name)
            if canonical is not None and canonical not in stored.names():
                raise CheckpointError(f"{shard}: {name}", "no such tensor", f"the tensor, as {INDEX} says")

    def _check_mtp(self) -> None:
        modules = self.config.num_nextn_predict_layers
        prefix = mtp_prefix(self.config)
        stored = any(name.startswith(prefix) for name in self.names())
        if stored and not modules:
            legal = f"1, for there is an MTP module ({prefix}*) among the weights"
            raise CheckpointError(f"config.json: {mtp_count_field(self.config.model_type)}", modules, legal)
        if modules and not stored:
            log.warning("%s has no MTP weights (%s*), though config.json says so", self.directory, prefix)
            self.config = dataclasses.replace(self.config, num_nextn_predict_layers=0)

    def _check_constants(self) -> None:
        """The hash of n-grams is computed from config.json; what the weights say of it must be the same."""
        for name, values in constant_tensors(self.config).items():
            if name in self.names():
                stored = tuple(int(value) for value in self.read(name))
                if stored != values:
                    raise CheckpointError(
                        f"{self.directory.name}: {name}", stored, f"{values}, by config.json"
                    )
                self.drop([name])


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _sizes(kinds: Mapping[str, int]) -> str:
    return " and ".join(f"{_size(count)} of {kind}" for kind, count in kinds.items())


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
