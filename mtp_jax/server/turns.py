"""How the assistant's turn of a chat call begins, and how its text is read: reasoning, content, calls."""

import dataclasses
import functools
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from mtp_jax.request import GrammarSpec
from mtp_jax.server.errors import ApiError
from mtp_jax.server.interface import EngineCore
from mtp_jax.server.messages import AllowedTools, NamedTool, Tool, ToolChoice
from mtp_jax.text.turn.choose import reasoning_parser, tool_call_parser
from mtp_jax.text.turn.formats import FORMATS, JSON, JSON_CALLS, call_grammar, opening
from mtp_jax.text.turn.parser import END_THINK, THINK, TurnParser
from mtp_jax.text.turn.parts import Call, Content, Part, Reasoning

AUTO, NONE = "auto", "none"


@dataclasses.dataclass(frozen=True)
class Dialect:
    """What the model's turns look like."""

    reasoning: bool = False
    tools: str | None = None  # a tool call parser's name


@dataclasses.dataclass(frozen=True)
class ParserOptions:
    """`--reasoning-parser` and `--tool-call-parser`: a name, `auto` or `none`."""

    reasoning: str = AUTO
    tools: str = AUTO

    def resolve(self, engine: EngineCore) -> Dialect:
        """The dialect of the served model, where it was not chosen."""
        kind, template = engine.model_config.model_type, engine.tokenizer.chat_template
        reasoning = reasoning_parser(kind, template) if self.reasoning == AUTO else self.reasoning
        tools = tool_call_parser(kind, template) if self.tools == AUTO else self.tools
        return Dialect(reasoning not in (None, NONE), None if tools == NONE else tools)


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """How the turns of one call are begun and read.

    Attributes:
      tools: the functions, as a chat template wants them; None where it must not show any.
      parser: the tool call parser, or None where no call is looked for.
      opening: text that the turn is begun with for the model, so that it cannot but call.
      inside_reasoning: the prompt ends with reasoning that it has opened.
      goes_on: the prompt ends within a turn, and what is made is the rest of it.
      has_grammar: the text is held to a grammar from its first token: there is no reasoning.
      grammar: the one that a strict function's call has to fit.
    """

    reasoning: bool = False
    tools: tuple[dict[str, object], ...] | None = None
    schemas: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    parser: str | None = None
    opening: str = ""
    only_one: bool = False
    inside_reasoning: bool = False
    goes_on: bool = False
    has_grammar: bool = False
    grammar: GrammarSpec | None = None

    def begin(self, prompt: str, said: str | None = None) -> tuple[str, "TurnPlan"]:
        """The prompt with the turn begun, and the plan that knows how it ends.

        Args:
          said: what the turn has already, at the end of the prompt; None where it is new.
        """
        if said is None:
            inside = self.reasoning and prompt.rstrip().endswith(THINK)
        else:
            inside = self.reasoning and said.rfind(THINK) > said.rfind(END_THINK)
        if inside and (self.opening or self.has_grammar):
            return f"{prompt}{END_THINK}\n\n{self.opening.lstrip()}", self
        thinks = self.reasoning if said is None else inside
        plan = dataclasses.replace(self, reasoning=thinks, inside_reasoning=inside, goes_on=said is not None)
        return prompt + self.opening, plan

    def marks(self) -> set[str]:
        """What the parsers look for in the text."""
        found = {THINK, END_THINK} if self.reasoning else set()
        if self.parser is not None and self.parser != JSON:
            form = FORMATS[self.parser]
            found |= {form.start, form.end, *form.quotes, *form.wrappers}
        return found

    def turn(self) -> "Turn":
        parser = TurnParser(
            self.reasoning and not self.opening and not self.has_grammar,
            self.inside_reasoning,
            self.parser,
            self.schemas,
            self.only_one,
            self.goes_on,
        )
        return Turn(parser, self.opening)


