"""What one token contributes to the text, so that text can grow without decoding all of it again.

Two kinds of decoder are known: byte-level (GPT-2, Llama 3, Qwen, SmolLM), where every character of
a token stands for a byte, and SentencePiece-like (Llama 2), where pieces are text with `▁` for a
space and single bytes are tokens of their own, `<0x0A>`.
"""

import dataclasses
import json
import re

import tokenizers

from mtp_jax.errors import CheckpointError

_LEGAL = "a ByteLevel decoder, or a Sequence of Replace, ByteFallback, Fuse and Strip"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-in character of each byte: printable Latin-1 is itself, the rest is U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A token's share of the text. `lone_byte` marks the byte tokens of SentencePiece."""

    data: bytes
    special: bool = False
    lone_byte: bool = False


class TokenText:
    """Pieces by token id, worked out once each."""

    def __init__(
        self, backend: tokenizers.Tokenizer, byte_level: bool, replace: dict[str, str], strip: tuple[str, int]
    ):
        self._backend, self._replace = backend, replace
        self.byte_level = byte_level
        self.strip = strip  # character to cut from the beginning of the text, and how many at most
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, Piece | None] = {}
        self.longest = self._longest({token.content for token in added.values()})

    def piece(self, token_id: int) -> Piece | None:
        """The token's piece, or None for an id beyond the vocabulary."""
        if token_id not in self._pieces:
            token = self._backend.id_to_token(token_id)
            self._pieces[token_id] = None if token is None else self._make(token, token_id in self._special)
        return self._pieces[token_id]

    def data(self, token_id: int) -> bytes:
        """The token's bytes, special or not; none for an id beyond the vocabulary."""
        piece = self.piece(token_id)
        return b"" if piece is None else piece.data

    def _longest(self, added: set[str]) -> int:
        """Bytes of text that a token stands for at most, or a little more."""
        # Byte-level tokens have a character for each byte; added ones are plain text in either kind.
        sizes = (
            len(token) if self.byte_level and token not in added else len(token.encode())
            for token in self._backend.get_vocab(with_added_tokens=True)
        )
        return max(sizes, default=1)

    def _make(self, token: str, special: bool) -> Piece:
        if self.byte_level:
            known = all(character in _ALPHABET for character in token)
            data = bytes(_ALPHABET[character] for character in token) if known else token.encode()
            return Piece(data, special)
        for old, new in self._replace.items():
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return Piece(bytes([int(match[1], 16)]), special, lone_byte=True)
        return Piece(token.encode(), special)


def token_text(backend: tokenizers.Tokenizer, where: str) -> TokenText:
    """Reads the decoder's description.

    Raises:
      CheckpointError: a decoder of another kind; `where` names the file.
    """
    if backend.decoder is None:
        raise CheckpointError(f"{where}: decoder", None, _LEGAL)
    # Decoders have no getters; their pickled state is the JSON that tokenizer.json holds.
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenText(backend, True, {}, ("", 0))
    replace: dict[str, str] = {}
    strip = ("", 0)
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"] and "ByteFallback" in kinds:
            replace[step["pattern"]["String"]] = step["content"]
        elif step["type"] == "Strip" and step["stop"] == 0 and "Fuse" in kinds:
            strip = (step["content"], step["start"])
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise CheckpointError(f"{where}: decoder", kinds, _LEGAL)
    if "ByteFallback" not in kinds:
        raise CheckpointError(f"{where}: decoder", kinds, _LEGAL)
    return TokenText(backend, False, replace, strip)
