"""Bodies of Anthropic's /v1/messages, and the chat request that each of them is."""

import json
from typing import Annotated, Literal

from pydantic import Field, field_validator

from mtp_jax.server.body import Body, invalid
from mtp_jax.server.errors import ApiError
from mtp_jax.server.messages import MAX_TOOLS, FunctionName
from mtp_jax.server.protocol import MAX_STOP_STRINGS, ChatBody, chat_body

_NAMES = {"response_format": "output_config.format"}  # of chat's fields


class _Block(Body):
    cache_control: dict[str, object] | None = None  # the prefix cache needs no hint


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]
    caller: dict[str, object] | None = None


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(_Block):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, object]


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # not held: the model thinks as long as it does
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None

    def as_chat(self) -> dict[str, object] | None:
        """Chat's `response_format`."""
        if self.format is None:
            return None
        return {"type": "json_schema", "json_schema": {"schema": self.format.schema_}}


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @field_validator("messages")
    @classmethod
    def _messages(cls, value: list[Message]) -> list[Message]:
        if not value:
            raise invalid("at least one message")
        last = value[-1]
        blocks = [] if isinstance(last.content, str) else last.content
        texts = [block.text for block in blocks if isinstance(block, TextBlock)]
        said = last.content if isinstance(last.content, str) else "".join(texts)
        if last.role == "assistant" and (len(texts) < len(blocks) or not said.strip()):
            raise invalid("text alone in a last message of the assistant's, which the answer goes on with")
        return value

    @field_validator("tools")
    @classmethod
    def _tools(cls, value: list[AnthropicTool] | None) -> list[AnthropicTool] | None:
        if value is not None and len(value) > MAX_TOOLS:
            raise invalid(f"at most {MAX_TOOLS} tools")
        return value

    def _chat_fields(self) -> dict[str, object]:
        system = [] if not self.system else [{"role": "system", "content": _text(self.system)}]
        fields: dict[str, object] = {
            "model": self.model,
            "messages": system + [item for message in self.messages for item in _chat_messages(message)],
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "response_format": None if self.output_config is None else self.output_config.as_chat(),
        }
        if self.messages[-1].role == "assistant":  # a prefill
            fields["continue_final_message"] = True
        if self.tool_choice is not None:
            fields |= _chat_choice(self.tool_choice)
        if self.thinking is not None:  # two names, for templates have two
            thinks = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
        return fields

    def as_chat(self) -> ChatBody:
        return chat_body(self._chat_fields(), _NAMES)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Accepted and unused.
    metadata: dict[str, object] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @field_validator("stop_sequences")
    @classmethod
    def _stop(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and (not all(value) or len(value) > MAX_STOP_STRINGS):
            raise invalid(f"at most {MAX_STOP_STRINGS} strings, none of them empty")
        return value

    def as_chat(self) -> ChatBody:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        fields = {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences or None}
        return chat_body(self._chat_fields() | fields, _NAMES)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _chat_messages(message: Message) -> list[dict[str, object]]:
    """One message as OpenAI's API has it: results of tools are messages of their own there.

    It has no `is_error`, nor have templates: the text says so.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    if message.role == "assistant":
        if results:
            raise ApiError(400, "messages: tool_result blocks are the user's", "messages", "invalid_value")
        own: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
        if calls:
            own |= {"tool_calls": [_chat_call(call) for call in calls], "content": "".join(texts) or None}
        return [own | ({"reasoning_content": "".join(thoughts)} if thoughts else {})]
    if calls or thoughts:
        text = "messages: tool_use and thinking blocks are the assistant's"
        raise ApiError(400, text, "messages", "invalid_value")
    told: list[dict[str, object]] = [
        {"role": "tool", "tool_call_id": result.tool_use_id, "content": _told(result)} for result in results
    ]
    if texts or not told:
        told.append({"role": "user", "content": "".join(texts)})
    return told


def _told(result: ToolResultBlock) -> str:
    text = _text(result.content)
    return f"Error: {text}" if result.is_error and not text.lower().startswith("error") else text


def _chat_call(call: ToolUseBlock) -> dict[str, object]:
    return {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input)}}


def _chat_tool(tool: AnthropicTool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _chat_choice(choice: AnthropicToolChoice) -> dict[str, object]:
    if (choice.type == "tool") != (choice.name is not None):
        message = "tool_choice: expected a name with the type tool, and with no other"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    kinds: dict[str, object] = {"auto": "auto", "any": "required", "none": "none"}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": kinds.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }
