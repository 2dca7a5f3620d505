"""Tokens to text as they come, never half a character."""

import codecs
from collections.abc import Sequence

from mtp_jax.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one completion incrementally.

    All that `push` returned, and at last `finish`, joined is exactly `tokenizer.decode(all ids)`,
    however the ids were split. Bytes that may still become a character are held back, so U+FFFD
    appears only where the model's bytes can no longer be one. Cost is proportional to new tokens.

    Args:
      tokenizer: the model's.
      skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._text = tokenizer.token_text
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._bytes = bytearray()  # run of SentencePiece's byte tokens that has not ended yet
        self._strip_left = self._text.strip[1]

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens, returns the text that is now certain."""
        pieces = [self._text.piece(token_id) for token_id in token_ids]
        kept = [p for p in pieces if p is not None and not (p.special and self._skip_special)]
        if self._text.byte_level:
            return self._utf8.decode(b"".join(piece.data for piece in kept))
        new = []
        for piece in kept:
            if piece.lone_byte:
                self._bytes += piece.data
            else:
                new += [self._end_of_run(), piece.data.decode()]
        return self._strip("".join(new))

    def finish(self) -> str:
        """Whatever was held back; what is no character comes as U+FFFD."""
        if self._text.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._strip(self._end_of_run())

    def _end_of_run(self) -> str:
        # The library decodes a run of byte tokens as a whole: one bad byte spoils all of the run,
        # which is why nothing of it can be shown before it ends.
        data = bytes(self._bytes)
        self._bytes.clear()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)

    def _strip(self, text: str) -> str:
        """Cuts the first characters of the whole text, as a decoder's Strip does."""
        while self._strip_left and text:
            if not text.startswith(self._text.strip[0]):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text
