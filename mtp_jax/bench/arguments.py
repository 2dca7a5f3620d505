"""Flags of the two modes, and what they come to."""

import argparse
import dataclasses
import json
import math
import os
import urllib.parse
from collections.abc import Sequence
from typing import Any, ClassVar

from mtp_jax.errors import InvalidValueError
from mtp_jax.request import SamplingParams
from mtp_jax.server.arguments import Parser, ServeOptions, add_flags, flag_of, resolve
from mtp_jax.server.readers import any_text, number

ENDPOINTS = ("completions", "chat")
KEY_VARIABLE = "OPENAI_API_KEY"

METRICS = """\
what is measured (times start when a request is sent):
  time to first token    to the first chunk with text; in the chat format the role alone is none
  inter-token latency    between two chunks with text, so the first token is left out; a chunk that brings
                         several tokens, as speculation makes them, is one interval
  time per output token  (end to end - time to first token) / (output tokens - 1)
  end to end             to the last chunk
  throughput             completed requests, and their tokens as the server's usage counts them, over the
                         time from the first request sent to the last answer's end
  acceptance             at each position the share of the rounds with drafts in which that draft stood;
                         accepted length is the mean of tokens a round, the target's own included
"""
_SERVE_NOTES = """\
A request that waits for --max-concurrency is not sent yet. Acceptance is the growth of the counters
*:spec_decode_num_* at /metrics (vLLM has them too), and so counts whatever else the server does meanwhile.

exit code: 0, 1 if a request failed, 2 for a mistake in the flags"""
_OFFLINE_NOTES = """\
All prompts are handed to the engine at once; a chunk is an increment of the engine. Waiting for a slot is
part of the time to first token.

exit code: 0, 1 if a request failed, 2 for a mistake in the flags"""


