"""What every checkpoint offers, whatever it is stored in, and the shapes it must have."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.errors import CheckpointError
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


def block_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Names (inside one decoder layer) and shapes of its tensors."""
    width, ffn = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
    }
    if config.attention_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", queries), ("k", keys), ("v", keys))}
    return shapes


def mtp_shapes(config: ModelConfig, index: int = 0) -> dict[str, Shape]:
    """Names and shapes of MTP module `index`, named as in MiMo's checkpoints."""
    width = config.hidden_size
    own: dict[str, Shape] = {
        "token_layernorm.weight": (width,),
        "hidden_layernorm.weight": (width,),
        "input_proj.weight": (width, 2 * width),  # columns: hidden, then embedding
        "final_layernorm.weight": (width,),
    }
    return {f"model.mtp_layers.{index}.{k}": v for k, v in (own | block_shapes(config)).items()}


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a model of this configuration needs, MTP modules included."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{k}": v for k, v in block_shapes(config).items()}
    for index in range(config.num_nextn_predict_layers):
        shapes |= mtp_shapes(config, index)
    return shapes


def check_shapes(where: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Compares a checkpoint's tensors with what its configuration asks for.

    Tensors that nobody asked for are an error too: a model with parts that we would leave out
    gives wrong answers instead of none.

    Raises:
      CheckpointError: a tensor is missing, has another shape, or is not understood.
    """
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: {name}", "no such tensor", f"a tensor of shape {list(shape)}")
        if found[name] != shape:
            raise CheckpointError(f"{where}: {name}", list(found[name]), f"shape {list(shape)}")
    extra = sorted(set(found) - set(expected))
    if extra:
        raise CheckpointError(f"{where}: {extra[0]}", "a tensor that this model type does not have", "none")


def count_text(config: ModelConfig) -> str:
    """Parameter count of the target in words, such as `135M`."""
    total = sum(int(np.prod(s)) for n, s in expected_shapes(config).items() if ".mtp_layers." not in n)
    return f"{total / 1e9:.1f}B" if total >= 1e9 else f"{total / 1e6:.0f}M" if total >= 1e6 else str(total)
