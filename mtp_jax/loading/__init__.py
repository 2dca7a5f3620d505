"""Checkpoints on disk (GGUF, Hugging Face directories) as named NumPy arrays."""

from mtp_jax.loading.find import default_model_path, resolve_model
from mtp_jax.loading.gguf_file import GGUFFile
from mtp_jax.loading.mtp_head import MTPHead, find_mtp_head, open_mtp_head, resolve_mtp_head
from mtp_jax.loading.placed_dir import PlacedDir
from mtp_jax.loading.safetensors_dir import SafetensorsDir
from mtp_jax.loading.source import WeightSource
from mtp_jax.loading.tensor_files import TensorFiles

__all__ = [
    "GGUFFile",
    "MTPHead",
    "PlacedDir",
    "SafetensorsDir",
    "TensorFiles",
    "WeightSource",
    "default_model_path",
    "find_mtp_head",
    "open_mtp_head",
    "resolve_model",
    "resolve_mtp_head",
]
