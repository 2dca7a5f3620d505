"""The engine: state, step, ring, paged cache, verification, drafting, sampling, and the host loop."""
