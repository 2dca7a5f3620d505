"""`python -m mtp_jax.serve`: serve a model over HTTP. See `mtp_jax.server.launch`."""

import sys

from mtp_jax.server.launch import main

if __name__ == "__main__":
    sys.exit(main(prog="mtp_jax.serve"))
