"""The command line of the benchmarks.

Exit codes: 0, 1 if a request failed or the server did not answer, 2 for a mistake in flags or files.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from mtp_jax.bench import serve
from mtp_jax.bench.arguments import Load, parse_offline, parse_serve
from mtp_jax.bench.client import ServerError
from mtp_jax.bench.report import Report
from mtp_jax.errors import InvalidValueError, UnsupportedHereError
from mtp_jax.server.arguments import fail

MODES = {
    "serve": "measure an OpenAI-compatible server",
    "offline": "measure the engine in this process",
}


def main(argv: Sequence[str] | None = None, prog: str = "mtp-jax bench") -> int:
    """Runs one benchmark; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help"):
        lines = [f"  {name:<10}{text}" for name, text in MODES.items()]
        print("\n".join([f"usage: {prog} MODE ...", "", *lines, "", f"{prog} MODE --help tells more."]))
        return 0
    if not arguments or arguments[0] not in MODES:
        got = repr(arguments[0]) if arguments else "nothing"
        print(f"{prog}: got {got}; expected {' or '.join(MODES)}", file=sys.stderr)
        return 2
    mode, rest = arguments[0], arguments[1:]
    name = f"{prog} {mode}"
    try:
        report = _serve(rest, name) if mode == "serve" else _offline(rest, name)
    except (InvalidValueError, UnsupportedHereError) as error:
        return fail(name, error)
    except ServerError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(report.table())
    if path := report.settings["json"]:
        Path(str(path)).write_text(report.as_json())
    return 1 if any(record.error is not None for record in report.records) else 0


def _serve(argv: Sequence[str], prog: str) -> Report:
    load = parse_serve(argv, prog)
    _check_writable(load)
    model, records, speculation = asyncio.run(serve.measure(load))
    target = f"at {load.url}, {load.endpoint}"
    return Report("serve", model, target, None, load.settings(), records, speculation)


def _offline(argv: Sequence[str], prog: str) -> Report:
    load = parse_offline(argv, prog)
    _check_writable(load)
    from mtp_jax.bench import offline  # imports jax: a bad flag needs none

    model, device, records, speculation = offline.measure(load)
    target = f"in this process, {load.endpoint}"
    return Report("offline", model, target, device, load.settings(), records, speculation)


def _check_writable(load: Load) -> None:
    """Before minutes are spent. Raises InvalidValueError."""
    if load.json is None:
        return
    try:
        with Path(load.json).open("a"):
            pass
    except OSError as error:
        raise InvalidValueError(
            "--json", load.json, f"a file that can be written ({error.strerror})"
        ) from None
