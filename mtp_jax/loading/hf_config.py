"""`config.json` of Hugging Face directories as a `ModelConfig`."""

from pathlib import Path

from mtp_jax.config import ExpertsConfig, ModelConfig, RopeScaling
from mtp_jax.loading.hf_fields import Fields, read_json
from mtp_jax.loading.hf_parts import (
    blocks_config,
    delta_config,
    experts_config,
    indexer_config,
    latent_config,
    ngram_config,
    qwen_experts_config,
    streams_config,
)
from mtp_jax.loading.source import MAX_LAYERS
from mtp_jax.models.registry import FAMILIES

_BIASED = ("qwen2", "mimo")  # q, k and v have biases whatever the configuration says
_LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_EXPERTS = (*_LATENT, "glm4_moe")
_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
_QWEN_EXPERTS = ("qwen3_next", "qwen3_5_moe", "qwen4_exp")
_TEXT_ONLY = "_text"  # at the end of a type: exports without the parts for images
_OUTER = ("model_type", "tie_word_embeddings")  # where parts for images are beside the text's
_PARTIAL = {"glm4_moe": 0.5} | dict.fromkeys(_DELTA, 0.25)  # rotated, by default


def config_from_directory(directory: Path) -> ModelConfig:
    """Reads `config.json`, and end-of-sequence ids of `generation_config.json` where there is one.

    Raises:
      CheckpointError: names the field; unsupported model type or feature, or a value out of range.
    """
    fields = Fields("config.json", read_json(directory / "config.json"))
    generation = directory / "generation_config.json"
    extra = Fields(generation.name, read_json(generation) if generation.is_file() else {})
    fields = _text_fields(fields)
    model_type = str(fields.values["model_type"])
    _refuse_features(fields)
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    grouped = model_type not in _LATENT  # the others have no use for head_dim, whatever it says
    if grouped and fields.values.get("head_dim") is None and width % heads:
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads, {heads}, or a head_dim")
    head_dim = fields.integer("head_dim", max(width // heads, 1))
    if grouped and head_dim % 2:
        raise fields.fail("head_dim", "an even number")
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    latent = latent_config(fields) if model_type in _LATENT else None
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1 if model_type in _QWEN_EXPERTS[1:] else None),
        rope_theta=_rope_theta(fields),
        rope_scaling=_rope_scaling(fields),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        attention_bias=model_type in _BIASED or (model_type == "glm4_moe" and fields.flag("attention_bias")),
        num_nextn_predict_layers=_mtp_modules(fields),
        eos_token_ids=tuple(dict.fromkeys(fields.ids("eos_token_id") + extra.ids("eos_token_id"))),
        rotary_dim=_rotary_dim(fields, head_dim),
        qk_norm=model_type in _DELTA or fields.flag("use_qk_norm"),
        latent=latent,
        indexer=indexer_config(fields, layers, model_type) if model_type in _INDEXED else None,
        experts=_experts(fields, layers),
        delta=delta_config(fields, layers) if model_type in _DELTA else None,
        output_gate=model_type in _DELTA,
        zero_centred_norms=model_type in _DELTA,
        blocks=blocks_config(fields, _rotary_dim(fields, head_dim) or head_dim)
        if model_type == "qwen4_exp"
        else None,
        streams=streams_config(fields) if model_type == "qwen4_exp" else None,
        ngram=ngram_config(fields, layers) if model_type == "qwen4_exp" else None,
    )


def _text_fields(fields: Fields) -> Fields:
    """The text model's fields under its family's `model_type`, with or without parts for images beside it."""
    model_type = fields.values.get("model_type")
    family = model_type.removesuffix(_TEXT_ONLY) if isinstance(model_type, str) else None
    if family not in FAMILIES or (family != model_type and family not in _DELTA):
        raise fields.fail("model_type", "one of " + ", ".join(FAMILIES))
    if "text_config" in fields.values:
        inner = fields.mapping("text_config")
        outer = {key: fields.values[key] for key in _OUTER if key in fields.values}
        fields = Fields(inner.where, dict(inner.values) | outer)
    return Fields(fields.where, dict(fields.values) | {"model_type": family})


def _mtp_modules(fields: Fields) -> int:
    """MTP modules; Qwen3-Next does not say, and its weights decide (see `SafetensorsDir`)."""
    model_type = str(fields.values["model_type"])
    return fields.integer(
        mtp_count_field(model_type), 1 if model_type == "qwen3_next" else 0, least=0, most=MAX_LAYERS
    )