@dataclasses.dataclass(frozen=True)
class Load:
    """What both modes are asked for."""

    DEFAULT_NUM_PROMPTS: ClassVar[int] = 100

    endpoint: str = "completions"  # one of ENDPOINTS
    prompts: str | None = None  # a file; None makes random ones
    num_prompts: int | None = None  # None: those of the file, or DEFAULT_NUM_PROMPTS
    input_len: int = 128  # tokens of a random prompt
    output_len: int = 128  # tokens of an answer at most
    num_warmups: int = 0  # requests sent before, and not measured
    temperature: float | None = None  # None: the server's default, or 1
    ignore_eos: bool = False
    seed: int = 0  # of prompts, arrivals and, offline, sampling
    json: str | None = None  # file to write

    def settings(self) -> dict[str, object]:
        """Everything but secrets, as values for JSON."""
        values = dataclasses.asdict(self)
        values.pop("api_key", None)
        return {name: "inf" if value == math.inf else value for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class ServeLoad(Load):
    """The load on a server."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None  # None asks the server
    api_key: str | None = None
    request_rate: float = math.inf  # a second; inf is all at once
    max_concurrency: int | None = None  # None: no limit
    vocab_size: int = 10000  # random token ids are below it
    timeout: float = 600.0  # seconds for a whole answer
    extra_body: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        """The sampling part of each body."""
        chosen: dict[str, Any] = {} if self.temperature is None else {"temperature": self.temperature}
        if self.ignore_eos:
            chosen["ignore_eos"] = True  # no parameter of OpenAI's: only sent where it is asked for
        return chosen | self.extra_body


@dataclasses.dataclass(frozen=True)
class OfflineLoad(Load):
    """Work for an engine in this process."""

    engine: ServeOptions = dataclasses.field(default_factory=ServeOptions)

    def settings(self) -> dict[str, object]:
        return super().settings() | {"engine": self.engine.llm_arguments}

    def sampling_params(self, max_tokens: int, seed: int) -> SamplingParams:
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=self.ignore_eos
        )


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number above 0, or inf")
    return value


def _url(text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an address such as http://127.0.0.1:8000")
    if "@" in parts.netloc:  # it would go into the report; and it is not shown here
        raise argparse.ArgumentTypeError("got a user's name in it; expected none: keys go into --api-key")
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a JSON object")
    return value


def _add_load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--endpoint", choices=ENDPOINTS, help="chat uses the chat template (default: completions)"
    )
    group.add_argument(
        "--prompts",
        type=any_text,
        metavar="FILE",
        help="one prompt a line; .jsonl: texts, or objects with prompt or messages and perhaps max_tokens "
        "(default: random prompts)",
    )
    counts = (
        (
            "num_prompts",
            1,
            "requests; a file with fewer is used over again (default: those of the file, or 100)",
        ),
        ("input_len", 1, f"tokens of a random prompt (default: {Load.input_len})"),
        ("output_len", 1, f"tokens of an answer at most (default: {Load.output_len})"),
        ("num_warmups", 0, f"requests that are sent before and not measured (default: {Load.num_warmups})"),
        ("seed", 0, f"of prompts, arrivals and, offline, sampling (default: {Load.seed})"),
    )
    for name, low, text in counts:
        group.add_argument(flag_of(name), type=number(int, low), help=text, metavar="N")
    group.add_argument(
        "--temperature", type=number(float, 0, 100), help="0 is greedy (default: the server's, or 1)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="answers go on to --output-len")
    group.add_argument("--json", type=any_text, metavar="FILE", help="write everything that is known to FILE")


def make_serve_parser(prog: str) -> Parser:
    """Flags of `bench serve`."""
    parser = Parser(prog, "Measure an OpenAI-compatible server.", METRICS + _SERVE_NOTES)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url", type=_url, help=f"its address, with or without /v1 (default: {ServeLoad.url})"
    )
    group.add_argument(
        "--model", type=any_text, help="name to ask for (default: the first that the server names)"
    )
    group.add_argument("--api-key", type=any_text, metavar="KEY", help=f"(default: ${KEY_VARIABLE})")
    group.add_argument(
        "--request-rate", type=_rate, metavar="R", help="a second, Poisson (default: inf, all at once)"
    )
    group.add_argument(
        "--max-concurrency", type=number(int, 1), metavar="N", help="requests in flight at most"
    )
    text = f"random token ids are below it (default: {ServeLoad.vocab_size})"
    group.add_argument("--vocab-size", type=number(int, 16), metavar="N", help=text)
    text = f"seconds for a whole answer (default: {ServeLoad.timeout:g})"
    group.add_argument("--timeout", type=number(float, 0.001), metavar="S", help=text)
    text = """further parameters of each request, such as '{"top_p": 0.9}'"""
    group.add_argument("--extra-body", type=_json_object, metavar="JSON", help=text)
    _add_load(parser)
    return parser


def make_offline_parser(prog: str) -> Parser:
    """Flags of `bench offline`."""
    parser = Parser(prog, "Measure the engine in this process, without HTTP.", METRICS + _OFFLINE_NOTES)
    _add_load(parser)
    add_flags(parser, ("model", "layout", "engine"), without=("served_model_name",))
    return parser


def parse_serve(argv: Sequence[str], prog: str) -> ServeLoad:
    """Raises SystemExit: code 2 after one line on stderr; code 0 after --help."""
    given = make_serve_parser(prog).given(argv)
    given.setdefault("api_key", os.environ.get(KEY_VARIABLE) or None)
    return ServeLoad(**given)


def parse_offline(argv: Sequence[str], prog: str) -> OfflineLoad:
    """Raises SystemExit: code 2 after one line on stderr; code 0 after --help."""
    parser = make_offline_parser(prog)
    given = parser.given(argv)
    own = {field.name: given.pop(field.name) for field in dataclasses.fields(Load) if field.name in given}
    try:
        return OfflineLoad(**own, engine=resolve(given, {}))
    except InvalidValueError as error:
        field = error.field if error.field.startswith("-") else flag_of(error.field)
        parser.error(f"{field}: got {error.got!r}; expected {error.legal}")
