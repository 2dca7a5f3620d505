"""Tool calls out of text that arrives in pieces. The outcome does not depend on how the text is cut."""

import json
import re
from collections.abc import Sequence
from typing import Protocol

from mtp_jax.text.turn.formats import Format
from mtp_jax.text.turn.parts import Call, Content, Schemas, call_from_object


def undecided(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `marks` without being all of it."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of `marks` begins, and which it is."""
    found = [(position, mark) for mark in marks if (position := text.find(mark)) >= 0]
    return min(found, default=None)


def _any_of(*marks: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


class CallStream(Protocol):
    def push(self, text: str) -> list[Content | Call]: ...
    def finish(self) -> list[Content | Call]: ...


class MarkedCalls:
    """Calls of a `Format`. A call comes as a whole, when its end has been seen.

    White space before a call, and between calls, is dropped. What begins like a call and is none comes
    as content, exactly as it was written.
    """

    def __init__(self, form: Format, schemas: Schemas):
        self._form, self._schemas = form, schemas
        self._marks = (form.start, *form.wrappers)
        opening, closing = form.quotes
        escape = ("\\",) if opening == closing else ()
        # What to look for in a call: outside of quotes, inside of quotes.
        self._ahead = (_any_of(form.end, opening), _any_of(closing, *escape))
        self._longest = max(map(len, (form.end, opening, closing)))
        self._held = ""  # content that may be the white space before a mark, or the beginning of one
        self._after_mark = False  # white space that comes now is dropped
        self._call: str | None = None  # what has come of a call, its start left out
        self._position, self._quoted = 0, False  # how far `_call` has been looked through

    def push(self, text: str) -> list[Content | Call]:
        parts: list[Content | Call] = []
        while text:
            text = (self._take_content if self._call is None else self._take_call)(text, parts)
        return parts

    def finish(self) -> list[Content | Call]:
        """What was held back; a call that is cut off is content."""
        parts: list[Content | Call] = []
        if self._call is not None:
            call = None if self._form.needs_end else self._form.read(self._call, self._schemas)
            self._emit(parts, call or self._form.start + self._call)
            self._call = None
        elif self._held and not (self._after_mark and self._held.isspace()):
            self._emit(parts, self._held)
        self._held = ""
        return parts

    def _take_content(self, text: str, parts: list[Content | Call]) -> str:
        """Takes content up to the next mark; the text after it."""
        text = self._held + text
        if self._after_mark:
            text = text.lstrip()
        self._held = ""
        found = first_mark(text, self._marks)
        if found is None:
            kept = text[: len(text) - undecided(text, self._marks)].rstrip()
            self._held = text[len(kept) :]
            self._emit(parts, kept)
            return ""
        position, mark = found
        self._emit(parts, text[:position].rstrip())
        self._after_mark = True
        if mark == self._form.start:
            self._call, self._position, self._quoted = "", 0, False
        return text[position + len(mark) :]

    def _take_call(self, text: str, parts: list[Content | Call]) -> str:
        """Takes text up to the end of the call; the text after it."""
        assert self._call is not None
        self._call += text
        end = self._find_end(self._call)
        if end is None:
            return ""
        inside, rest = self._call[:end], self._call[end + len(self._form.end) :]
        self._call = None
        self._emit(
            parts, self._form.read(inside, self._schemas) or self._form.start + inside + self._form.end
        )
        return rest

    def _find_end(self, text: str) -> int | None:
        """Where the end mark outside of quotes begins; remembers how far it looked."""
        while True:
            found = self._ahead[self._quoted].search(text, self._position)
            if found is None:
                self._position = max(self._position, len(text) - self._longest + 1)
                return None
            if found[0] == self._form.end:
                return found.start()
            if found[0] == "\\":
                if found.end() == len(text):  # what it escapes is yet to come
                    self._position = found.start()
                    return None
                self._position = found.end() + 1
            else:
                self._quoted = not self._quoted
                self._position = found.end()

    def _emit(self, parts: list[Content | Call], part: str | Call) -> None:
        if isinstance(part, Call):
            parts.append(part)
        elif part:
            self._after_mark = False
            parts.append(Content(part))


_BETWEEN = re.compile(r"[\s;,]*")
_PYTHON_TAG = "<|python_tag|>"


class JsonCalls:
    """Calls as bare JSON: the whole answer is an object with `name`, several of them, or a list.

    An answer that begins like JSON is held back until it is over.
    """

    def __init__(self):
        self._held: str | None = ""  # None: this is no JSON, and passes

    def push(self, text: str) -> list[Content | Call]:
        if self._held is None:
            return [Content(text)] if text else []
        self._held += text
        start = self._held.lstrip()[: len(_PYTHON_TAG)]
        if not start or start[0] in "{[" or _PYTHON_TAG.startswith(start):
            return []
        text, self._held = self._held, None
        return [Content(text)]

    def finish(self) -> list[Content | Call]:
        text, self._held = self._held or "", None
        return self._calls(text) or ([Content(text)] if text else [])

    @staticmethod
    def _calls(text: str) -> list[Content | Call]:
        """The calls that make up all of `text`; none where it is anything else."""
        text = text.strip().removeprefix(_PYTHON_TAG).strip()
        decoder, calls, position = json.JSONDecoder(), [], 0
        while position < len(text):
            try:
                value, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                return []
            made = [call_from_object(item) for item in (value if isinstance(value, list) else [value])]
            if None in made:
                return []
            calls += made
            gap = _BETWEEN.match(text, position)
            position = gap.end() if gap else position
        return calls
