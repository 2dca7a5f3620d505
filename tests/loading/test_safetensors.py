"""Hugging Face directories: what loads, and a clear error for each thing that can be wrong."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.errors import CheckpointError
from mtp_jax.loading import SafetensorsDir, open_mtp_head, resolve_mtp_head
from mtp_jax.models.ngram import table_leaf

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tmp_path):
    """Copies a golden checkpoint to a place where it may be damaged."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return make


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(directory: Path, remove: str = "", **add: np.ndarray) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | add
    save_file({name: value for name, value in tensors.items() if name != remove}, path)


def test_one_file():
    source = SafetensorsDir(GOLDEN / "tiny_qwen2")
    stored = load_file(GOLDEN / "tiny_qwen2" / "model.safetensors")
    assert source.names() == set(stored)
    for name, expected in stored.items():
        np.testing.assert_array_equal(source.read(name), expected)
        assert source.nbytes(name) == expected.nbytes and source.shape(name) == expected.shape
    assert "tiny_qwen2" in source.describe() and "0.2 MB of float32" in source.describe()


def test_shards_of_bfloat16():
    source = SafetensorsDir(GOLDEN / "tiny_llama3")
    assert len(list((GOLDEN / "tiny_llama3").glob("*.safetensors"))) == 3
    assert "lm_head.weight" not in source.names() and source.config.tie_word_embeddings
    for name in source.names():
        value = source.read(name)
        assert value.dtype == source.dtype(name) == ml_dtypes.bfloat16
        assert value.nbytes == source.nbytes(name)
    assert source.config.eos_token_ids == (2, 5)  # 5 is in generation_config.json only


def test_reads_are_safe_from_several_threads():
    source = SafetensorsDir(GOLDEN / "tiny_llama3")
    names = sorted(source.names()) * 20
    expected = {name: source.read(name) for name in names}
    with ThreadPoolExecutor(8) as pool:
        for name, got in zip(names, pool.map(source.read, names), strict=True):
            np.testing.assert_array_equal(got, expected[name])


def test_several_files_without_an_index(copy):
    directory = copy("tiny_llama3")
    expected = SafetensorsDir(directory).names()
    (directory / INDEX).unlink()
    assert SafetensorsDir(directory).names() == expected


def test_the_mtp_module_is_part_of_the_checkpoint():
    source = SafetensorsDir(GOLDEN / "tiny_mimo")
    assert source.config.num_nextn_predict_layers == 1
    assert source.shape("model.mtp_layers.0.input_proj.weight") == (32, 64)
    assert "1 MTP module" in source.describe()


def test_a_shard_of_the_index_is_missing(copy):
    directory = copy("tiny_llama3")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors.*no such file"):
        SafetensorsDir(directory)


def test_a_shard_without_the_tensor_of_the_index(copy):
    directory = copy("tiny_llama3")
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = "model-00001-of-00003.safetensors"
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors: model\.layers\.7"):
        SafetensorsDir(directory)


