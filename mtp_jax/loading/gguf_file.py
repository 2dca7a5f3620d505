"""A GGUF file as a `WeightSource`: Hugging Face's names and orientation over GGUF's tensors."""

import functools
import math
import mmap
import re
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from mtp_jax.config import ModelConfig, RopeScaling
from mtp_jax.errors import CheckpointError
from mtp_jax.loading.gguf_blocks import PLAIN_DTYPES, dequantize, row_bytes
from mtp_jax.loading.gguf_header import TensorEntry, parse_header
from mtp_jax.loading.source import MAX_LAYERS, check_shapes, count_text
from mtp_jax.models.registry import expected_tensors
from mtp_jax.text import Tokenizer
from mtp_jax.text.from_gguf import tokenizer_from_gguf

ARCHITECTURES = ("llama", "qwen2")

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name that we do not know comes back unchanged.

    >>> hf_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{suffix}"
    return name


def split_rotary_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order that GGUF files of arch llama use for q and k.

    There, rows of a head alternate between the two rotary halves (0, d/2, 1, d/2 + 1, ...); Hugging
    Face keeps the first half and then the second.

    Args:
      rows: [heads * head_dim, ...]; any element type, also stored blocks.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


class GGUFFile:
    """A GGUF file of arch llama or qwen2, mapped into memory (a `WeightSource`).

    Raises:
      CheckpointError: not GGUF, another architecture or tensor type, missing or misshapen tensors.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise CheckpointError(self.path.name, "an empty file", "a GGUF file") from error
        except OSError as error:
            raise CheckpointError(str(self.path), error.strerror, "a readable GGUF file") from error
        self.metadata, self._raw_entries = parse_header(self.path, self._map)
        self.architecture = self._text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            legal = "one of " + ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{self.path.name}: general.architecture", self.architecture, legal)
        self._entries = {hf_name(n): e for n, e in self._raw_entries.items() if n != _ROPE_FREQS}
        self.config = self._config()
        found = {name: entry.shape for name, entry in self._entries.items()}
        check_shapes(self.path.name, expected_tensors(self.config), found)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return PLAIN_DTYPES.get(self._entry(name).kind, np.dtype(np.float32))

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        stored = self._bytes[entry.offset : entry.offset + entry.stored_bytes]
        rows = stored.reshape(-1, row_bytes(entry.kind, entry.shape[-1]))
        if entry.kind in PLAIN_DTYPES:
            values = stored.view(PLAIN_DTYPES[entry.kind]).reshape(entry.shape)
            return self._halves(name, values)
        return dequantize(self._halves(name, rows), entry.kind).reshape(entry.shape)

    def tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_from_gguf(self.metadata, self.path.name)
            return self._tokenizer

    def describe(self) -> str:
        kinds = Counter(e.kind for e in self._entries.values())
        stored = ", ".join(f"{kind} x {count}" for kind, count in kinds.most_common())
        megabytes = self.path.stat().st_size / 1e6
        name = self.metadata.get("general.name", self.path.stem)
        size = count_text(self.config)
        return f"{name} ({self.architecture}, {size} parameters), {self.path}, {megabytes:.0f} MB: {stored}"

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise CheckpointError(f"{self.path.name}: {name}", "no such tensor", "a name of names()")
        return self._entries[name]

    def _halves(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows in Hugging Face's order. Only arch llama stores q and k in another one."""
        if self.architecture != "llama":
            return rows
        if ".q_proj." in name:
            return split_rotary_halves(rows, self.config.num_attention_heads)
        if ".k_proj." in name:
            return split_rotary_halves(rows, self.config.num_key_value_heads)
        return rows

    def _text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path.name}: {key}", value, "a string")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        """A number above 0 of this architecture's metadata."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.path.name}: {self.architecture}.{key}", value, "a number above 0")
        return value

    def _integer(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            where = f"{self.path.name}: {self.architecture}.{key}"
            raise CheckpointError(where, value, f"an integer from 1 to {most}")
        return value

    def _token_id(self, key: str, vocab_size: int) -> int:
        value = self.metadata[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            legal = f"a token id from 0 to {vocab_size - 1}"
            raise CheckpointError(f"{self.path.name}: {key}", value, legal)
        return value

    def _config(self) -> ModelConfig:
        width, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", width // heads)
        rotary = self._integer("rope.dimension_count", head_dim)
        if rotary != head_dim:
            where = f"{self.path.name}: {self.architecture}.rope.dimension_count"
            raise CheckpointError(where, rotary, f"{head_dim}, the head dimension: no partial rotary")
        kv_heads = self._integer("attention.head_count_kv", heads)
        if heads % kv_heads:
            where = f"{self.path.name}: {self.architecture}.attention.head_count_kv"
            raise CheckpointError(where, kv_heads, f"a divisor of head_count, {heads}")
        theta = float(self._number("rope.freq_base", 10000.0))
        table = self._raw_entries.get("token_embd.weight")
        ids = [f"tokenizer.ggml.{k}_token_id" for k in ("eos", "eot", "eom")]
        vocab_size = table.shape[0] if table else self._integer("vocab_size")
        return ModelConfig(
            model_type=self.architecture,
            vocab_size=vocab_size,
            hidden_size=width,
            num_hidden_layers=self._integer("block_count", most=MAX_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=self._integer("feed_forward_length"),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(theta, head_dim),
            # stored as float32: 1e-5 comes back as 9.99999974e-06
            rms_norm_eps=float(f"{self._number('attention.layer_norm_rms_epsilon'):.6g}"),
            max_position_embeddings=self._integer("context_length"),
            tie_word_embeddings="output.weight" not in self._raw_entries,
            attention_bias="blk.0.attn_q.bias" in self._raw_entries,
            eos_token_ids=tuple(
                dict.fromkeys(self._token_id(k, vocab_size) for k in ids if k in self.metadata)
            ),
        )

    def _rope_scaling(self, theta: float, head_dim: int) -> RopeScaling | None:
        factor, older = (f"{self.architecture}.rope.{name}" for name in ("scaling.factor", "scale_linear"))
        unsaid = "linear" if factor in self.metadata or older in self.metadata else "none"  # llama.cpp's rule
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", unsaid)
        if _ROPE_FREQS in self._raw_entries:
            entry = self._raw_entries[_ROPE_FREQS]
            if entry.kind not in PLAIN_DTYPES:
                legal = "one of " + ", ".join(PLAIN_DTYPES)
                raise CheckpointError(f"{self.path.name}: {_ROPE_FREQS}", entry.kind, legal)
            data = self._map[entry.offset : entry.offset + entry.stored_bytes]
            factors = np.frombuffer(data, PLAIN_DTYPES[entry.kind])
            return self._llama3_scaling(factors.astype(np.float64), theta, head_dim)
        if kind == "none":
            return None
        if kind == "linear":
            name = "rope.scaling.factor" if factor in self.metadata else "rope.scale_linear"
            return RopeScaling("linear", float(self._number(name)))
        where = f"{self.path.name}: {self.architecture}.rope.scaling.type"
        raise CheckpointError(where, kind, "none or linear, or a tensor rope_freqs.weight of Llama 3's kind")

    def _llama3_scaling(self, factors: np.ndarray, theta: float, head_dim: int) -> RopeScaling:
        """Llama 3's scaling back from the table of divisors that the file holds instead of it."""
        scaling = RopeScaling("llama3", float(factors.max(initial=1.0)))
        expected = llama3_divisors(scaling, theta, head_dim)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
            legal = "the frequencies of Llama 3's scaling with low 1, high 4 and 8192 original positions"
            raise CheckpointError(f"{self.path.name}: {_ROPE_FREQS}", "other frequencies", legal)
        return scaling


@functools.cache
def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by: [head_dim / 2], 1 to `factor`."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position / wavelengths  # turns of a frequency in the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)  # 0: low frequency, divided; 1: high frequency, left alone
    return 1.0 / ((1.0 - blend) / scaling.factor + blend)
