"""`python -m mtp_jax.serve`: serve a model over HTTP. See `mtp_jax.server.launch`."""

import sys

from mtp_jax.server.signals import exit_on_signals


def main() -> int:
    """Serves until told to stop; returns the exit code."""
    exit_on_signals()
    from mtp_jax.server.launch import main as serve  # takes a second, in which Ctrl-C must be clean

    return serve(prog="mtp_jax.serve")


if __name__ == "__main__":
    sys.exit(main())
