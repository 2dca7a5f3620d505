"""A model whose next token is written in a file, and heads that know it, do not, or know every second one.

Its layers add nothing to the residual stream and its embeddings are one-hot, so the logits after a token are
a row of a table: whatever a test wants. `scripts.json` has texts in pieces, each piece a token of its own,
even where two are the same text; each text begins again at its end, or ends at `<eos>`.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models

from mtp_jax.config import ModelConfig
from mtp_jax.engine.buckets import Bucket, BucketTable, Report, Sampling
from mtp_jax.engine.build import construct
from mtp_jax.engine.engine import Engine
from mtp_jax.request import SamplingParams
from mtp_jax.scheduler.plan import DispatchPlan
from mtp_jax.text.token_bytes import Piece, byte_alphabet
from mtp_jax.text.tokenizer import Tokenizer
from tests.parity.rig import RandomSource, Value, blueprint

SCRIPTS: dict[str, list[str]] = json.loads((Path(__file__).parent / "scripts.json").read_text())
PIECES = [piece.encode("latin-1") for pieces in SCRIPTS.values() for piece in pieces]
VOCAB = len(PIECES)
EOS = PIECES.index(b"<eos>")
HEADS = ("good", "bad", "alternate")
GAP = 0.6  # by which the scripted token's logit is above the best other one: penalties can turn it

CONFIG = ModelConfig(
    model_type="mimo",
    vocab_size=VOCAB,
    hidden_size=VOCAB,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    num_nextn_predict_layers=1,
    eos_token_ids=(EOS,),
)


def chain(name: str) -> list[int]:
    """Token ids of a script."""
    before = 0
    for other, pieces in SCRIPTS.items():
        if other == name:
            return list(range(before, before + len(pieces)))
        before += len(pieces)
    raise KeyError(name)


@functools.cache
def following() -> np.ndarray:
    """The scripted token after each one, [V]."""
    after = np.arange(VOCAB)
    for name in SCRIPTS:
        ids = chain(name)
        after[ids] = np.roll(ids, -1)
    return after


@functools.cache
def table() -> np.ndarray:
    """Logits [V, V] after each token."""
    logits = np.random.default_rng(5).standard_normal((VOCAB, VOCAB)).astype(np.float32)
    logits[np.arange(VOCAB), following()] = logits.max(axis=1) + GAP
    return logits


def next_of_head(head: str) -> np.ndarray:
    """Of which token's logits a head takes the best after each one, [V]: its own is right."""
    own, wrong = np.arange(VOCAB), np.roll(np.arange(VOCAB), 7)
    knows = {"good": own >= 0, "bad": own < 0, "alternate": own % 2 == 0}[head]
    return np.where(knows, own, wrong)


class ScriptedTokenizer(Tokenizer):
    """Each id stands for its piece. Texts are encoded by the longest pieces, the first of equal ones."""

    def __init__(self) -> None:
        alphabet = {character: i for i, character in enumerate(byte_alphabet())}
        backend = tokenizers.Tokenizer(models.BPE(alphabet, []))
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend, "scripts.json", {})
        pieces = [Piece(data, special=i == EOS) for i, data in enumerate(PIECES)]
        self.token_text.piece = pieces.__getitem__  # type: ignore[method-assign]
        self.token_text.longest = max(map(len, PIECES))

    @property
    def has_chat_template(self) -> bool:
        return True

    def apply_chat_template(self, messages, /, *arguments, **variables) -> str:
        """The last message, and nothing else."""
        return messages[-1]["content"]

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        dropped = (EOS,) if skip_special_tokens else ()
        texts = [b"".join(PIECES[i] for i in ids if i not in dropped) for ids in sequences]
        return [text.decode(errors="replace") for text in texts]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self._encode(text.encode()) for text in texts]

    def _encode(self, data: bytes) -> list[int]:
        """Nothing at all for a text that has no pieces."""
        ids: list[int] = []
        while data:
            fitting = [i for i, piece in enumerate(PIECES) if data.startswith(piece)]
            if not fitting:
                return []
            ids.append(max(fitting, key=lambda i: (len(PIECES[i]), -i)))
            data = data[len(PIECES[ids[-1]]) :]
        return ids


def bad_word_ids(params: SamplingParams) -> list[list[int]]:
    """Bad words as tokens, with and without a space before them."""
    texts = [text for word in params.bad_words for text in (word, " " + word)]
    return [ids for ids in ScriptedTokenizer().encode_batch(texts) if ids]


class ScriptedSource(RandomSource):
    """The checkpoint, with one of `HEADS`."""

    def __init__(self, head: str = "good"):
        super().__init__(CONFIG)
        self._head = head

    def read(self, name: str) -> np.ndarray:
        drawn, d = super().read(name), VOCAB
        if "norm" in name:
            return np.ones_like(drawn)
        if name == "model.embed_tokens.weight":
            return np.eye(d, dtype=np.float32)
        if name == "lm_head.weight":  # what the final norm makes of a one-hot row is undone here
            return np.ascontiguousarray(table().T * np.float32(np.sqrt(1 / d + CONFIG.rms_norm_eps)))
        if name.endswith("input_proj.weight"):  # [hidden | embedding] -> one-hot
            project = np.zeros((d, 2 * d), np.float32)
            project[next_of_head(self._head), d + np.arange(d)] = 1
            return project
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return np.zeros_like(drawn)
        return drawn

    def tokenizer(self) -> Tokenizer:
        return ScriptedTokenizer()


