"""`python -m mtp_jax.bench`: measure a server or the engine. See `mtp_jax.bench.app`."""

import sys

from mtp_jax.server.signals import exit_on_signals


def main() -> int:
    """Runs one benchmark; returns the exit code."""
    exit_on_signals()
    from mtp_jax.bench.app import main as bench

    return bench(prog="mtp_jax.bench")


if __name__ == "__main__":
    sys.exit(main())