def mtp_count_field(model_type: str) -> str:
    """Where config.json says how many MTP modules there are."""
    return "mtp_num_hidden_layers" if model_type in _DELTA else "num_nextn_predict_layers"


def _experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    if fields.values["model_type"] in _EXPERTS:
        return experts_config(fields, layers)
    if fields.values["model_type"] in _QWEN_EXPERTS:
        return qwen_experts_config(fields, layers)
    return None


def _refuse_features(fields: Fields) -> None:
    fields.must_be("hidden_act", ("silu",))
    fields.must_be("mlp_bias", (False, None))
    fields.must_be("use_sliding_window", (False, None))
    model_type = fields.values["model_type"]
    if model_type not in _PARTIAL:
        fields.must_be("partial_rotary_factor", (1, None))
        fields.must_be("use_qk_norm", (False, None))
    if model_type in _DELTA:
        fields.must_be("attn_output_gate", (True, None))
        gates = ("swish", "silu", None) if model_type != "qwen4_exp" else ("sigmoid", "silu", "swish", None)
        fields.must_be("output_gate_type", gates)
        fields.must_be("attention_bias", (False, None))
        fields.must_be("mtp_use_dedicated_embeddings", (False, None))
    if model_type == "llama" or model_type in _LATENT:
        fields.must_be("attention_bias", (False, None))  # Llama's would bias the output projection too


def _rotary_dim(fields: Fields, head_dim: int) -> int | None:
    """How many features of a head are rotated; None: all."""
    newer = fields.mapping("rope_parameters")
    usual = _PARTIAL.get(str(fields.values["model_type"]))
    if usual is None:
        newer.must_be("partial_rotary_factor", (1, None))
        return None
    factor = newer.number("partial_rotary_factor", fields.number("partial_rotary_factor", usual))
    rotated = int(head_dim * factor)
    if factor > 1 or rotated % 2 or not rotated:
        raise fields.fail("partial_rotary_factor", f"a share of head_dim, {head_dim}, that is an even number")
    return None if rotated == head_dim else rotated


def _rope_theta(fields: Fields) -> float:
    """`rope_theta`, or the same inside the newer `rope_parameters`."""
    newer = fields.mapping("rope_parameters")
    return newer.number("rope_theta", fields.number("rope_theta", 10000.0))


def _agree(newer: object, older: object) -> bool:
    """Whether two descriptions of rotary scaling say the same of what both name; `type` is `rope_type`."""
    both = [
        {"rope_type" if key == "type" else key: value for key, value in each.items()}
        for each in (newer, older)
        if isinstance(each, dict)
    ]
    return (
        len(both) == 2
        and all(both[0].get(key, value) == value for key, value in both[1].items())
        and (both[0].get("rope_type", "default") == both[1].get("rope_type", "default"))
    )


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    """`rope_scaling`, or the newer `rope_parameters`; the kind is `rope_type` or the older `type`."""
    newer, older = (fields.values.get(key) for key in ("rope_parameters", "rope_scaling"))
    if newer and older and not _agree(newer, older):
        raise fields.fail("rope_scaling", "null, or what rope_parameters says, which is there too")
    scaling = fields.mapping("rope_parameters" if newer else "rope_scaling")
    name = "rope_type" if "rope_type" in scaling.values else "type"
    match scaling.values.get(name, "default"):
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", scaling.number("factor"))
        case "llama3":
            original = fields.integer("original_max_position_embeddings", 8192)
            return RopeScaling(
                "llama3",
                scaling.number("factor"),
                scaling.number("low_freq_factor"),
                scaling.number("high_freq_factor"),
                scaling.integer("original_max_position_embeddings", original),
            )
        case "yarn" if fields.values["model_type"] in _LATENT:
            scaling.must_be("attention_factor", (None,))  # it would take the place of what mscale comes to
            scaling.must_be("truncate", (True, None))
            original = fields.integer("max_position_embeddings", 4096)
            return RopeScaling(
                "yarn",
                scaling.number("factor"),
                original_max_position=scaling.integer("original_max_position_embeddings", original),
                beta_fast=scaling.number("beta_fast", 32.0),
                beta_slow=scaling.number("beta_slow", 1.0),
                mscale=scaling.number("mscale", 1.0),
                mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
            )
    raise scaling.fail(name, "default, linear or llama3; yarn with latent attention")
