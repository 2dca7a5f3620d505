"""Named shapes of real models, for tests, compile checks and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layer:
    """A decoder layer: width D, `kv_heads` G of `per_kv` Q query heads each, head width H, ffn width F."""

    hidden: int
    kv_heads: int
    per_kv: int
    width: int
    ffn: int
    bias: bool = False

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, [out, in]."""
        d, heads = self.hidden, self.kv_heads * self.per_kv * self.width
        qkv = (self.kv_heads, self.per_kv + 2, self.width)
        shapes: dict[str, tuple[int, ...]] = {
            "input_norm": (d,),
            "qkv": (*qkv, d),
            "o": (d, heads),
            "post_norm": (d,),
            "gate_up": (2, self.ffn, d),
            "down": (d, self.ffn),
        }
        return shapes | ({"qkv_bias": qkv} if self.bias else {})


MODELS = {
    "smollm2_135m": Layer(hidden=576, kv_heads=3, per_kv=3, width=64, ffn=1536),
    "mimo_1.4b_bench": Layer(hidden=2048, kv_heads=8, per_kv=2, width=128, ffn=6144, bias=True),
    "llama3_8b": Layer(hidden=4096, kv_heads=8, per_kv=4, width=128, ffn=14336),
    "mimo_7b": Layer(hidden=4096, kv_heads=8, per_kv=4, width=128, ffn=11008, bias=True),
}
ROWS = (1, 2, 8, 33, 64)
