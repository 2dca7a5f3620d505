"""`python -m mtp_jax.train`: trains an MTP head for a model, or a small model with its head."""

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from mtp_jax.engine.prepare import default_compile_cache, prepare_jax
from mtp_jax.errors import InvalidValueError, UnsupportedHereError
from mtp_jax.train.arguments import TrainOptions, parse_options

_EXTRA = ("matplotlib", "optax", "orbax")


def main(argv: Sequence[str], prog: str = "python -m mtp_jax.train") -> int:
    """Runs the trainer; returns the exit code."""
    options = parse_options(argv, prog)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{prog}: {missing[0]} is not installed; pip install 'mtp-jax[train]' brings it", file=sys.stderr
        )
        return 2
    prepare_jax(options.devices or 1, default_compile_cache())
    try:
        with _terminable():
            run(options)
    except KeyboardInterrupt as interrupt:
        number = signal.SIGTERM if interrupt.args else signal.SIGINT
        print(f"{prog}: stopped; the same command goes on", file=sys.stderr)
        return 128 + number
    except (InvalidValueError, UnsupportedHereError) as error:
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what runs as Ctrl-C does: text that was written is kept, checkpoints are closed."""

    def stop(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(options: TrainOptions) -> None:
    """What the options ask for: text, a head, or a model with its head.

    Raises:
      InvalidValueError, UnsupportedHereError: what cannot work, with its name.
    """
    # Imported here: they need the packages of the extra.
    from mtp_jax.train.files import writable_folder
    from mtp_jax.train.from_scratch import train_from_scratch
    from mtp_jax.train.launch import train_head
    from mtp_jax.train.text import needs_text, write_text

    if not options.generate_only:
        writable_folder(Path(options.out), "--out")
    if options.from_scratch:
        train_from_scratch(options)
        return
    if needs_text(options):
        write_text(options)
    if not options.generate_only:
        train_head(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
