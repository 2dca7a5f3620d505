"""Prompts to train on: requests made from templates, prompt files, and user turns that the target writes.

Prompts that a benchmark holds out are recognised here, so that nothing is trained on them.
"""

import collections
import dataclasses
import functools
import itertools
import json
import random
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mtp_jax.errors import InvalidValueError
from mtp_jax.text.tokenizer import Message, Tokenizer

Conversation = tuple[Message, ...]  # ends with the user's turn

_DATA = Path(__file__).parent / "data" / "prompts.toml"
_SLOT = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"\w+")
_GRAM = 5  # words
_LEAST_PART = 3  # words: shorter held-out turns, such as "Thanks!", are known as whole texts only
_NEAR = 0.5  # share of common word 5-grams from which two texts count as nearly equal
_SENTINEL = "\x02turn\x03"  # stands for a user's text; no template and no tokenizer knows it


def user_turn(text: str) -> Conversation:
    """The conversation that has only this turn."""
    return ({"role": "user", "content": text},)


# -- requests from templates -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Template:
    """A request with {slots}, each to be filled from one list."""

    text: str
    lists: tuple[tuple[str, ...], ...]  # of each slot in turn

    @property
    def size(self) -> int:
        """Number of ways to fill the slots."""
        return functools.reduce(lambda size, entries: size * len(entries), self.lists, 1)

    def fill(self, index: int) -> str | None:
        """The request of one way, 0 to size - 1; None where two slots would say the same."""
        chosen = []
        for entries in self.lists:
            index, place = divmod(index, len(entries))
            chosen.append(entries[place])
        said = [entry for entry in chosen if entry]
        if len(set(said)) < len(said):
            return None
        entry = iter(chosen)
        text = _SLOT.sub(lambda _: next(entry), self.text).strip()
        return text[0].upper() + text[1:]


@dataclasses.dataclass(frozen=True)
class Category:
    """Templates of one kind, and how often the kind is drawn."""

    weight: float
    templates: tuple[Template, ...]


@functools.cache
def categories() -> dict[str, Category]:
    """The built-in templates."""
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    lists = {name: tuple(entries) for name, entries in data["lists"].items()}
    for slot, extras in (("opening", data["openings"]), ("ending", data["endings"])):
        lists[slot] = (*extras, *[""] * len(extras))  # nothing as often as something
    made = {}
    for name, texts in data["templates"].items():
        form = "{} {{ending}}" if name in data["ending_categories"] else "{{opening}} {}"
        whole = map(form.format, texts)
        templates = tuple(Template(t, tuple(lists[slot] for slot in _SLOT.findall(t))) for t in whole)
        made[name] = Category(data["weights"][name], templates)
    return made


def requests(seed: int) -> Iterator[Conversation]:
    """Requests made from the built-in templates, all different, until every combination was used.

    The order is a function of `seed`, so shard i of n takes every n-th one, from the i-th on.
    """
    rng = random.Random(f"requests {seed}")
    kinds = dict(categories())
    orders = {name: [_shuffled(t.size, rng) for t in kind.templates] for name, kind in kinds.items()}
    live = {name: list(range(len(kind.templates))) for name, kind in kinds.items()}
    seen: set[str] = set()
    while kinds:
        (name,) = rng.choices(tuple(kinds), [kind.weight for kind in kinds.values()])
        which = rng.choice(live[name])
        index = next(orders[name][which], None)
        if index is None:
            live[name].remove(which)
            if not live[name]:
                del kinds[name]
            continue
        text = kinds[name].templates[which].fill(index)
        if text is None or text in seen:
            continue
        seen.add(text)
        yield user_turn(text)


def _shuffled(size: int, rng: random.Random) -> Iterator[int]:
    """0 to size - 1 in random order. Memory grows with what was taken, not with size."""
    moved: dict[int, int] = {}
    for first in range(size):
        other = rng.randrange(first, size)
        yield moved.get(other, other)
        moved[other] = moved.pop(first, first)


# -- prompt files ------------------------------------------------------------------------------------


