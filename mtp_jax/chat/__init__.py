"""A chat in the terminal, with the engine in the same process: `python -m mtp_jax.chat`."""
