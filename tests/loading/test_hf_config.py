"""config.json: the older and newer forms, defaults, and refusals that name the field."""

import json
from pathlib import Path

import pytest

from mtp_jax.config import RopeScaling
from mtp_jax.errors import CheckpointError
from mtp_jax.loading.hf_config import config_from_directory

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.fixture
def read(tmp_path):
    """Reads BASE with changes; a value of None removes the field."""

    def make(generation: dict[str, object] | None = None, **changes: object):
        values = {key: value for key, value in (BASE | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return config_from_directory(tmp_path)

    return make


def test_defaults(read):
    config = read(num_key_value_heads=None)
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.attention_bias) == (1e-6, False, False)
    assert (config.eos_token_ids, config.rope_scaling) == ((), None)


def test_head_dim_of_its_own(read):
    assert read(head_dim=32).head_dim == 32


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_text_only_exports(family, tmp_path):
    """`..._text` has at the top what else is in `text_config`, and is the same model."""
    whole = GOLDEN / f"tiny_{family}"
    values = json.loads((whole / "config.json").read_text())
    alone = values["text_config"] | {"model_type": f"{family}_text"}
    (tmp_path / "config.json").write_text(json.dumps(alone))
    assert config_from_directory(tmp_path) == config_from_directory(whole)


def test_no_other_type_has_a_text_only_form(read):
    with pytest.raises(CheckpointError, match="model_type: got 'llama_text'; expected one of"):
        read(model_type="llama_text")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_layer_ids": [2, 3]}, "ple_layer_ids: got [2, 3]; expected one layer, 1 to 5"),
        ({"ple_layer_ids": [6]}, "ple_layer_ids: got [6]; expected one layer, 1 to 5"),
        ({"ple_embed_dim": 30}, "ple_embed_dim: got 30; expected a multiple of 8, the heads of all n-grams"),
        ({"split_ngram_parts": 7}, "split_ngram_parts: got 7; expected a divisor of the table's 416 rows"),
        ({"eos_token_id": None}, "eos_token_id: got None; expected a token id, where n-grams end"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: got 2; expected 1"),
        (
            {"indexer_head_dim": 6},
            "indexer_head_dim: got 6; expected at least the rotated features of a head, 8",
        ),
        ({"hc_count": 1}, "hc_count: got 1; expected an integer of at least 2"),
        ({"output_gate_type": "tanh"}, "output_gate_type: got 'tanh'; expected 'sigmoid' or"),
    ],
)
def test_refusals_of_qwen4_exp(changes, message, tmp_path):
    values = json.loads((GOLDEN / "tiny_qwen4_exp/config.json").read_text())
    values["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        config_from_directory(tmp_path)
    assert message in str(caught.value)


def test_an_indexer_needs_the_latent_of_queries(tmp_path):
    values = json.loads((GOLDEN / "tiny_deepseek_v32/config.json").read_text()) | {"q_lora_rank": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="q_lora_rank: got None; expected an integer"):
        config_from_directory(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2", "mimo"])
def test_biased_families(read, model_type):
    assert read(model_type=model_type).attention_bias


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, 5e5, RopeScaling("linear", 2)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            1e4,
            RopeScaling("llama3", 8, 1, 4, 512),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 7e4, "factor": 2},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            7e4,
            RopeScaling("linear", 2),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4, **LLAMA3}},
            7e4,
            RopeScaling("llama3", 8, 1, 4, 512),
        ),
    ],
)
def test_rotary_settings_in_both_forms(read, changes, theta, scaling):
    config = read(**changes)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_end_of_sequence_ids_of_both_files(read):
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read({"eos_token_id": [7, 9]}, eos_token_id=[8, 7]).eos_token_ids == (8, 7, 9)
    assert read({"eos_token_id": 3}).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: got 'gpt2'; expected one of llama, qwen2, mimo"),
        ({"model_type": None}, "model_type: got None"),
        ({"hidden_size": None}, "hidden_size: got None; expected an integer"),
        ({"hidden_size": "64"}, "hidden_size: got '64'"),
        ({"vocab_size": 0}, "vocab_size: got 0; expected an integer of at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3; expected a divisor"),
        ({"hidden_size": 66}, "hidden_size: got 66; expected a multiple of num_attention_heads, 4"),
        ({"head_dim": 15}, "head_dim: got 15; expected an even number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: got -1; expected a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'; expected 'silu'"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"mlp_bias": True}, "mlp_bias: got True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window: got True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: rope_type: got 'yarn'.*llama3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: got None"),
        ({"rope_scaling": 3}, "rope_scaling: got 3; expected an object"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 7e4},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            "rope_scaling: got .*linear.*; expected null, or what rope_parameters says",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000; .* at most 10000"),
        ({"hidden_size": 10**400}, "hidden_size: got 1000.*at most"),
        ({"rope_theta": 10**400}, "rope_theta: got 1000.*above 0"),
        ({"rope_theta": float("inf")}, "rope_theta: got inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan"),
        ({"rope_scaling": [1]}, r"rope_scaling: got \[1\]; expected an object"),
        ({"model_type": ["llama"]}, "model_type: got"),
        ({"eos_token_id": "</s>"}, "eos_token_id: got '</s>'; expected a token id"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: got -1"),
    ],
)
def test_refusals_name_the_field(read, changes, message):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {message}"):
        read(**changes)


def test_no_configuration(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: got 'no such file'"):
        config_from_directory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "5", "", "\ufeff{}", "[" * 100_000])
def test_a_configuration_that_is_no_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        config_from_directory(tmp_path)


def test_a_configuration_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").mkdir()  # root may read every file, but no directory as one
    with pytest.raises(CheckpointError, match=r"config\.json: got 'Is a directory'"):
        config_from_directory(tmp_path)
