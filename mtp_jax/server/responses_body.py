"""The body of OpenAI's /v1/responses, and the chat request that it is. Nothing is stored."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from mtp_jax.server.body import Body, invalid
from mtp_jax.server.conversation import Effort
from mtp_jax.server.messages import MAX_TOOLS, FunctionName
from mtp_jax.server.protocol import ChatBody, chat_body
from mtp_jax.server.structured import JsonObjectFormat, JsonSchema, TextFormat


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


class InputMessage(Body):
    """A message; what was answered may be sent back as it is."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None
    caller: dict[str, object] | None = None


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, object]] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


InputItem = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class NamedChoice(Body):
    type: Literal["function"]
    name: str


class SchemaFormat(JsonSchema):
    """What chat has one level deeper."""

    type: Literal["json_schema"]


class AllowedChoice(Body):
    """Chat's `allowed_tools`, one level less deep."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1)


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: None = None  # reasoning comes as it is
    generate_summary: None = None


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None

    def as_chat(self) -> dict[str, object] | None:
        """Chat's `response_format`."""
        if not isinstance(self.format, SchemaFormat):
            return None if self.format is None else self.format.model_dump()
        schema = self.format.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}


class ResponsesStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """POST /v1/responses, the stateless part."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, object] | None = None
    # Only the values that need no state, and no feature that is missing here.
    background: Literal[False] | None = None
    include: list[None] | None = None
    previous_response_id: None = None
    conversation: None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    # Accepted and unused, as in chat.
    metadata: dict[str, object] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None
    user: str | None = None

    @field_validator("input")
    @classmethod
    def _input(cls, value: str | list[InputItem]) -> str | list[InputItem]:
        if not value:
            raise invalid("a text or at least one item")
        return value

    @field_validator("tools")
    @classmethod
    def _tools(cls, value: list[FunctionTool] | None) -> list[FunctionTool] | None:
        if value is not None and len(value) > MAX_TOOLS:
            raise invalid(f"at most {MAX_TOOLS} tools")
        return value

    def as_chat(self) -> ChatBody:
        choice: object = self.tool_choice
        if isinstance(choice, NamedChoice):
            choice = _chat_choice(choice)
        elif isinstance(choice, AllowedChoice):
            listed = {"mode": choice.mode, "tools": [_chat_choice(tool) for tool in choice.tools]}
            choice = {"type": choice.type, "allowed_tools": listed}
        return chat_body(
            {
                "model": self.model,
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "chat_template_kwargs": self.chat_template_kwargs,
                "response_format": None if self.text is None else self.text.as_chat(),
            },
            {"response_format": "text.format", "messages": "input", "reasoning_effort": "reasoning.effort"},
        )

    def _messages(self) -> list[dict[str, object]]:
        messages: list[dict[str, object]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            _add(messages, item)
        for message in messages:
            if message.get("content") is None and "tool_calls" not in message:
                message["content"] = ""  # a turn that was cut off while it reasoned
        return messages


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _add(messages: list[dict[str, object]], item: InputItem) -> None:
    """Adds an item; reasoning, text and calls of one turn become one message of the assistant."""
    match item:
        case FunctionCallOutput():
            told: dict[str, object] = {
                "role": "tool",
                "tool_call_id": item.call_id,
                "content": _text(item.output),
            }
            messages.append(told)
        case InputMessage() if item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
        case InputMessage():
            turn = _turn(
                messages, can_go_on=lambda last: last["content"] is None and "tool_calls" not in last
            )
            turn["content"] = _text(item.content)
        case ReasoningItem():
            turn = _turn(messages, can_go_on=lambda last: False)
            turn["reasoning_content"] = "".join(part.text for part in item.content or ())
        case FunctionCall():
            turn = _turn(messages, can_go_on=lambda last: True)
            calls = turn.setdefault("tool_calls", [])
            assert isinstance(calls, list)
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "function": function})


def _turn(
    messages: list[dict[str, object]], can_go_on: Callable[[dict[str, object]], bool]
) -> dict[str, object]:
    """The assistant's message that an item belongs to: the last one, or a new one."""
    if not (messages and messages[-1]["role"] == "assistant" and can_go_on(messages[-1])):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _chat_choice(choice: NamedChoice) -> dict[str, object]:
    return {"type": choice.type, "function": {"name": choice.name}}


def _chat_tool(tool: FunctionTool) -> dict[str, object]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
