"""Reasoning, content and tool calls out of an assistant's text as it comes."""

from collections.abc import Sequence

from mtp_jax.text.turn.calls import CallStream, JsonCalls, MarkedCalls, undecided
from mtp_jax.text.turn.formats import FORMATS, JSON
from mtp_jax.text.turn.parts import Call, Content, Part, Reasoning, Schemas

THINK, END_THINK = "<think>", "</think>"


class _Thoughts:
    """Splits text into reasoning and answer; white space around the reasoning is dropped.

    Reasoning is what comes between `<think>` and `</think>` at the beginning.
    """

    def __init__(self, inside: bool, goes_on: bool = False):
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._trim = inside and not goes_on  # white space that comes now is dropped

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are now certain."""
        text = self._held + text
        self._held = ""
        if self._state == "start":
            begun = text.lstrip()
            if begun.startswith(THINK):
                self._state, self._trim, text = "reasoning", True, begun[len(THINK) :]
            elif THINK.startswith(begun):
                self._held = text
                return "", ""
            else:
                self._state = "answer"
        reasoning = ""
        if self._state == "reasoning":
            reasoning, text = self._reasoning(text)
        if self._trim:
            text = text.lstrip()
        self._trim = self._trim and not text
        return reasoning, text

    def _reasoning(self, text: str) -> tuple[str, str]:
        """Takes reasoning; what follows it."""
        if self._trim:
            text = text.lstrip()
        before, found, after = text.partition(END_THINK)
        if found:
            self._state, self._trim = "answer", True
            return before.rstrip(), after
        kept = text[: len(text) - undecided(text, (END_THINK,))].rstrip()
        self._held = text[len(kept) :]
        self._trim = self._trim and not kept
        return kept, ""

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "reasoning" else ("", held)


class TurnParser:
    """Parts of a turn. All text is in them but the marks and the white space around these.

    The parts, neighbours of a kind joined, are the same however the text is cut into pieces.

    Args:
      reasoning: look for reasoning at the beginning.
      inside_reasoning: the prompt has opened it already.
      tools: how calls are written: a name of `FORMATS` or `json`; None leaves them in the content.
      schemas: of the functions' arguments.
      only_one: drop every call after the first.
      goes_on: the text is the rest of a turn: white space at its beginning is part of it.
    """

    def __init__(
        self,
        reasoning: bool = False,
        inside_reasoning: bool = False,
        tools: str | None = None,
        schemas: Schemas | None = None,
        only_one: bool = False,
        goes_on: bool = False,
    ):
        self._thoughts = _Thoughts(inside_reasoning, goes_on) if reasoning else None
        self._calls: CallStream | None = None
        if tools is not None:
            self._calls = JsonCalls() if tools == JSON else MarkedCalls(FORMATS[tools], schemas or {})
        self._only_one, self._called = only_one, False

    def push(self, text: str) -> list[Part]:
        """Takes the next piece of text; returns what is now certain."""
        reasoning, answer = ("", text) if self._thoughts is None else self._thoughts.push(text)
        return self._parts(reasoning, answer)

    def finish(self) -> list[Part]:
        """Whatever was held back."""
        parts = [] if self._thoughts is None else self._parts(*self._thoughts.finish())
        return parts if self._calls is None else parts + self._once(self._calls.finish())

    def _parts(self, reasoning: str, answer: str) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if self._calls is not None:
            parts += self._once(self._calls.push(answer))
        elif answer:
            parts.append(Content(answer))
        return parts

    def _once(self, parts: Sequence[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, Call):
                if self._only_one and self._called:
                    continue
                self._called = True
            kept.append(part)
        return kept
