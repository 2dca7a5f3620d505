"""What a user asks of an engine, and what it comes to on this machine."""

import dataclasses
import logging
from collections.abc import Mapping

from mtp_jax.config import AUTO, AUTO_DRAFTS, EngineConfig, ModelConfig
from mtp_jax.errors import InvalidValueError

log = logging.getLogger(__name__)

EngineFieldValue = int | str | bool | tuple[int, ...]

CPU_CONTEXT, ACCELERATOR_CONTEXT = 2048, 8192  # tokens of max_model_len unless the user asks for more


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What a user asks for. `overrides` are fields of EngineConfig; the machine decides the others.

    num_speculative_tokens may be "auto" there: up to `AUTO_DRAFTS`, as measurements say.
    """

    model: str | None = None  # directory or GGUF file; None is the default model
    served_model_name: str | None = None
    mtp_head: str | None = None  # MTP weights that are not in the checkpoint
    dtype: str = "auto"
    kv_cache_gib: float | None = None  # instead of num_pages
    background_compile: bool = True  # False: compile a missing bucket at once, and wait for it
    overrides: Mapping[str, EngineFieldValue] = dataclasses.field(default_factory=dict)


def resolve_config(
    options: EngineOptions, model: ModelConfig, *, has_mtp: bool, on_cpu: bool
) -> EngineConfig:
    """The user's values, and for the others what suits the machine.

    Raises:
      InvalidValueError: a value that cannot work, or not with this model.
    """
    context = min(model.max_position_embeddings, CPU_CONTEXT if on_cpu else ACCELERATOR_CONTEXT)
    slots, data = EngineConfig.max_num_seqs if on_cpu else 64, options.overrides.get("data", 1)
    if isinstance(data, int) and data > 0:
        slots += -slots % data  # equally many in each replica
    values: dict[str, EngineFieldValue] = {
        "max_model_len": context,
        "max_num_seqs": slots,
        "dtype": ("float32" if on_cpu else "bfloat16") if options.dtype == "auto" else options.dtype,
    }
    if on_cpu:
        values |= {"adaptive_start": 0}  # a verified row costs nearly as much as a decoded one
    else:
        values |= {
            "min_rows": 2,
            "max_rounds": 4,
            "prefill_chunk": 256,
            "table_growth": 2,
            "static_sampling": True,
        }
    values |= dict(options.overrides)
    if values.get("num_speculative_tokens", AUTO) == AUTO:
        values |= {"num_speculative_tokens": AUTO_DRAFTS if has_mtp else 0, "adaptive_drafts": has_mtp}
    config = dataclasses.replace(EngineConfig(), **values)  # type: ignore[arg-type]
    if config.max_num_seqs % config.data:
        legal = f"a multiple of --data, {config.data}: replicas have equally many"
        raise InvalidValueError("--max-num-seqs", config.max_num_seqs, legal)
    if config.max_model_len > model.max_position_embeddings:
        legal = f"up to {model.max_position_embeddings}, the model's context"
        raise InvalidValueError("--max-model-len", config.max_model_len, legal)
    if config.enable_prefix_caching and (model.delta is not None or model.ngram is not None):
        log.info("no prefix cache: this model's recurrent layers keep no state for the middle of a prompt")
        config = dataclasses.replace(config, enable_prefix_caching=False)
    if config.num_speculative_tokens and not has_mtp:
        legal = "0: this model has no MTP module (give one with --mtp-head)"
        raise InvalidValueError("--num-speculative-tokens", config.num_speculative_tokens, legal)
    return config
