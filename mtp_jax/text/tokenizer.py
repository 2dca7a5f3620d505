"""A checkpoint's tokenizer: a thin layer over the `tokenizers` library."""

from collections.abc import Mapping, Sequence

import tokenizers

from mtp_jax.errors import InvalidRequestError
from mtp_jax.text.chat import Message, render_chat
from mtp_jax.text.token_bytes import TokenText, token_text


class Tokenizer:
    """Text to token ids and back, and conversations to prompt text.

    Args:
      backend: the `tokenizers` object that does the work.
      where: the file it came from, for error messages.
      special_tokens: the names chat templates know them by: `bos_token`, `eos_token`, `pad_token`, ...
      chat_template: Jinja source, or several by name (`default`, `tool_use`), or None.

    Raises:
      CheckpointError: the decoder is of a kind that cannot be streamed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        where: str,
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = (
            {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
        )
        self.token_text: TokenText = token_text(backend, where)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's table may be larger (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text become those tokens either way.

        Args:
          add_special_tokens: also add what the tokenizer adds by itself, such as a leading BOS.

        Raises:
          InvalidRequestError: half of a surrogate pair, which JSON can carry but no text can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError("prompt", ascii(text[:40]), "text without lone surrogates") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids beyond the vocabulary are left out.

        Raises:
          InvalidRequestError: an id below zero or above 32 bits.
        """
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise InvalidRequestError("tokens", [min(ids), max(ids)], f"ids from 0 to {self.vocab_size - 1}")
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (bytes in disguise), or None beyond the vocabulary."""
        return self._backend.id_to_token(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The conversation as prompt text, to be encoded with `add_special_tokens=False`.

        Args:
          messages: mappings with `role` and `content`.
          tools: descriptions of functions, for templates that know them.
          add_generation_prompt: end with the opening of the assistant's turn.
          variables: further names for the template, such as `enable_thinking`.

        Raises:
          InvalidRequestError: field `messages`; there is no template, or it refuses the conversation.
        """
        names = ("tool_use", "default") if tools else ("default",)
        template = next((self._templates[n] for n in names if n in self._templates), None)
        if template is None:
            legal = "a plain prompt: this model has no chat template"
            raise InvalidRequestError("messages", f"{len(messages)} messages", legal)
        return render_chat(
            template, messages, tools, add_generation_prompt, {**self._special_tokens, **variables}
        )

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)
