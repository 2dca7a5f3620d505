"""Which parsers a model needs, by its chat template and its type."""

from mtp_jax.text.turn.formats import FORMATS, JSON
from mtp_jax.text.turn.parser import END_THINK

REASONING_PARSERS = ("think",)
TOOL_CALL_PARSERS = (*FORMATS, JSON)

# Texts that a template has all of -> parser; the first that fits.
_SIGNS = (
    (("｜DSML｜",), "deepseek_v32"),
    (("<function=",), "qwen3_coder"),
    (("<arg_key>",), "glm"),
    (("<tool_call>",), "hermes"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
)
# model_type -> (does it think, how it writes calls), for templates that do not tell.
_TYPES: dict[str, tuple[bool, str]] = {
    "deepseek_v3": (True, "deepseek_v3"),
    "deepseek_v32": (True, "deepseek_v32"),
    "glm4_moe": (True, "glm"),
    "glm4_moe_lite": (True, "glm"),
    "glm_moe_dsa": (True, "glm"),
    "mimo": (True, "hermes"),
    "qwen2": (False, "hermes"),
    "qwen3": (True, "hermes"),
    "qwen3_moe": (True, "hermes"),
    "qwen3_next": (True, "hermes"),
    "qwen3_5": (True, "qwen3_coder"),
    "qwen3_5_moe": (True, "qwen3_coder"),
}


def reasoning_parser(model_type: str, template: str | None) -> str | None:
    """The reasoning parser of a model: None where it does not think aloud."""
    thinks = END_THINK in template if template is not None else _TYPES.get(model_type, (False,))[0]
    return "think" if thinks else None


def tool_call_parser(model_type: str, template: str | None) -> str | None:
    """The tool call parser of a model: None where it knows no tools, as far as its template tells."""
    if template is None or "tools" not in template:
        return None  # the model would never hear of them
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return name
    return _TYPES.get(model_type, (False, JSON))[1]
