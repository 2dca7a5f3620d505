"""Messages and tools of a chat request, and what they are for a chat template."""

import json
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from mtp_jax.server.body import Body, invalid
from mtp_jax.text.turn.parts import dump_json, load_json

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Arguments(dict):
    """A call's arguments for both kinds of template: those that take a mapping, and those that take JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _arguments(cls, value: str) -> str:
        try:
            if not isinstance(load_json(value or "{}"), dict):
                raise ValueError
            return dump_json(load_json(value or "{}"))
        except ValueError:
            raise invalid("a JSON object in a string") from None


class ToolCall(Body):
    """A call that the assistant made, as it was answered."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that put streamed deltas together keep it


class ChatMessage(Body):
    """One message. What OpenAI's client returns for an assistant may be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(default=None, validate_default=True)
    content: str | list[TextPart] | None = Field(default=None, validate_default=True)
    reasoning_content: str | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None

    @field_validator("tool_calls")
    @classmethod
    def _tool_calls(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role") != "assistant":
            raise invalid("null unless the role is assistant")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _tool_call_id(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("role") == "tool") != (value is not None):
            raise invalid("the id of the call in a message of the role tool, and in no other")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, value: object, info: ValidationInfo) -> object:
        called = value is None and info.data.get("role") == "assistant" and info.data.get("tool_calls")
        if not isinstance(value, str | list) and not called:
            raise invalid("a string or a list of text parts")
        return value

    @property
    def text(self) -> str | None:
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    @property
    def num_characters(self) -> int:
        """What a template has to write, about."""
        calls = self.tool_calls or ()
        return len(self.text or "") + sum(len(call.function.arguments) for call in calls)

    def as_template_message(self) -> dict[str, object]:
        """The message for a chat template: plain text; a developer's message is the system's."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, object] = {"role": role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [_template_call(call) for call in self.tool_calls]
        return message


def _template_call(call: ToolCall) -> dict[str, object]:
    arguments = Arguments(json.loads(call.function.arguments))
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class FunctionSpec(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None  # arguments are held to `parameters`, where a call is asked for


class Tool(Body):
    type: Literal["function"]
    function: FunctionSpec

    def as_template_tool(self) -> dict[str, object]:
        """The tool for a chat template, in OpenAI's shape."""
        function = self.function.model_dump(exclude_none=True)
        # A template prints the keys in this order, and models were trained on it.
        return {"type": "function", "function": {"name": "", "description": "", "parameters": {}, **function}}


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedList(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(Body):
    """Some of the tools: the others are as if they were not there."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools
