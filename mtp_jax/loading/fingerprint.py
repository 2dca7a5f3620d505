"""A short name for a target's weights, by which an MTP head knows the model that it was trained for."""

import dataclasses
import hashlib
import json

import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.loading.source import WeightSource

# What makes a model the same one, whatever file it is stored in: limits of use and stop tokens do not.
_SHAPING = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("max_position_embeddings", "num_nextn_predict_layers", "eos_token_ids")
)


def target_fingerprint(source: WeightSource) -> str:
    """16 hexadecimal digits: the configuration's shaping fields and the weights of the final norm.

    The final norm is small, and no two trainings give the same one. It is taken in float32, so the same
    weights stored in another type that holds them exactly give the same digits.
    """
    return fingerprint(source.config, source.read("model.norm.weight"))


def fingerprint(config: ModelConfig, final_norm: np.ndarray) -> str:
    """As `target_fingerprint`, of a configuration and the final norm [D]."""
    fields = dataclasses.asdict(config)
    shaping = {name: _single(fields[name]) for name in _SHAPING}
    digest = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(final_norm, np.float32).tobytes())
    return digest.hexdigest()[:16]


def _single(value: object) -> object:
    """Floats as float32 holds them: GGUF stores 1e-5 in 4 bytes, config.json in decimal."""
    if isinstance(value, dict):
        return {key: _single(inner) for key, inner in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value
