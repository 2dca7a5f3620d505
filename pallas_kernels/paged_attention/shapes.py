"""Named shapes of real models, for tests, compile checks and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heads:
    """Attention of one model: `kv_heads` G, `per_kv` Q query heads each, `width` H."""

    kv_heads: int
    per_kv: int
    width: int


@dataclasses.dataclass(frozen=True)
class Load:
    """A decode step: `batch` rows of `queries` tokens, with `live` positions each, in tables of `table`."""

    batch: int
    queries: int
    live: int
    table: int


MODELS = {
    "smollm2_135m": Heads(kv_heads=3, per_kv=3, width=64),
    "mimo_7b": Heads(kv_heads=8, per_kv=4, width=128),
    "mimo_1.4b_bench": Heads(kv_heads=8, per_kv=2, width=128),  # the random checkpoint of benchmarks/
    "llama3_8b": Heads(kv_heads=8, per_kv=4, width=128),
    "qwen2_7b": Heads(kv_heads=4, per_kv=7, width=128),
}
PAGE_SIZE = 16
BATCHES = (1, 8, 64)
QUERIES = (1, 2, 4)
# (live, table): short answers in a bucket of 1024, a full bucket, a long context.
LENGTHS = ((160, 1024), (1024, 1024), (8192, 8192))


def loads() -> list[Load]:
    """Every combination."""
    return [
        Load(batch, queries, live, table)
        for batch in BATCHES
        for queries in QUERIES
        for live, table in LENGTHS
    ]
