"""Benchmarks for users: `python -m mtp_jax.bench serve` and `python -m mtp_jax.bench offline`."""
