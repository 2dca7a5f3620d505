"""Tokenizers rebuilt from the metadata of GGUF files."""

from collections.abc import Callable, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from mtp_jax.errors import CheckpointError
from mtp_jax.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2, _LLAMA3 = _WORDS % "", _WORDS % "{1,3}"


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
}


def tokenizer_from_gguf(metadata: Mapping[str, object], where: str) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
      metadata: the file's key-value pairs.
      where: the file's name, for error messages.

    Raises:
      CheckpointError: no tokenizer in the file, or one of a kind that is not known.
    """
    try:
        return _build(metadata, where)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception for what it cannot use
        raise CheckpointError(f"{where}: tokenizer.ggml", f"unusable ({error})", "a tokenizer") from error


def _build(metadata: Mapping[str, object], where: str) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        backend, add_bos = _sentence_piece(metadata, tokens, where)
    else:
        legal = "gpt2 (byte-level BPE) or llama (SentencePiece)"
        raise CheckpointError(f"{where}: tokenizer.ggml.model", kind, legal)
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise CheckpointError(f"{where}: tokenizer.ggml.token_type", types, "a list of numbers")
    control = [t for t, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    own = [t for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED and t]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in own])
    special = _special_tokens(metadata, tokens, where)
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos) and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, where, special, template if isinstance(template, str) else None)


def _byte_level(
    metadata: Mapping[str, object], tokens: Sequence[str], where: str
) -> tuple[tokenizers.Tokenizer, bool]:
    """BPE over bytes. The flag: whether BOS is added when the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(f"{where}: tokenizer.ggml.pre", pre, "one of " + ", ".join(_PRE_TOKENIZERS))
    merges = [tuple(m.split(" ", 1)) for m in _strings(metadata, "tokenizer.ggml.merges", where)]
    for merge in merges:
        if len(merge) != 2:
            raise CheckpointError(f"{where}: tokenizer.ggml.merges", merge[0], "two tokens, a space between")
    llama3 = pre == "llama-bpe"
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama3))  # pyright: ignore
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _sentence_piece(
    metadata: Mapping[str, object], tokens: Sequence[str], where: str
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE, its merges worked out from the scores of the pieces."""
    scores = metadata.get("tokenizer.ggml.scores")
    numbers = isinstance(scores, list) and all(isinstance(score, int | float) for score in scores)
    if not isinstance(scores, list) or not numbers or len(scores) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.scores", "too few or none", "one number a token")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [
        (-scores[index], index, cut, (token[:cut], token[cut:]))
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        legal = f"an index of the {len(tokens)} tokens"
        raise CheckpointError(f"{where}: tokenizer.ggml.unknown_token_id", unknown, legal)
    model = models.BPE(
        vocabulary,
        [pair[-1] for pair in sorted(pairs)],
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)  # pyright: ignore
    spaces = [normalizers.Replace(" ", "▁")]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _special_tokens(metadata: Mapping[str, object], tokens: Sequence[str], where: str) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in keys.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            legal = f"an index of the {len(tokens)} tokens"
            raise CheckpointError(f"{where}: tokenizer.ggml.{key}_token_id", index, legal)
        special[name] = tokens[index]
    return special


def _strings(metadata: Mapping[str, object], key: str, where: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        got = "nothing" if value is None else "something else"
        raise CheckpointError(f"{where}: {key}", got, "a list of strings")
    return value
