"""Named shapes of real models, for tests, compile checks and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rows:
    """`rows` T of `length` L scores each, of which `k` are chosen."""

    rows: int
    length: int
    k: int = 2048  # DeepSeek-V3.2 and GLM-5


LOADS = (
    Rows(64, 32768),
    Rows(64, 131072),
    Rows(1, 32768),
    Rows(1, 131072),
    Rows(256, 32768),
    Rows(16, 65536),
)
