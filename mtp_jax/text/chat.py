"""Chat templates: conversations to prompt text by the checkpoint's own Jinja template."""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mtp_jax.errors import InvalidRequestError, InvalidValueError

Message = Mapping[str, object]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training: plain text here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: object) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which templates for models do not want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # pyright: ignore


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment.from_string(template)


def check_template(source: str, where: str) -> None:
    """Raises InvalidValueError, with `where` as the field, unless `source` is a Jinja template."""
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        legal = f"a Jinja template ({error.message}, line {error.lineno})"
        raise InvalidValueError(where, source[:40], legal) from None


def render_chat(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, object],
) -> str:
    """The conversation as prompt text.

    Args:
      variables: whatever else the template may ask for: special tokens and the caller's own.

    Raises:
      InvalidRequestError: field `messages`; the template refuses this conversation.
    """
    own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
    try:
        # One mapping, because a name such as `self` could not be passed as a keyword.
        return _compile(template).render({"documents": None, **variables, **own})
    except Exception as error:  # whatever a template stumbles over, it is these messages and variables
        reason = f"messages that the model's chat template accepts ({error})"
        raise InvalidRequestError("messages", _short(messages), reason) from error


def _short(messages: Sequence[Message]) -> str:
    text = repr(list(messages))
    return text if len(text) <= 200 else text[:200] + "..."