@pytest.mark.parametrize("value", [None, {}, [], {"model.norm.weight": 5}])
def test_an_index_without_a_map(copy, value):
    directory = copy("tiny_llama3")
    (directory / INDEX).write_text(json.dumps({"weight_map": value}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: got "):
        SafetensorsDir(directory)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard(copy, keep):
    directory = copy("tiny_qwen2")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: got 'unreadable or cut short"):
        SafetensorsDir(directory)


def test_no_weights_at_all(copy):
    directory = copy("tiny_qwen2")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights.*safetensors files"):
        SafetensorsDir(directory)


def test_a_name_in_two_files(copy):
    directory = copy("tiny_qwen2")
    shutil.copy(directory / "model.safetensors", directory / "again.safetensors")
    with pytest.raises(CheckpointError, match=r"the same name in again\.safetensors"):
        SafetensorsDir(directory)


def test_a_missing_tensor(copy):
    directory = copy("tiny_qwen2")
    edit_weights(directory, remove="model.layers.1.self_attn.k_proj.bias")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.bias.*no such tensor.*\[16\]"):
        SafetensorsDir(directory)


def test_a_tensor_that_nobody_asked_for(copy):
    directory = copy("tiny_qwen2")
    edit_weights(directory, **{"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=r"q_norm\.weight.*does not have"):
        SafetensorsDir(directory)


def test_an_element_type_we_cannot_read(copy):
    directory = copy("tiny_qwen2")
    edit_weights(directory, **{"model.norm.weight": np.ones(32, np.int8)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: got 'I8'.*F32, F16, BF16"):
        SafetensorsDir(directory)


def test_shapes_that_contradict_the_configuration(copy):
    directory = copy("tiny_qwen2")
    edit_config(directory, intermediate_size=96)
    with pytest.raises(
        CheckpointError, match=r"9 of another shape: .*gate_proj\.weight \[80, 32\] instead of \[96, 32\]"
    ):
        SafetensorsDir(directory)


def test_mtp_modules_promised_but_absent(copy, caplog):
    directory = copy("tiny_qwen2")
    edit_config(directory, num_nextn_predict_layers=1)
    assert SafetensorsDir(directory).config.num_nextn_predict_layers == 0
    assert "no MTP weights (model.mtp_layers.0.*), though config.json says so" in caplog.text


def test_mtp_modules_present_but_not_promised(copy):
    directory = copy("tiny_mimo")
    edit_config(directory, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers: got 0; expected 1"):
        SafetensorsDir(directory)


def test_tied_wins_over_a_stored_head(copy):
    directory = copy("tiny_qwen2")
    edit_config(directory, tie_word_embeddings=True)
    source = SafetensorsDir(directory)
    assert source.config.tie_word_embeddings and "lm_head.weight" not in source.names()


def test_an_untied_model_needs_its_head(copy):
    directory = copy("tiny_qwen2")
    edit_weights(directory, remove="lm_head.weight")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*no such tensor"):
        SafetensorsDir(directory)


def test_rotary_tables_of_old_checkpoints_are_ignored(copy):
    directory = copy("tiny_qwen2")
    edit_weights(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    assert SafetensorsDir(directory).names() == SafetensorsDir(GOLDEN / "tiny_qwen2").names()


def test_a_head_of_its_own(tmp_path):
    source = SafetensorsDir(GOLDEN / "tiny_mimo")
    tensors = {name: source.read(name) for name in source.names() if ".mtp_layers." in name}
    save_file(tensors, tmp_path / "head.safetensors")
    for place in (tmp_path, tmp_path / "head.safetensors"):
        head = open_mtp_head(resolve_mtp_head(place), source.config)
        assert head.tensors.names() == set(tensors)
        for name, expected in tensors.items():
            np.testing.assert_array_equal(head.read(name), expected)


def test_a_head_for_another_target(tmp_path):
    mimo, llama = SafetensorsDir(GOLDEN / "tiny_mimo"), SafetensorsDir(GOLDEN / "tiny_llama3")
    tensors = {name: mimo.read(name) for name in mimo.names() if ".mtp_layers." in name}
    path = tmp_path / "head.safetensors"
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"head\.safetensors: tensors: got '4 of another shape: model"):
        open_mtp_head(path, llama.config)
    tensors.pop("model.mtp_layers.0.input_proj.weight")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"mtp_layers\.0\.input_proj\.weight.*no such tensor"):
        open_mtp_head(path, mimo.config)


def test_a_text_only_export_has_the_same_tensors(tmp_path):
    """Its names lack `language_model.`, and there are no parts for images."""
    whole = GOLDEN / "tiny_qwen3_5_moe"
    config = json.loads((whole / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_5_moe_text"}))
    stored = load_file(whole / "model.safetensors")
    save_file(
        {
            name.replace("model.language_model.", "model."): value
            for name, value in stored.items()
            if not name.startswith("model.visual.")
        },
        tmp_path / "model.safetensors",
    )
    one, two = SafetensorsDir(whole), SafetensorsDir(tmp_path)
    assert one.config == two.config and one.names() == two.names()
    for name in one.names():
        np.testing.assert_array_equal(one.read(name), two.read(name))


NGRAMS = "model.language_model.layers.1.ple.ple_embedding."


def test_a_table_of_ngrams_in_parts_or_whole(copy):
    """As the release has it, and as one tensor; a shard of the mesh reads only what it holds."""
    directory = copy("tiny_qwen4_exp")
    source = SafetensorsDir(directory)
    leaf = table_leaf(source.config)
    parts = leaf.read(source.read, "", source.names())
    asked: list[str] = []
    some = leaf.read(lambda name: asked.append(name) or source.read(name), "", source.names(), range(2, 4))
    np.testing.assert_array_equal(some, parts[2:])
    assert [name[-8] for name in asked] == ["2", "3"]
    tensors = load_file(directory / "model.safetensors")
    shards = [tensors.pop(f"{NGRAMS}ngram_embedding.shard_{part}.weight") for part in range(4)]
    tensors[f"{NGRAMS}ngram_embedding.weight"] = np.concatenate(shards)
    save_file(tensors, directory / "model.safetensors")
    source = SafetensorsDir(directory)
    np.testing.assert_array_equal(leaf.read(source.read, "", source.names()), parts)


def test_hash_constants_of_another_seed(copy):
    directory = copy("tiny_qwen4_exp")
    assert not any("layer_multipliers" in name for name in SafetensorsDir(directory).names())
    edit_weights(directory, **{f"{NGRAMS}layer_multipliers": np.array([3, 5, 7])})
    with pytest.raises(
        CheckpointError, match=r"layer_multipliers: got \(3, 5, 7\); expected .* by config.json"
    ):
        SafetensorsDir(directory)
