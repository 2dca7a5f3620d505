"""Tiny models and packed rows for the trainer's tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.models.registry import mtp_table
from mtp_jax.train.trunk import Packed, Target, read_target
from mtp_jax.train.unroll import Params
from tests.parity.rig import RandomSource

LLAMA = ModelConfig(
    model_type="llama",
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    tie_word_embeddings=True,
    num_nextn_predict_layers=1,
)
MIMO = dataclasses.replace(LLAMA, model_type="mimo", attention_bias=True, tie_word_embeddings=False)


def target_of(config: ModelConfig, seed: int = 0) -> Target:
    """A random target in fp32."""
    source = RandomSource(config, seed)
    return jax.tree.map(
        jnp.asarray, read_target(config, source.read, jnp.dtype("float32"), lambda done, total: None)
    )


def params_of(config: ModelConfig, seed: int = 0) -> Params:
    """A random MTP module in fp32."""
    source = RandomSource(config, head_seed=seed)
    return {
        leaf.name: jnp.asarray(leaf.read(source.read, "model.mtp_layers.0.")) for leaf in mtp_table(config)
    }


def pack(lengths: list[list[int]], prompts: int, length: int, vocab: int, seed: int = 0) -> Packed:
    """Rows of samples with these lengths, the rest padding; a sample's first `prompts` tokens are given.

    A row's first, third, ... sample was written greedily.
    """
    rng = np.random.default_rng(seed)
    shape = (len(lengths), length)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, np.bool_)
    for row, sizes in enumerate(lengths):
        start = 0
        for number, size in enumerate(sizes, 1):
            at = slice(start, start + size)
            tokens[row, at] = rng.integers(0, vocab, size)
            segments[row, at] = number
            positions[row, at] = np.arange(size)
            mask[row, start + prompts : start + size] = True
            start += size
    greedy = segments % 2 == 1
    return Packed(*map(jnp.asarray, (tokens, segments, positions, mask, greedy)))
