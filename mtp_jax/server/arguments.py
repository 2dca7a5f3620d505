"""Flags of the server, its configuration file, and what both come to: `ServeOptions`.

The chat and the benchmark take the engine's flags from here too (`add_flags`, `resolve`).

Every default is read from a dataclass, so that help text and behaviour cannot drift; where the engine
chooses by model and device, help says so (`CHOSEN`). Three layers, the later wins: defaults, the
--config file, the command line.
"""

import argparse
import dataclasses
import difflib
import sys
import tomllib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mtp_jax.config import AUTO, AUTO_DRAFTS, EngineConfig
from mtp_jax.engine.prepare import default_compile_cache
from mtp_jax.errors import InvalidValueError
from mtp_jax.server.more_flags import ANSWER_FLAGS, HOST_FLAGS, LIMIT_FLAGS
from mtp_jax.server.readers import Flag, any_text, layer_counts, number, number_or_auto, origins

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Everything the server was asked for.

    `overrides` are fields of EngineConfig that were given; the engine chooses the others for the
    model and the machine, starting from EngineConfig's defaults.
    """

    overrides: Mapping[str, int | bool | str | tuple[int, ...]] = dataclasses.field(default_factory=dict)
    model: str | None = None  # a Hugging Face directory or a GGUF file; None is the default model
    served_model_name: str | None = None  # None: the model's own
    mtp_head: str | None = None  # file or directory with the weights of an MTP module
    dtype: str = "auto"  # one of DTYPES
    kv_cache_gib: float | None = None  # instead of engine.num_pages: memory for KV pages, per device
    compile_cache: str = dataclasses.field(default_factory=default_compile_cache)  # a folder or "off"
    coordinator: str | None = None  # HOST:PORT of process 0; None: from the environment, if at all
    num_processes: int | None = None
    process_id: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()  # of browsers' pages that may call; "*" is any
    max_body_mib: float = 8.0
    max_header_kib: float = 32.0
    max_json_depth: int = 64
    max_queued_requests: int = 1024  # completions that wait for a slot
    request_timeout: float = 0.0  # seconds; 0 is none
    client_timeout: float = 60.0  # seconds
    chat_template: str | None = None  # file; None: the model's own
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    per_request_spec_decode_metrics: str = "none"
    otlp_traces_endpoint: str | None = None  # URL of a collector; None makes no traces
    drain_timeout: float = 30.0  # seconds
    watchdog_timeout: float = 300.0  # seconds
    log_level: str = "info"
    log_format: str = "text"
    check: bool = False

    @property
    def engine(self) -> EngineConfig:
        """EngineConfig's defaults with the overrides; what is `auto` is left to the engine."""
        given = {name: value for name, value in self.overrides.items() if value != AUTO}
        return EngineConfig(**given)  # pyright: ignore[reportArgumentType]

    @property
    def llm_arguments(self) -> dict[str, Any]:
        """The engine's part as arguments of `mtp_jax.llm.LLM`."""
        names = ("model", "mtp_head", "dtype", "kv_cache_gib", "compile_cache")
        return {name: getattr(self, name) for name in names} | dict(self.overrides)


def flag_of(field: str) -> str:
    """num_pages -> --num-pages."""
    return {"enable_prefix_caching": "--no-prefix-caching"}.get(field, "--" + field.replace("_", "-"))


