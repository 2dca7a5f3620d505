"""Trained weights as safetensors in the checkpoints' own names."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mtp_jax.config import ModelConfig
from mtp_jax.loading.mtp_head import DRAFT_VOCAB_IDS
from mtp_jax.models.leaves import tensors_of
from mtp_jax.models.registry import mtp_prefix, mtp_table
from mtp_jax.train.unroll import Params

FORMAT = "mtp-jax head 1"


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


def mtp_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """An MTP module's leaves as its family's tensors, fp32."""
    host = {name: np.asarray(leaf) for name, leaf in params.items()}
    return tensors_of(mtp_table(config), host, mtp_prefix(config))


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
        tensors[mtp_prefix(config) + DRAFT_VOCAB_IDS] = draft_ids.astype(np.int32)
    save_tensors(path, tensors, info.metadata(), np.dtype(ml_dtypes.bfloat16))
