"""`python -m mtp_jax.plan`: will a model fit? See `mtp_jax.plan.app`."""

import sys

from mtp_jax.server.signals import exit_on_signals


def main() -> int:
    """Prints a plan; returns the exit code."""
    exit_on_signals()
    from mtp_jax.plan.app import main as plan

    return plan(prog="mtp_jax.plan")


if __name__ == "__main__":
    sys.exit(main())