_INTEGER = number(int, 0)  # EngineConfig knows the ranges
FLAGS: dict[str, dict[str, Flag]] = {
    "model": {
        "model": (
            "Hugging Face directory, GGUF file or output of `mtp-jax convert`; without it, the default model",
            any_text,
            None,
        ),
        "served_model_name": ("name that clients ask for ('default' always works)", any_text, None),
        "mtp_head": ("file or directory with the weights of an MTP module", any_text, None),
        "dtype": (
            "type of weights and caches; auto is float32 on CPU and bfloat16 elsewhere",
            any_text,
            DTYPES,
        ),
    },
    "layout": {
        "stages": ("pipeline stages, or auto: what suits the devices", number_or_auto, None),
        "stage_layers": (
            "layers of each stage, such as 16,15,15,15, instead of the planner's cuts",
            layer_counts,
            None,
        ),
        "tensor": ("shards of heads, ffn columns and vocabulary, or auto", number_or_auto, None),
        "data": ("replicas of slots and pages, or auto", number_or_auto, None),
        "experts_over": (
            "devices that share the experts of a layer: shards of one replica, or of all",
            any_text,
            ("tensor", "data-tensor"),
        ),
    },
    "engine": {
        "max_num_seqs": ("completions decoded together; more are queued", _INTEGER, None),
        "max_model_len": ("tokens of prompt and completion together", _INTEGER, None),
        "page_size": ("tokens in a KV page, a multiple of 4", _INTEGER, None),
        "num_pages": ("KV pages, in each replica", _INTEGER, None),
        "kv_cache_gib": (
            "instead of --num-pages: GiB of KV pages on each device",
            number(float, 0.001),
            None,
        ),
        "num_speculative_tokens": ("drafts a round: 0 to 8, or auto", number_or_auto, None),
        "draft_sampling": ("how drafts are chosen when sampling", any_text, ("greedy", "probabilistic")),
        "logprobs_mode": (
            "log-probabilities of the model, or of what is sampled from",
            any_text,
            ("raw", "processed"),
        ),
        "prefill_chunk": ("prompt tokens in a tick at most", _INTEGER, None),
        "max_rounds": ("rounds of the ring in a dispatch at most: 1, 2, 4 or 8", _INTEGER, None),
        "compile_cache": ("folder for compiled programs, or 'off'", any_text, None),
    },
    "hosts": HOST_FLAGS,
    "server": {
        "host": ("address to listen on", any_text, None),
        "port": ("port to listen on; 0 takes a free one", number(int, 0, 65535), None),
        "allowed_origins": (
            "origins of web pages that may call the server, with commas between; * is any",
            origins,
            None,
        ),
        "api_key": ("key that clients must send; /health, /ready and /metrics stay open", any_text, None),
        "drain_timeout": ("seconds that running requests get to finish on SIGTERM", number(float, 0), None),
        "watchdog_timeout": (
            "seconds without a finished dispatch, while there is work, after which /health says 503",
            number(float, 1),
            None,
        ),
        "log_level": ("least severity that is logged", any_text, ("debug", "info", "warning", "error")),
        "log_format": ("text or one JSON object a line", any_text, ("text", "json")),
    },
    "answers": ANSWER_FLAGS,
    "limits": LIMIT_FLAGS,
}
_ENGINE_FIELDS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
# Fields whose values `engine.build` chooses unless they are given -> what help says of their defaults.
CHOSEN = {
    "max_num_seqs": f"chosen for the device; {EngineConfig.max_num_seqs} on CPU",
    "max_model_len": f"chosen for model and device; at most {EngineConfig.max_model_len} on CPU",
    "num_pages": "chosen for model and device; what memory allows",
    "num_speculative_tokens": f"auto: with an MTP module 0 to {AUTO_DRAFTS}, whatever measures best; else 0",
    "prefill_chunk": f"chosen for the device; {EngineConfig.prefill_chunk} on CPU",
    "max_rounds": f"chosen for the device; {EngineConfig.max_rounds} on CPU",
}


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2; flags that are not given leave no attribute behind."""

    def __init__(self, prog: str, description: str, epilog: str | None = None):
        super().__init__(
            prog=prog,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.removeprefix('argument ').split())}\n")

    def given(self, argv: Sequence[str]) -> dict[str, Any]:
        """The flags of a command line and their values. Ends the process over one that does not exist."""
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(_unknown(unknown[0], self))
        return vars(namespace)


def add_flags(parser: Parser, titles: Sequence[str], without: Container[str] = ()) -> None:
    """Adds groups of `FLAGS`, but for the fields in `without`."""
    defaults = {field.name: getattr(ServeOptions(), field.name) for field in dataclasses.fields(ServeOptions)}
    defaults = _ENGINE_FIELDS | defaults  # ServeOptions wins: "auto" is none of EngineConfig's types
    for title in titles:
        flags = FLAGS[title]
        group = parser.add_argument_group(title)
        for field, (text, read, choices) in flags.items():
            if field in without:
                continue
            default = CHOSEN.get(field, defaults[field])
            shown = text if default in (None, ()) else f"{text} (default: {default})"
            group.add_argument(
                flag_of(field),
                dest=field,
                type=read,
                choices=choices,
                help=shown.replace("%", "%%"),
                metavar=None if choices else field.rsplit("_", 1)[-1].upper(),
            )
        if title == "engine":
            group.add_argument(
                "--no-prefix-caching",
                dest="no_prefix_caching",
                action="store_true",
                help="compute every prompt from its start",
            )


def make_parser(prog: str) -> Parser:
    """The server's parser."""
    parser = Parser(prog, "Serve a model over HTTP with OpenAI's API.")
    add_flags(parser, tuple(FLAGS))
    parser.add_argument("--config", metavar="FILE", help="TOML file; keys are flags with underscores")
    parser.add_argument("--check", action="store_true", help="validate, print what would run, and exit")
    return parser


