"""Mesh, placement table and stage plan: where everything lives. Imports jax only."""
