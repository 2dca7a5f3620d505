"""What a conversation becomes a prompt by: the fields that chat and /tokenize have in common."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, ValidationInfo, field_validator

from mtp_jax.server.body import Body, invalid
from mtp_jax.server.errors import ApiError
from mtp_jax.server.messages import MAX_TOOLS, ChatMessage, Tool

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
SWITCHES = ("enable_thinking", "thinking")  # templates have either name for it
_OWN_NAMES = {"self", "messages", "tools", "add_generation_prompt", "documents"}  # set by the server


def in_order_of_calls(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Results of tools in the order of the calls: templates have no ids, and go by their places.

    A result of a call that the turn before it did not make is an error.
    """
    ordered: list[ChatMessage] = []
    calls: dict[str, int] = {}  # of the assistant's last turn: their places
    start = 0  # of the results that follow it
    for message in messages:
        if message.role != "tool":
            calls = {call.id: place for place, call in enumerate(message.tool_calls or ())}
            start = len(ordered) + 1
        elif message.tool_call_id not in calls:
            known = ", ".join(map(repr, calls)) or "no message of the role tool: no call came before it"
            raise invalid(f"tool_call_id of a call in the assistant's message before, not "
                          f"{message.tool_call_id!r}: {known}")  # fmt: skip
        ordered.append(message)
        if message.role == "tool":
            ordered[start:] = sorted(ordered[start:], key=lambda result: calls[result.tool_call_id or ""])
    return ordered


def _not_empty(messages: list[ChatMessage]) -> list[ChatMessage]:
    if not messages:
        raise invalid("at least one message")
    return messages


Messages = Annotated[list[ChatMessage], AfterValidator(_not_empty), AfterValidator(in_order_of_calls)]


class PromptFields(Body):
    """How messages become a prompt.

    `continue_final_message` leaves the last message open, which is the assistant's: the model goes on with
    it. `reasoning_effort` is a variable of the template, and turns thinking on, or off where it is `none`;
    what `chat_template_kwargs` say goes first.
    """

    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None  # null: true, but where the last message goes on
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: Effort | None = None

    @field_validator("tools", mode="after")
    @classmethod
    def _tools(cls, value: list[Tool] | None) -> list[Tool] | None:
        if value is not None and len(value) > MAX_TOOLS:
            raise invalid(f"at most {MAX_TOOLS} tools")
        return value

    @field_validator("chat_template_kwargs", mode="after")
    @classmethod
    def _kwargs(cls, value: dict[str, object] | None) -> dict[str, object] | None:
        for name, given in (value or {}).items():
            if name in _OWN_NAMES:
                raise invalid(f"names that the server does not set itself, not {name!r}")
            if name in SWITCHES and not isinstance(given, bool | None):  # the text "false" would turn it on
                raise invalid(f"true or false for {name}, not {given!r}")
        return value

    @field_validator("continue_final_message", mode="after")
    @classmethod
    def _one_end(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise invalid("false where add_generation_prompt is true")
        return value

    @property
    def template_variables(self) -> dict[str, object]:
        """What a template gets besides messages and tools."""
        begins = not self.continue_final_message and self.add_generation_prompt is not False
        variables: dict[str, object] = {"add_generation_prompt": begins}
        if self.reasoning_effort is not None:
            variables |= dict.fromkeys(SWITCHES, self.reasoning_effort != "none")
            variables["reasoning_effort"] = self.reasoning_effort
        return variables | (self.chat_template_kwargs or {})


class OpenEnd:
    """The last message left open: its end is marked, and the template's text is cut there.

    Raises:
      ApiError: 400, it is none that can go on.
    """

    def __init__(self, messages: Sequence[ChatMessage]):
        last = messages[-1]
        if last.role != "assistant" or not (last.text or "").strip() or last.tool_calls:
            raise _cannot_go_on("the last message must be the assistant's, with text and without calls")
        self.said = last.text or ""
        self._mark = uuid.uuid4().hex
        marked = last.model_copy(update={"content": self.said + self._mark})
        self.messages = [*messages[:-1], marked]

    def cut(self, text: str) -> str:
        """The template's text up to the mark. Raises ApiError 400 where it is not there, or there twice."""
        if text.count(self._mark) != 1:
            raise _cannot_go_on("this model's chat template does not show that message as it is")
        return text.partition(self._mark)[0]


def _cannot_go_on(reason: str) -> ApiError:
    field = "continue_final_message"
    return ApiError(400, f"{field}: got true; {reason}", field, "invalid_value")
