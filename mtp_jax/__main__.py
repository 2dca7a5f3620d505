"""`python -m mtp_jax` is the `mtp-jax` command."""

import sys

from mtp_jax.cli import main

sys.exit(main())