def parse_options(argv: Sequence[str], prog: str = "mtp-jax serve") -> ServeOptions:
    """Reads the command line and the file it names.

    Raises:
      SystemExit: code 2 after one line on stderr; code 0 after --help.
    """
    parser = make_parser(prog)
    given = parser.given(argv)
    try:
        from_file = read_file(parser, given.pop("config")) if "config" in given else {}
        return resolve(given, from_file)
    except InvalidValueError as error:
        field = flag_of(error.field) if error.field in _ENGINE_FIELDS else error.field
        parser.error(f"{field}: got {error.got!r}; expected {error.legal}")


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    name = word.split("=")[0]
    flags = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(name, flags, n=1)
    return f"{name}: no such flag; {f'did you mean {close[0]}?' if close else 'see --help'}"


def resolve(given: Mapping[str, object], from_file: dict[str, object]) -> ServeOptions:
    """Options from flags and the values of a file, which the flags precede.

    Raises:
      InvalidValueError: a value out of range; fields of EngineConfig are named as there.
    """
    for one, other in (("num_pages", "kv_cache_gib"), ("kv_cache_gib", "num_pages")):
        if one in given:
            from_file.pop(other, None)
    values: dict = from_file | dict(given)
    if "num_pages" in values and "kv_cache_gib" in values:
        raise InvalidValueError("--kv-cache-gib", values["kv_cache_gib"], "only one of it and --num-pages")
    names = _ENGINE_FIELDS.keys() - {"dtype"}  # "auto" is none of EngineConfig's
    overrides = {name: values.pop(name) for name in tuple(values) if name in names}
    if values.pop("no_prefix_caching", False):
        overrides["enable_prefix_caching"] = False
    options = ServeOptions(overrides=overrides, **values)
    _ = options.engine  # checks the ranges
    return options


def read_file(parser: argparse.ArgumentParser, path: str) -> dict[str, object]:
    """The settings of a TOML file, read by the same rules as the flags."""
    try:
        table = tomllib.loads(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InvalidValueError("--config", path, f"a readable TOML file ({reason})") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError("--config", path, f"valid TOML ({error})") from None
    actions = {
        action.dest: action for action in parser._actions if action.dest not in ("help", "config", "check")
    }
    values: dict[str, object] = {}
    for key, value in table.items():
        where = f"--config {path}: {key}"
        if key not in actions:
            close = difflib.get_close_matches(key, actions, n=1)
            raise InvalidValueError(
                where, value, f"a known key{f'; did you mean {close[0]}?' if close else ''}"
            )
        values[key] = _file_value(actions[key], value, where)
    return values


def _file_value(action: argparse.Action, value: object, where: str) -> object:
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise InvalidValueError(where, value, "true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidValueError(where, value, "one text or number")
    if action.choices is not None and value not in action.choices:
        raise InvalidValueError(where, value, " or ".join(map(str, action.choices)))
    if action.type in (any_text, origins) and not isinstance(value, str):
        raise InvalidValueError(where, value, "a text in quotes")
    if action.type not in (any_text, number_or_auto, layer_counts, origins) and isinstance(value, str):
        raise InvalidValueError(where, value, "a number without quotes")
    assert callable(action.type)
    try:
        return action.type(str(value))
    except argparse.ArgumentTypeError as error:
        raise InvalidValueError(where, value, str(error).partition("expected ")[2]) from None


def fail(prog: str, error: Exception) -> int:
    """Prints the one line that a user's mistake gets; the exit code."""
    text = str(error)
    if isinstance(error, InvalidValueError) and error.field in _ENGINE_FIELDS | {"mtp_head": 0, "model": 0}:
        text = f"{flag_of(error.field)}: got {error.got!r}; expected {error.legal}"
    print(f"{prog}: {' '.join(text.split())}", file=sys.stderr)
    return 2
