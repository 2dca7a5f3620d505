"""Checkpoints on disk (GGUF, Hugging Face directories) as named NumPy arrays."""

from mtp_jax.loading.find import default_model_path, resolve_model, resolve_mtp_head
from mtp_jax.loading.gguf_file import GGUFFile
from mtp_jax.loading.safetensors_dir import SafetensorsDir, TensorFiles, open_mtp_head
from mtp_jax.loading.source import WeightSource

__all__ = [
    "GGUFFile",
    "SafetensorsDir",
    "TensorFiles",
    "WeightSource",
    "default_model_path",
    "open_mtp_head",
    "resolve_model",
    "resolve_mtp_head",
]
