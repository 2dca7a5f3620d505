"""Trained weights as safetensors in the checkpoints' own names."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mtp_jax.config import ModelConfig
from mtp_jax.train.unroll import Params

MTP_PREFIX = "model.mtp_layers.0."
DRAFT_VOCAB_IDS = MTP_PREFIX + "draft_vocab_ids"
FORMAT = "mtp-jax head 1"
_MTP_NAMES = {
    "hidden_norm": "hidden_layernorm",
    "token_norm": "token_layernorm",
    "input_proj": "input_proj",
    "final_norm": "final_layernorm",
}


@dataclasses.dataclass(frozen=True)
class HeadInfo:
    """What a head says about itself in its file's header, as text."""

    target: str  # the target's name
    target_fingerprint: str  # of `mtp_jax.loading.fingerprint`
    steps: int
    accepted: tuple[float, ...]  # held-out share of lines whose drafts 1..j were all the target's best token
    accepted_of: Literal["greedy text", "sampled text"]  # the lines that were counted

    def metadata(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "target": self.target,
            "target_fingerprint": self.target_fingerprint,
            "steps": str(self.steps),
            "acceptance": " ".join(f"{share:.4f}" for share in self.accepted),
            "acceptance_of": self.accepted_of,
        }


def layer_tensors(config: ModelConfig, layer: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A decoder layer's leaves as Hugging Face tensors: the inverse of `registry.layer_leaves`."""
    d = config.hidden_size
    qkv = layer["qkv"]  # G Q+2 H D
    tensors = {
        "input_layernorm.weight": layer["input_norm"],
        "self_attn.q_proj.weight": qkv[:, :-2].reshape(-1, d),
        "self_attn.k_proj.weight": qkv[:, -2].reshape(-1, d),
        "self_attn.v_proj.weight": qkv[:, -1].reshape(-1, d),
        "self_attn.o_proj.weight": layer["o"].reshape(d, -1),
        "post_attention_layernorm.weight": layer["post_norm"],
        "mlp.gate_proj.weight": layer["gate_up"][0],
        "mlp.up_proj.weight": layer["gate_up"][1],
        "mlp.down_proj.weight": layer["down"],
    }
    if "qkv_bias" in layer:
        bias = layer["qkv_bias"]  # G Q+2 H
        tensors["self_attn.q_proj.bias"] = bias[:, :-2].reshape(-1)
        tensors["self_attn.k_proj.bias"] = bias[:, -2].reshape(-1)
        tensors["self_attn.v_proj.bias"] = bias[:, -1].reshape(-1)
    return tensors


def mtp_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """An MTP module's leaves as tensors `model.mtp_layers.0.*`, fp32."""
    host = {name: np.asarray(leaf) for name, leaf in params.items()}
    inner = {name.removeprefix("layer."): leaf for name, leaf in host.items() if name.startswith("layer.")}
    tensors = {f"{stored}.weight": host[name] for name, stored in _MTP_NAMES.items()}
    return {MTP_PREFIX + name: tensor for name, tensor in (tensors | layer_tensors(config, inner)).items()}


def save_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], dtype: np.dtype
) -> None:
    """Writes floating tensors as `dtype` and integers as they are; the file appears whole or not at all."""

    def convert(tensor: np.ndarray) -> np.ndarray:
        floating = not np.issubdtype(tensor.dtype, np.integer)
        return np.ascontiguousarray(tensor.astype(dtype) if floating else tensor)

    part = path.with_name(path.name + ".part")
    save_file({name: convert(tensor) for name, tensor in tensors.items()}, part, dict(metadata))
    part.replace(path)


def export_head(
    path: Path, config: ModelConfig, params: Params, draft_ids: np.ndarray | None, info: HeadInfo
) -> None:
    """Writes a stand-alone head in bfloat16, with the ids of its draft vocabulary [Vd] if it has one."""
    tensors = mtp_tensors(config, params)
    if draft_ids is not None:
        tensors[DRAFT_VOCAB_IDS] = draft_ids.astype(np.int32)
    save_tensors(path, tensors, info.metadata(), np.dtype(ml_dtypes.bfloat16))
