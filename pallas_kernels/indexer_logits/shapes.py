"""Named shapes of real models, for tests, compile checks and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Load:
    """A decode step: `batch` rows of `queries` tokens, with `live` positions each, in tables of `table`."""

    batch: int
    queries: int
    live: int
    table: int


HEADS = {"deepseek_v32": 64, "glm5": 32}  # of the indexer
WIDTH = 128  # of a head
TOPK = 2048
PAGE_SIZE = 64  # what TMA likes best; the engine's --page-size
LOADS = (
    Load(batch=64, queries=1, live=32768, table=32768),
    Load(batch=64, queries=1, live=131072, table=131072),
    Load(batch=64, queries=2, live=32768, table=32768),
    Load(batch=64, queries=4, live=32768, table=32768),
    Load(batch=8, queries=1, live=32768, table=32768),
    Load(batch=1, queries=1, live=131072, table=131072),
    Load(batch=64, queries=1, live=4096, table=32768),
)
