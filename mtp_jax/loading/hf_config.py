"""`config.json` of Hugging Face directories as a `ModelConfig`."""

import json
from collections.abc import Mapping
from pathlib import Path

from mtp_jax.config import ModelConfig, RopeScaling
from mtp_jax.errors import CheckpointError
from mtp_jax.loading.source import MAX_LAYERS

MODEL_TYPES = ("llama", "qwen2", "mimo")
_HUGE = 1e30  # JSON has integers that no float holds, and Python reads Infinity
_BIASED = ("qwen2", "mimo")  # q, k and v have biases whatever the configuration says


class _Fields:
    """Typed look-ups in a JSON object whose errors name file and field."""

    def __init__(self, where: str, values: Mapping[str, object]):
        self.where, self.values = where, values

    def fail(self, key: str, legal: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}", self.values.get(key), legal)

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bound = f" and at most {most}" if isinstance(value, int) and value > most else ""
            raise self.fail(key, f"an integer of at least {least}{bound}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _HUGE:
            raise self.fail(key, "a number above 0")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: absent, null, one or several."""
        value = self.values.get(key)
        several = value if isinstance(value, list) else [] if value is None else [value]
        ids = tuple(one for one in several if isinstance(one, int) and not isinstance(one, bool))
        if len(ids) < len(several):
            raise self.fail(key, "a token id or a list of them")
        return ids

    def must_be(self, key: str, legal: tuple[object, ...]) -> None:
        """Refuses features that we would silently leave out."""
        if key in self.values and self.values[key] not in legal:
            raise self.fail(key, " or ".join(repr(one) for one in legal))

    def mapping(self, key: str) -> "_Fields":
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return _Fields(f"{self.where}: {key}", value)

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value


def read_json(path: Path) -> Mapping[str, object]:
    """A JSON object from a file.

    Raises:
      CheckpointError: no such file, or no JSON object in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(str(path), "no such file", "a model directory with this file") from error
    except OSError as error:
        raise CheckpointError(str(path), error.strerror, "a readable file") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"unreadable ({error})", "JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), type(value).__name__, "a JSON object")
    return value


def config_from_directory(directory: Path) -> ModelConfig:
    """Reads `config.json`, and end-of-sequence ids of `generation_config.json` where there is one.

    Raises:
      CheckpointError: names the field; unsupported model type or feature, or a value out of range.
    """
    fields = _Fields("config.json", read_json(directory / "config.json"))
    generation = directory / "generation_config.json"
    extra = _Fields(generation.name, read_json(generation) if generation.is_file() else {})
    model_type = fields.values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise fields.fail("model_type", "one of " + ", ".join(MODEL_TYPES))
    _refuse_features(fields)
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    if fields.values.get("head_dim") is None and width % heads:
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads, {heads}, or a head_dim")
    head_dim = fields.integer("head_dim", width // heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "an even number")
    return ModelConfig(
        model_type=str(model_type),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=width,
        num_hidden_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rope_theta=_rope_theta(fields),
        rope_scaling=_rope_scaling(fields),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        attention_bias=model_type in _BIASED,
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS),
        eos_token_ids=tuple(dict.fromkeys(fields.ids("eos_token_id") + extra.ids("eos_token_id"))),
    )


def _refuse_features(fields: _Fields) -> None:
    fields.must_be("hidden_act", ("silu",))
    fields.must_be("mlp_bias", (False, None))
    fields.must_be("use_sliding_window", (False, None))
    fields.must_be("partial_rotary_factor", (1, None))
    fields.must_be("quantization_config", (None,))
    if fields.values["model_type"] == "llama":
        fields.must_be("attention_bias", (False, None))  # Llama's would bias the output projection too


def _rope_theta(fields: _Fields) -> float:
    """`rope_theta`, or the same inside the newer `rope_parameters`."""
    newer = fields.mapping("rope_parameters")
    newer.must_be("partial_rotary_factor", (1, None))
    return newer.number("rope_theta", fields.number("rope_theta", 10000.0))


def _rope_scaling(fields: _Fields) -> RopeScaling | None:
    """`rope_scaling`, or the newer `rope_parameters`; the kind is `rope_type` or the older `type`."""
    key = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    scaling = fields.mapping(key)
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
    raise scaling.fail(name, "default, linear or llama3")
