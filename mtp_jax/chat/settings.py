"""What can be set: on the command line as flags, in the chat by /set. Both read the same table."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from mtp_jax.errors import InvalidRequestError, InvalidValueError
from mtp_jax.request import SamplingParams
from mtp_jax.server.arguments import Parser, ServeOptions, add_flags, flag_of, resolve
from mtp_jax.server.readers import any_text, number

COLOR = ("auto", "always", "never")
DEFAULTS = SamplingParams(temperature=0.7, max_tokens=None)
ENDS = -(2**63), 2**63 - 1


def _or_none(read: Callable[[str], int | float]) -> Callable[[str], int | float | None]:
    def parse(text: str) -> int | float | None:
        try:
            return None if text == "none" else read(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or none") from None

    return parse


# Field of SamplingParams -> (help, how to read it).
SETTINGS: dict[str, tuple[str, Callable[[str], int | float | None]]] = {
    "temperature": ("0 is greedy", number(float, 0, 100)),
    "top_p": ("smallest set of tokens with at least this mass", number(float, 0, 1)),
    "top_k": ("most likely tokens kept; 0 keeps all", number(int, 0)),
    "seed": ("same seed, same answer; none draws one", _or_none(number(int, *ENDS))),
    "max_tokens": ("tokens of an answer at most; none is what the context allows", _or_none(number(int, 1))),
    "num_speculative_tokens": ("drafts a round; none is the engine's", _or_none(number(int, 0))),
}
_FLAGS = tuple(name for name in SETTINGS if name != "num_speculative_tokens")  # that flag is the engine's

DESCRIPTION = """Chat with a model in the terminal.

Without a terminal at its input it reads one turn a line. Answers go to stdout; figures and messages to
stderr. Ctrl-C stops an answer, a second one leaves."""
EPILOG = """After each answer: tokens/s from the first token to the last; accepted length: mean tokens a
round, over the rounds that verified drafts; acceptance: share of the drafts that stood.
/help in the chat lists its commands."""


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """Everything the chat was asked for."""

    engine: ServeOptions
    params: SamplingParams = DEFAULTS
    system: str | None = None  # the system message
    color: str = "auto"  # one of COLOR


def make_parser(prog: str) -> Parser:
    """The chat's parser: flags of the conversation, then the engine's."""
    parser = Parser(prog, DESCRIPTION, EPILOG)
    group = parser.add_argument_group("chat")
    group.add_argument("--system", type=any_text, help="the system message")
    for name in _FLAGS:
        text, read = SETTINGS[name]
        help_text = f"{text} (default: {str(getattr(DEFAULTS, name)).lower()})"
        group.add_argument(
            flag_of(name), dest=name, type=read, help=help_text, metavar=name.rsplit("_", 1)[-1].upper()
        )
    text = "text of accepted drafts in green; auto: on a terminal, unless NO_COLOR is set (default: auto)"
    group.add_argument("--color", choices=COLOR, help=text)
    add_flags(parser, ("model", "layout", "engine"), without=("served_model_name",))
    return parser


def parse_options(argv: Sequence[str], prog: str) -> ChatOptions:
    """Reads the command line.

    Raises:
      SystemExit: code 2 after one line on stderr; code 0 after --help.
    """
    parser = make_parser(prog)
    given = parser.given(argv)
    own = {name: given.pop(name) for name in ("system", "color") if name in given}
    sampling = {name: given.pop(name) for name in _FLAGS if name in given}
    try:
        params = dataclasses.replace(DEFAULTS, **sampling)
        return ChatOptions(resolve(given, {}), params, **own)
    except InvalidValueError as error:
        field = error.field if error.field.startswith("-") else flag_of(error.field)
        parser.error(f"{field}: got {error.got!r}; expected {error.legal}")


def change(params: SamplingParams, text: str) -> SamplingParams:
    """The parameters after `/set TEXT`, such as `temperature=0 max_tokens=50`.

    Raises:
      InvalidRequestError: an unknown name or a value that cannot be used.
    """
    values = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or name not in SETTINGS:
            raise InvalidRequestError("/set", word, f"NAME=VALUE, and as NAME {', '.join(SETTINGS)}")
        try:
            values[name] = SETTINGS[name][1](value)
        except argparse.ArgumentTypeError as error:
            raise InvalidRequestError(name, value, str(error).partition("expected ")[2]) from None
    return dataclasses.replace(params, **values)


def describe(params: SamplingParams) -> str:
    """The values in force, as /set takes them."""
    return " ".join(f"{name}={str(getattr(params, name)).lower()}" for name in SETTINGS)
