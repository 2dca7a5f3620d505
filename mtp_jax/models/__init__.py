"""Model families as Flax NNX modules: weights and maths only, no caches, counters, keys or mesh."""
