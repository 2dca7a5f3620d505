"""Directories that `python -m mtp_jax.convert` writes: placed arrays, for fast restarts."""

import dataclasses
import threading
from pathlib import Path
from typing import NoReturn

import numpy as np

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.loading.hf_fields import Fields, read_json
from mtp_jax.loading.source import count_text
from mtp_jax.text import Tokenizer
from mtp_jax.text.from_hf import tokenizer_from_directory

MARKER = "mtp_jax_placed.json"  # written last: without it a conversion was not finished
VERSION = 1
# Beside the arrays: what is not weights, as the Hugging Face directory had it.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class PlacedDir:
    """A directory of placed arrays (a `WeightSource` without tensors to read by name).

    Attributes:
      fields: what the marker says: the layout that the arrays are of.
      float8: columns that share a scale, of each leaf that is in float8; as `WeightLayout.groups`.
      draft_vocab: ids that drafts are chosen from; None: the whole vocabulary, or no MTP module.

    Raises:
      CheckpointError: names the file or field that is wrong.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.fields = Fields(MARKER, read_json(directory / MARKER))
        self.fields.must_be("version", (VERSION,))
        config = config_from_directory(directory)
        modules = (config.num_nextn_predict_layers or 1) if self.fields.flag("mtp") else 0
        self.config = dataclasses.replace(config, num_nextn_predict_layers=modules)
        some = self.fields.get("draft_vocab") is not None
        self.draft_vocab = self.fields.integer("draft_vocab") if some else None
        self.float8 = _float8(self.fields)
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    def names(self) -> frozenset[str]:
        return frozenset()

    def read(self, name: str) -> np.ndarray:
        self._refuse(name)

    def shape(self, name: str) -> tuple[int, ...]:
        self._refuse(name)

    def dtype(self, name: str) -> np.dtype:
        self._refuse(name)

    def nbytes(self, name: str) -> int:
        self._refuse(name)

    def tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_from_directory(self.directory, self.config.model_type)
            return self._tokenizer

    def describe(self) -> str:
        kind, stages = self.fields.values.get("dtype"), self.fields.values.get("stages")
        size = count_text(self.config)
        arrays = f"placed arrays of {kind} for {stages} stage{'s' * (stages != 1)}"
        return f"{self.config.model_type}, {size} parameters, {self.directory}, {arrays}"

    def _refuse(self, name: str) -> NoReturn:
        legal = "the checkpoint that it was made from: placed arrays have no tensors by name"
        raise CheckpointError(f"{self.directory}: {name}", "no such tensor", legal)


def _float8(fields: Fields) -> dict[str, int]:
    groups = fields.mapping("float8")
    return {name: groups.integer(name) for name in groups.values}
