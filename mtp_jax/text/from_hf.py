"""Tokenizers of Hugging Face directories: tokenizer.json and the small files beside it."""

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from mtp_jax.errors import CheckpointError
from mtp_jax.text.tokenizer import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


_TEMPLATES = Path(__file__).parent / "templates"  # NAME.jinja for a model_type whose checkpoints have none


def tokenizer_from_directory(directory: Path, model_type: str | None = None) -> Tokenizer:
    """Builds the tokenizer from `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`.

    The chat template is `chat_template.jinja`, or else in `tokenizer_config.json`, or else our own for
    this type of model, where its publisher writes prompts by a program.

    Raises:
      CheckpointError: no tokenizer.json, or one of these files cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(str(path), "no such file", "the tokenizer in Hugging Face's fast format")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(str(path), f"unreadable ({error})", "a tokenizer.json") from error
    backend.no_truncation()
    backend.no_padding()
    config = _object(directory / "tokenizer_config.json")
    special = {**_special_tokens(_object(directory / "special_tokens_map.json")), **_special_tokens(config)}
    template = _chat_template(directory, config)
    if template is None and model_type is not None:
        template = _read(_TEMPLATES / f"{model_type}.jinja")
    return Tokenizer(backend, str(path), special, template)


def _object(path: Path) -> dict[str, object]:
    text = _read(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"unreadable ({error})", "JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), type(value).__name__, "a JSON object")
    return value


def _read(path: Path) -> str | None:
    """The file's text; None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), f"unreadable ({error})", "a readable text file") from error


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Special tokens by name; they are strings, or objects with the string as `content`."""
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _chat_template(directory: Path, config: Mapping[str, object]) -> str | dict[str, str] | None:
    text = _read(directory / "chat_template.jinja")
    if text is not None:
        return text
    value = config.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and {"name", "template"} <= entry.keys()]
        if len(named) == len(value):
            return {str(entry["name"]): str(entry["template"]) for entry in named}
    elif value is None or isinstance(value, str):
        return value
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    raise CheckpointError(where, type(value).__name__, "a text or a list of objects with name and template")
