"""Named shapes of real models, for tests, compile checks and benchmarks."""

import dataclasses

ROW = 576  # of a latent cache: 512 features, which are the value too, and 64 rotated ones
VALUE = 512
SCALE = 192**-0.5  # of scores: DeepSeek's heads are 128 + 64 wide


@dataclasses.dataclass(frozen=True)
class Load:
    """`tokens` T queries (decode rows with their drafts, or a prompt), `heads` N, `chosen` J rows each."""

    tokens: int
    heads: int
    chosen: int = 2048


LOADS = {
    f"t{tokens}_n{heads}": Load(tokens, heads)
    for heads in (128, 64, 16)
    for tokens in (1, 4, 16, 64, 256, 1024)
}