class EveryKind(BucketTable):
    """Compiles, instead of the plain steps, those that can do everything."""

    def first(self) -> list[Bucket]:
        return [everything(bucket) for bucket in super().first()]

    def fallback(self) -> list[Bucket]:
        return []


def everything(bucket: Bucket) -> Bucket:
    """The bucket of the kind that serves any request."""
    report = Report.PROMPTS if bucket.chunk else Report.TOKENS
    return dataclasses.replace(bucket, sampling=Sampling.SHAPED, report=report)


def do_everything(engine: Engine) -> Engine:
    """Makes every dispatch one that serves any request: one program for all tests."""
    choose = engine._bucket_with

    def forced(plan: DispatchPlan, drafts: int) -> Bucket:
        return everything(choose(plan, drafts))

    engine._bucket_with = forced  # type: ignore[method-assign]
    return engine


def scripted_engine(stages: int, k: int, **overrides: Value) -> Engine:
    """Contexts of 64 tokens, 8 slots."""
    values: dict[str, Value] = {"max_model_len": 64, "stages": stages, "num_speculative_tokens": k}
    drawn = blueprint(ScriptedSource(), **(values | overrides))
    buckets = EveryKind(**{f.name: getattr(drawn.buckets, f.name) for f in dataclasses.fields(BucketTable)})
    return do_everything(construct(dataclasses.replace(drawn, buckets=buckets)))


# What should come out, in plain Python and float64.


@dataclasses.dataclass(frozen=True)
class Expected:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None


def shaped(
    text: Sequence[int], num_prompt: int, params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()
) -> np.ndarray:
    """Logits [V] of the next token after `text`, in float64, as the parameters' definitions say."""
    logits = table()[text[-1]].astype(np.float64)
    emitted = list(text[num_prompt:])
    if params.allowed_token_ids is not None:
        logits[[i for i in range(VOCAB) if i not in params.allowed_token_ids]] = -np.inf
    for token, bias in dict(params.logit_bias).items():
        logits[token] += bias
    logits[list(params.banned_token_ids)] = -np.inf
    if len(emitted) < params.min_tokens:
        logits[[*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))]] = -np.inf
    for token in set(text):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(emitted):
        logits[token] -= params.presence_penalty + params.frequency_penalty * emitted.count(token)
    for *before, last in bad_words:
        if not before or emitted[-len(before) :] == before:
            logits[last] = -np.inf
    return logits


def greedy_text(prompt: Sequence[int], params: SamplingParams, context: int = 64) -> Expected:
    """Greedy decoding, one token at a time."""
    room = min(params.max_tokens or context, context - len(prompt))
    words = bad_word_ids(params)
    tokens: list[int] = []
    stops = (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,)))
    data, exempt = b"", 0  # characters in which no stop string ends
    while len(tokens) < room:
        token = int(np.argmax(shaped([*prompt, *tokens], len(prompt), params, words)))
        tokens.append(token)
        if token in stops:
            if params.include_stop_str_in_output and token != EOS:
                data += PIECES[token]
            reason = token if token in params.stop_token_ids else None
            return Expected(tuple(tokens), data.decode(errors="replace"), "stop", reason)
        data += PIECES[token] if token != EOS else b""
        whole = _certain(data)
        if len(tokens) <= params.min_tokens:
            exempt = len(whole)
            continue
        found = _first_match(whole, params.stop, exempt)
        if found is not None:
            return _stopped(tokens, whole, found, params)
    text = data.decode(errors="replace")
    found = _first_match(text, params.stop, exempt) if len(tokens) > params.min_tokens else None
    return (
        Expected(tuple(tokens), text, "length", None)
        if found is None
        else _stopped(tokens, text, found, params)
    )


def _certain(data: bytes) -> str:
    """The text of bytes but for a last character that may still grow."""
    for cut in range(min(4, len(data) + 1)):
        text = data[: len(data) - cut].decode(errors="replace")
        rest = data[len(data) - cut :]
        if not cut and not text.endswith("\ufffd"):
            return text
        if cut and _may_grow(rest):
            return text
    return data.decode(errors="replace")


def _may_grow(rest: bytes) -> bool:
    lead = rest[0]
    length = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 0
    return len(rest) < length and all(0x80 <= byte < 0xC0 for byte in rest[1:])


def _first_match(text: str, stops: Sequence[str], exempt: int) -> tuple[int, int, str] | None:
    """(end, start, stop string) of the match that ends first; of those, that which begins first.

    It ends after `exempt` characters, and may begin within them.
    """
    starts = [(text.find(stop, max(0, exempt - len(stop) + 1)), stop) for stop in stops]
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    return min(found, default=None)


def _stopped(tokens: list[int], text: str, found: tuple[int, int, str], params: SamplingParams) -> Expected:
    end, start, stop = found
    return Expected(tuple(tokens), text[: end if params.include_stop_str_in_output else start], "stop", stop)
