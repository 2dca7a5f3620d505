"""A short name for a target's weights, by which an MTP head knows the model that it was trained for."""

import dataclasses
import hashlib
import json

import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.loading.source import WeightSource
from mtp_jax.models.registry import final_leaves

# What makes a model the same one, whatever file it is stored in: limits of use and stop tokens do not.
_IRRELEVANT = ("max_position_embeddings", "num_nextn_predict_layers", "eos_token_ids")
# Fields of the first version. Later ones count where they are not at their defaults, so that heads keep
# knowing their models when fields are added.
_FIRST = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_FIRST += ("num_key_value_heads", "head_dim", "intermediate_size", "rope_theta", "rope_scaling")
_FIRST += ("rms_norm_eps", "tie_word_embeddings", "attention_bias")
_FIRST += ("kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_position")


def target_fingerprint(source: WeightSource) -> str:
    """16 hexadecimal digits: the configuration's shaping fields and the weights of the final norm.

    The final norm is small, and no two trainings give the same one. It is taken in float32, so the same
    weights stored in another type that holds them exactly give the same digits. Where a mixer of residual
    streams takes its place, the norm is the mixer's.
    """
    norm = final_leaves(source.config)[0].stored[0].tensors[0][0]
    return fingerprint(source.config, source.read(norm))


def fingerprint(config: ModelConfig, final_norm: np.ndarray) -> str:
    """As `target_fingerprint`, of a configuration and the final norm [D]."""
    shaping = _shaping(config)
    digest = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(final_norm, np.float32).tobytes())
    return digest.hexdigest()[:16]


def _shaping(value: object) -> object:
    """Floats as float32 holds them: GGUF stores 1e-5 in 4 bytes, config.json in decimal."""
    if dataclasses.is_dataclass(value):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {
            field.name: _shaping(inner)
            for field, inner in fields
            if field.name not in _IRRELEVANT and (field.name in _FIRST or inner != field.default)
        }
    return float(np.float32(value)) if isinstance(value, float) else value