def plan_turn(
    dialect: Dialect,
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    parallel: bool | None,
    *,
    has_grammar: bool = False,
) -> TurnPlan:
    """The plan of a call. Raises ApiError 400 where the tools, or the choice among them, cannot be used."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise ApiError(400, "tools: expected functions with different names", "tools", "invalid_value")
    if not tools and choice not in (None, AUTO, NONE):
        raise ApiError(400, "tool_choice: there are no tools to choose from", "tool_choice", "invalid_value")
    if not tools or choice == NONE:
        return TurnPlan(reasoning=dialect.reasoning, has_grammar=has_grammar)
    if dialect.tools is None:
        message = "tools: this model's chat template knows no tools, and the server has no --tool-call-parser"
        raise ApiError(400, message, "tools", "unsupported_parameter")
    tools, choice = _allowed(tools, choice)
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    if wanted is not None and wanted not in names:
        message = f"tool_choice: got {wanted!r}; expected one of {', '.join(names)}"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    forced = choice == "required" or wanted is not None
    if forced and has_grammar:
        message = "tool_choice: a call cannot be what response_format or structured_outputs ask for"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    return TurnPlan(
        reasoning=dialect.reasoning,
        tools=tuple(tool.as_template_tool() for tool in tools),
        schemas={tool.function.name: tool.function.parameters or {} for tool in tools},
        parser=None if has_grammar else dialect.tools,  # what has a form of its own is the answer
        opening=opening(dialect.tools, wanted) if forced else "",
        only_one=parallel is False or wanted is not None,
        has_grammar=has_grammar,
        grammar=_strict_call(dialect.tools, tools, wanted, forced=forced),
    )


def _allowed(
    tools: Sequence[Tool], choice: ToolChoice | None
) -> tuple[Sequence[Tool], Literal["none", "auto", "required"] | NamedTool | None]:
    """The tools that may be called, and the choice among them. The others are not shown to the model."""
    if not isinstance(choice, AllowedTools):
        return tools, choice
    listed, names = choice.allowed_tools, [tool.function.name for tool in tools]
    for named in listed.tools:
        if named.function.name not in names:
            message = (
                f"tool_choice.allowed_tools.tools: got {named.function.name!r}; expected names of tools: "
            )
            raise ApiError(400, message + ", ".join(names), "tool_choice", "invalid_value")
    allowed = {named.function.name for named in listed.tools}
    return [tool for tool in tools if tool.function.name in allowed], listed.mode


def _strict_call(
    parser: str, tools: Sequence[Tool], wanted: str | None, *, forced: bool
) -> GrammarSpec | None:
    """The grammar of a call of a strict function, if there is one among those that may be called."""
    called = [tool.function for tool in tools if wanted in (None, tool.function.name)]
    index, strict = next(((i, tool) for i, tool in enumerate(tools) if tool.function.strict), (0, None))
    if strict is None or not any(function.strict for function in called):
        return None
    if not forced or parser not in JSON_CALLS:
        field = f"tools[{index}].function.strict"
        legal = "false or null unless tool_choice is required or names a function, and calls are JSON"
        raise ApiError(400, f"{field}: got true; expected {legal}", field, "unsupported_parameter")
    schemas = {f.name: (f.parameters or {}) if f.strict else {} for f in called}
    return call_grammar(parser, schemas, named=wanted is not None)


class Turn:
    """One turn as it grows: what has come of it, as parts."""

    def __init__(self, parser: TurnParser, opening: str = ""):
        self._parser = parser
        self.reasoning, self.content = "", ""
        self.calls: list[tuple[str, Call]] = []  # id, call
        self.parts: list[Part] = []  # in order, neighbours of a kind joined
        self._early = parser.push(opening) if opening else []  # nothing, as a rule: a call has only begun

    def push(self, text: str, is_last: bool) -> list[Part]:
        """Takes text; returns the parts that are new."""
        parts = self._early + self._parser.push(text) + (self._parser.finish() if is_last else [])
        self._early = []
        for part in parts:
            self._join(part)
            match part:
                case Reasoning():
                    self.reasoning += part.text
                case Content():
                    self.content += part.text
                case Call():
                    self.calls.append((f"call_{uuid.uuid4().hex[:24]}", part))
        return parts

    def _join(self, part: Part) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(part, Content) and isinstance(last, Content):
            self.parts[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            self.parts[-1] = Reasoning(last.text + part.text)
        else:
            self.parts.append(part)

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for a turn that ends with calls."""
        return "tool_calls" if self.calls and reason == "stop" else reason


class Segments:
    """Says where one part of a turn ends and the next begins, for protocols that tell it.

    Each step is (what, part): "open" and "close" around "more", with which text comes. A call has no
    "more". `index` counts the parts that were opened, from 0.
    """

    def __init__(self):
        self._current: Reasoning | Content | None = None
        self.index = -1

    def push(self, parts: Iterable[Part]) -> Iterator[tuple[str, Part]]:
        for part in parts:
            if type(part) is not type(self._current):
                yield from self.finish()
                self.index += 1
                yield "open", part
            if isinstance(part, Call):
                yield "close", part
            else:
                self._current = part
                yield "more", part

    def finish(self) -> Iterator[tuple[str, Part]]:
        """Closes the part that is open."""
        part, self._current = self._current, None
        if part is not None:
            yield "close", part


@functools.lru_cache(maxsize=4)
def resolved(options: ParserOptions, engine: EngineCore) -> Dialect:
    return options.resolve(engine)
