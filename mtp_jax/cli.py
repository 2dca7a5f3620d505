"""The `mtp-jax` command: `mtp-jax serve ...`, `chat`, `bench`, `plan`, `train`, `convert`, `version`."""

import sys
from collections.abc import Callable, Sequence

from mtp_jax import __version__
from mtp_jax.server.signals import exit_on_signals


def _serve(argv: Sequence[str]) -> int:
    exit_on_signals()
    from mtp_jax.server.launch import main as serve  # takes a second, in which Ctrl-C must be clean

    return serve(argv, prog="mtp-jax serve")


def _chat(argv: Sequence[str]) -> int:
    exit_on_signals()
    from mtp_jax.chat.app import main as chat

    return chat(argv, prog="mtp-jax chat")


def _bench(argv: Sequence[str]) -> int:
    exit_on_signals()
    from mtp_jax.bench.app import main as bench

    return bench(argv, prog="mtp-jax bench")


def _plan(argv: Sequence[str]) -> int:
    exit_on_signals()
    from mtp_jax.plan.app import main as plan

    return plan(argv, prog="mtp-jax plan")


def _train(argv: Sequence[str]) -> int:
    from mtp_jax.train.__main__ import main as train

    return train(argv, prog="mtp-jax train")


def _convert(argv: Sequence[str]) -> int:
    exit_on_signals()
    from mtp_jax.convert import main as convert

    return convert(argv, prog="mtp-jax convert")


def _version(argv: Sequence[str]) -> int:
    if argv:
        print(f"mtp-jax version: got {argv[0]!r}; expected no arguments", file=sys.stderr)
        return 2
    import importlib.metadata  # here, so that `serve` is quick to handle signals

    print(f"mtp-jax {__version__} (jax {importlib.metadata.version('jax')})")
    return 0


# Name -> what it does in a line, and the function that takes the remaining arguments.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "serve": ("serve a model over HTTP with OpenAI's API", _serve),
    "chat": ("chat with a model in the terminal", _chat),
    "bench": ("measure a server or the engine", _bench),
    "plan": ("say whether a model fits some devices, from its config.json", _plan),
    "train": ("train an MTP head for a model", _train),
    "convert": ("write a model's arrays as they are placed", _convert),
    "version": ("print the version", _version),
}


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join(["usage: mtp-jax COMMAND ...", "", *lines, "", "mtp-jax COMMAND --help tells more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        got = repr(arguments[0]) if arguments else "nothing"
        print(f"mtp-jax: got {got}; expected a command: {' or '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[arguments[0]][1](arguments[1:])
