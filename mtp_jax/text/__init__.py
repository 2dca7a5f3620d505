"""Text to tokens and back: tokenizers, chat templates, incremental detokenising, stop strings."""

from mtp_jax.text.detokenizer import Detokenizer
from mtp_jax.text.stop import StopChecker
from mtp_jax.text.tokenizer import Message, Tokenizer

__all__ = ["Detokenizer", "Message", "StopChecker", "Tokenizer"]
