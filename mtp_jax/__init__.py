"""mtp-jax: models with multi-token-prediction heads, served by speculative decoding in one SPMD program."""

from typing import TYPE_CHECKING

from mtp_jax.request import SamplingParams

if TYPE_CHECKING:
    from mtp_jax.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str):
    """Imports `LLM` on first use, so that `import mtp_jax` stays free of jax."""
    if name == "LLM":
        from mtp_jax.llm import LLM

        return LLM
    raise AttributeError(f"module 'mtp_jax' has no attribute {name!r}")
