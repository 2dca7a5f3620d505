"""Stand-alone MTP heads: opening one, and finding the one that belongs to a target.

A head is a safetensors file with one MTP module, named as in MiMo's checkpoints (`model.mtp_layers.0.*`).
It may limit drafts to a part of the vocabulary: `model.mtp_layers.0.draft_vocab_ids`, int32 [Vd], ascending.
Its metadata names the target it was trained for by `target_fingerprint`.
"""

import dataclasses
import logging
from pathlib import Path

import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.errors import CheckpointError, InvalidValueError
from mtp_jax.loading.fingerprint import target_fingerprint
from mtp_jax.loading.quantised import PLAIN
from mtp_jax.loading.safetensors_dir import MTP_HEAD_FILE
from mtp_jax.loading.source import WeightSource, check_shapes
from mtp_jax.loading.tensor_files import TensorFiles
from mtp_jax.models.registry import mtp_prefix, mtp_tensors

log = logging.getLogger(__name__)

DRAFT_VOCAB_IDS = "draft_vocab_ids"
SHIPPED = Path(__file__).resolve().parents[1] / "heads"


@dataclasses.dataclass(frozen=True)
class MTPHead:
    """An open head; its tensors are read by their full names."""

    path: Path
    tensors: TensorFiles
    draft_vocab: int | None  # ids that drafts are chosen from; None: the whole vocabulary

    def read(self, name: str) -> np.ndarray:
        """A tensor of the head as stored."""
        return self.tensors.read(name)

    def fits(self, target: WeightSource) -> bool:
        """Whether the head was trained for this target; a head that does not say fits any."""
        wanted = self.tensors.metadata.get("target_fingerprint")
        return wanted is None or wanted == target_fingerprint(target)


def open_mtp_head(path: Path, config: ModelConfig) -> MTPHead:
    """A stand-alone MTP head.

    Args:
      path: a safetensors file.
      config: the target's; the head must have its widths.

    Raises:
      CheckpointError: unreadable, or tensors missing, misshapen, unknown or quantised.
    """
    tensors = TensorFiles([path])
    shapes = tensors.shapes
    ids_name = mtp_prefix(config) + DRAFT_VOCAB_IDS
    ids_shape = shapes.pop(ids_name, None)
    check_shapes(path.name, mtp_tensors(config, tensors.names()), shapes)
    for name in sorted(shapes):
        if tensors.dtype(name) not in PLAIN:
            legal = "float32, float16 or bfloat16"
            raise CheckpointError(f"{path.name}: {name}", str(tensors.dtype(name)), legal)
    if ids_shape is None:
        return MTPHead(path, tensors, None)
    ids = tensors.read(ids_name)
    ok = ids.dtype == np.int32 and ids.ndim == 1 and ids.size > 0
    if not (ok and ids[0] >= 0 and ids[-1] < config.vocab_size and (np.diff(ids) > 0).all()):
        legal = f"ascending int32 ids below the vocabulary's {config.vocab_size}"
        raise CheckpointError(f"{path.name}: {ids_name}", f"{ids.dtype} {list(ids_shape)}", legal)
    return MTPHead(path, tensors, int(ids.size))


def resolve_mtp_head(path: str | Path) -> Path:
    """The safetensors file of a stand-alone MTP head.

    Args:
      path: the file itself, or a directory with exactly one.

    Raises:
      InvalidValueError: field `--mtp-head`; no such file, or a choice of several.
    """
    legal = "an existing .safetensors file or a directory with exactly one"
    try:
        given = Path(path).expanduser()
        found = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
        exists = len(found) == 1 and found[0].is_file()
    except (OSError, RuntimeError) as error:  # no permission, a name too long; no home to expand
        raise InvalidValueError("--mtp-head", str(path), f"{legal} ({error})") from error
    if not exists or found[0].suffix != ".safetensors":
        raise InvalidValueError("--mtp-head", str(path), legal)
    return found[0]


def find_mtp_head(model: Path | None, target: WeightSource) -> MTPHead | None:
    """The head that belongs to a target without MTP weights of its own: beside it, or shipped with us.

    Beside a directory's weights it is called `mtp_head.safetensors`, beside NAME.gguf
    `NAME.mtp_head.safetensors`. Heads that were trained for another target are passed over.

    Args:
      model: where the target's weights are; None where they are in no file.
      target: the open target.

    Raises:
      CheckpointError: a head that lies beside the model and cannot be used.
    """
    beside = None
    if model is not None:
        beside = model / MTP_HEAD_FILE if model.is_dir() else model.with_suffix(f".{MTP_HEAD_FILE}")
    if beside is not None and beside.is_file():
        head = open_mtp_head(beside, target.config)
        if head.fits(target):
            return head
        log.warning("%s was trained for another model: not used", beside)
    for path in sorted(SHIPPED.glob(f"*/{MTP_HEAD_FILE}")):
        wanted = TensorFiles([path]).metadata.get("target_fingerprint")
        if wanted == target_fingerprint(target):
            return open_mtp_head(path, target.config)
    return None