def read_prompts(path: str | Path, field: str = "--prompts") -> list[Conversation]:
    """Conversations of a file: plain text with a prompt a line, or `.jsonl`.

    A line of JSON is a string, or an object with `messages` (role and content, the user's last) or
    `prompt` (a text).

    Raises:
      InvalidValueError: no such file, no prompt in it, or a line that is none of these.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(field, str(path), f"a text file ({error})") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            found.append(
                _from_json(line, field, where) if path.suffix == ".jsonl" else user_turn(line.strip())
            )
    if not found:
        raise InvalidValueError(field, str(path), "a file with at least one prompt")
    return found


def _from_json(line: str, field: str, where: str) -> Conversation:
    legal = 'a string, {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]} on each line'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidValueError(field, where, f"{legal} ({error})") from error
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if isinstance(value, str) and value.strip():
        return user_turn(value)
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise InvalidValueError(field, where, legal)
    if value[-1]["role"] != "user":
        raise InvalidValueError(field, where, "messages of which the last is the user's")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


# -- what is held out --------------------------------------------------------------------------------


class HeldOut:
    """Prompts that must not be trained on, and whatever is nearly equal to one of them."""

    def __init__(self, conversations: Iterable[Conversation] = ()):
        self._sizes: list[int] = []  # number of 5-grams of each held-out turn
        self._holders: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
        for text in itertools.chain.from_iterable(map(_user_texts, conversations)):
            grams = _grams(_WORD.findall(text.lower()), _GRAM)
            for gram in grams:
                self._holders[gram].append(len(self._sizes))
            self._sizes.append(len(grams))
        self._short = {len(gram) for gram in self._holders if _LEAST_PART <= len(gram) < _GRAM}

    def __contains__(self, conversation: Conversation) -> bool:
        """Whether a user's turn shares half of its word 5-grams, or of theirs, with a held-out one."""
        return any(map(self._is_near, _user_texts(conversation)))

    def _is_near(self, text: str) -> bool:
        words = _WORD.findall(text.lower())
        own = _grams(words, _GRAM)
        # A held-out turn of a few words is one gram, and may be a part of this text.
        grams = own.union(*(_grams(words, length) for length in self._short))
        common = collections.Counter(h for gram in grams for h in self._holders.get(gram, ()))
        return any(count >= _NEAR * min(len(own), self._sizes[h]) for h, count in common.items())


def _user_texts(conversation: Conversation) -> list[str]:
    return [str(message["content"]) for message in conversation if message["role"] == "user"]


def _grams(words: Sequence[str], length: int) -> set[tuple[str, ...]]:
    """All runs of `length` words; a shorter text is one run."""
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


# -- the chat template -------------------------------------------------------------------------------


def prompt_ids(tokenizer: Tokenizer, conversation: Conversation) -> tuple[int, ...]:
    """Token ids to complete: by the chat template, or the last turn's plain text where there is none."""
    if not tokenizer.has_chat_template:
        return tuple(tokenizer.encode(str(conversation[-1]["content"])))
    text = tokenizer.apply_chat_template(conversation)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@dataclasses.dataclass(frozen=True)
class OpenTurn:
    """The chat template up to where a user's text begins, and the tokens that end such a text."""

    prefix: tuple[int, ...]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "OpenTurn | None":
        """None where the model has no chat template, or one that does not show the user's text as it is."""
        if not tokenizer.has_chat_template:
            return None
        text = tokenizer.apply_chat_template(user_turn(_SENTINEL), add_generation_prompt=False)
        before, found, after = text.partition(_SENTINEL)
        if not found or not before:
            return None
        stop = tokenizer.encode(after, add_special_tokens=False)[:1] if after else []
        special = [token for token in stop if is_special(tokenizer, token)]
        return cls(tuple(tokenizer.encode(before, add_special_tokens=False)), tuple(special))


def is_special(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is one of the template's or the tokenizer's own, or has no text at all."""
    piece = tokenizer.token_text.piece(token)
    return piece is None or piece.special


def text_of_turn(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """The user's text that the target wrote, its end token left out; None where it is no sound text."""
    if any(is_special(tokenizer, token) for token in ids):
        return None
    text = tokenizer.decode(ids).strip()
    return text if "\ufffd" not in text and any(map(str.isalpha, text)) else None
