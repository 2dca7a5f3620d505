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
        added = backend.get_added_tokens_decoder().values()
        self.special_texts = frozenset(token.content for token in added if token.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's table may be larger (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that conversations with tools are written by, or None."""
        names = ("tool_use", "default", *self._templates)
        return next((self._templates[name] for name in names if name in self._templates), None)

    def use_chat_template(self, template: str) -> None:
        """Replaces the checkpoint's templates."""
        self._templates = {"default": template}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text become those tokens either way.

        Args:
          add_special_tokens: also add what the tokenizer adds by itself, such as a leading BOS.

        Raises:
          InvalidRequestError: half of a surrogate pair, which JSON can carry but no text can hold.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of several texts. Other threads run meanwhile.

        Raises:
          InvalidRequestError: half of a surrogate pair in one of them.
        """
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                got = ascii(text[:40])
                raise InvalidRequestError("prompt", got, "text without lone surrogates") from error
        # One call, which works on all of them without the interpreter's lock.
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def max_text_bytes(self, num_tokens: int) -> int:
        """UTF-8 bytes that `num_tokens` tokens can stand for at most: longer texts need not be encoded."""
        # Composing characters (NFC) makes them shorter, by no more than three times.
        shrinks = 1 if self._backend.normalizer is None else 3
        return num_tokens * self.token_text.longest * shrinks

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids beyond the vocabulary are left out.

        Raises:
          InvalidRequestError: an id below zero or above 32 bits.
        """
        return self.decode_batch([ids], skip_special_tokens)[0]

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """`decode` of several sequences. Other threads run meanwhile.

        Raises:
          InvalidRequestError: an id below zero or above 32 bits.
        """
        for ids in sequences:
            if ids and not 0 <= min(ids) <= max(ids) < 2**32:
                legal = f"ids from 0 to {self.vocab_size - 1}"
                raise InvalidRequestError("tokens", [min(ids), max(ids)], legal)
        lists = [list(ids) for ids in sequences]
        return self._backend.decode_batch(lists, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The conversation as prompt text, to be encoded with `add_special_tokens=False`.

        Args:
          messages: mappings with `role` and `content`.
          tools: descriptions of functions, for templates that know them.
          add_generation_prompt: end with the opening of the assistant's turn.
          variables: further names for the template, such as `enable_thinking`; they cannot replace
            those above.

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
