"""Pallas kernels, one folder an op. Imports jax only."""
