"""`python -m mtp_jax.chat`: chat with a model in the terminal. See `mtp_jax.chat.app`."""

import sys

from mtp_jax.server.signals import exit_on_signals


def main() -> int:
    """Chats until told to stop; returns the exit code."""
    exit_on_signals()
    from mtp_jax.chat.app import main as chat  # takes a second, in which Ctrl-C must be clean

    return chat(prog="mtp_jax.chat")


if __name__ == "__main__":
    sys.exit(main())
