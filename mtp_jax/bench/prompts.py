"""Where prompts come from: a file, or random tokens."""

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtp_jax.bench.arguments import Load
from mtp_jax.errors import InvalidValueError

# Each is one token, with the space before it, in nearly every vocabulary.
# fmt: off
WORDS = (
    "the", "of", "and", "to", "in", "is", "for", "on", "that", "with", "as", "are", "at", "be", "from",
    "this", "or", "have", "an", "by", "not", "but", "what", "all", "were", "when", "we", "there", "can",
    "one", "time", "people", "water", "long", "day", "way", "could", "number", "first", "made", "part",
    "over", "new", "work", "place", "years", "back", "most", "very", "after", "our", "just", "name",
    "good", "great", "where", "help",
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text, token ids or messages."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int  # of the answer

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, list) and isinstance(self.content[0], dict)

    def as_messages(self) -> list[dict[str, Any]]:
        """For a chat: a text becomes one user's message. The prompt is no token ids."""
        if self.is_chat:
            return self.content  # type: ignore[return-value]
        return [{"role": "user", "content": self.content}]


def read_prompts(path: str, count: int | None, max_tokens: int, chat: bool) -> list[Prompt]:
    """Prompts of a file, over again where it has fewer than `count`.

    Text: one prompt a line, empty lines left out. `.jsonl`: a line is a text, or an object with `prompt`
    (text or token ids) or `messages`, and perhaps `max_tokens`.

    Args:
      count: how many; None is as many as the file has.
      max_tokens: of answers whose line says nothing.
      chat: they are for chats, which cannot have token ids; others cannot have messages.

    Raises:
      InvalidValueError: a file that cannot be read, or a line that makes no such prompt.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidValueError("--prompts", path, f"a readable text file ({reason})") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InvalidValueError("--prompts", path, "at least one prompt")
    if Path(path).suffix == ".jsonl":
        prompts = [_from_json(line, f"{path} line {number}", max_tokens, chat) for number, line in numbered]
    else:
        prompts = [Prompt(line, max_tokens) for _, line in numbered]
    return list(itertools.islice(itertools.cycle(prompts), count or len(prompts)))


def _from_json(line: str, where: str, max_tokens: int, chat: bool) -> Prompt:
    legal = "a text, or an object with one of prompt and messages and perhaps max_tokens"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidValueError(where, _short(line), f"JSON ({error})") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InvalidValueError(where, _short(line), legal)
    content: Any = value.get("prompt", value.get("messages"))
    kind = _kind(content)
    if kind is None or (kind == "messages") != ("messages" in value):
        raise InvalidValueError(where, _short(line), legal)
    if kind == ("ids" if chat else "messages"):
        needed = "completions" if chat else "chat"
        raise InvalidValueError(where, _short(line), f"no {kind} here: they need --endpoint {needed}")
    length = value.get("max_tokens", max_tokens)
    if type(length) is not int or length < 1:
        raise InvalidValueError(f"{where}: max_tokens", length, "an integer of at least 1")
    return Prompt(content, length)


def _kind(content: object) -> str | None:
    if isinstance(content, str) and content:
        return "text"
    if not isinstance(content, list) or not content:
        return None
    if all(type(item) is int and item >= 0 for item in content):
        return "ids"
    return "messages" if all(isinstance(item, dict) and "role" in item for item in content) else None


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "..."


def random_prompts(
    count: int, num_tokens: int, max_tokens: int, chat: bool, vocab_size: int, rng: random.Random
) -> list[Prompt]:
    """Random token ids; for a chat random common words, which are about as many tokens.

    Ids come from the upper nine tenths of the vocabulary: special tokens and bytes mostly have low ones.
    """
    if chat:
        return [Prompt(" ".join(rng.choices(WORDS, k=num_tokens)), max_tokens) for _ in range(count)]
    low = vocab_size // 10
    return [
        Prompt([rng.randrange(low, vocab_size) for _ in range(num_tokens)], max_tokens) for _ in range(count)
    ]


def arrivals(count: int, rate: float, rng: random.Random) -> Iterator[float]:
    """When requests are sent, in seconds: a Poisson process of `rate` a second; inf is all at once."""
    now = 0.0
    for _ in range(count):
        yield now
        now += rng.expovariate(rate) if rate != float("inf") else 0.0


def make_prompts(load: Load, vocab_size: int) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of warming up, and those that are measured. Raises as `read_prompts` does."""
    chat, num_warmups = load.endpoint == "chat", load.num_warmups
    if load.prompts is not None:
        found = read_prompts(load.prompts, load.num_prompts, load.output_len, chat)
        return [found[index % len(found)] for index in range(num_warmups)], found
    count = num_warmups + (load.num_prompts or Load.DEFAULT_NUM_PROMPTS)
    rng = random.Random(load.seed)
    drawn = random_prompts(count, load.input_len, load.output_len, chat, vocab_size, rng)
    return drawn[:num_warmups], drawn[num_warmups:]
