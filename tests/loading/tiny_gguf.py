"""Tiny models written as GGUF files with the gguf package's own writer and quantiser."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np

VOCAB, WIDTH, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 40, 64, 96, 2, 4, 2, 16
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SHAPES = {
    "attn_norm": (WIDTH,),
    "attn_q": (HEADS * HEAD_DIM, WIDTH),
    "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (FFN, WIDTH),
    "ffn_up": (FFN, WIDTH),
    "ffn_down": (WIDTH, FFN),
}


@dataclasses.dataclass
class TinyGGUF:
    """What to write. `tensors` is by GGUF's names; `expected` by Hugging Face's, as `read` must answer."""

    architecture: str = "llama"
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    tied: bool = True
    metadata: dict[str, int | float | str] = dataclasses.field(default_factory=dict)
    tensors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    expected: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        random = np.random.default_rng(7)
        top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
        if not self.tied:
            top["output"], shapes["output"] = "lm_head", (VOCAB, WIDTH)
        for name, shape in shapes.items():
            self.add(f"{name}.weight", f"{top[name]}.weight", random.normal(size=shape))
        for layer in range(LAYERS):
            for name, shape in SHAPES.items():
                hf = f"model.layers.{layer}.{NAMES[name]}"
                self.add(f"blk.{layer}.{name}.weight", f"{hf}.weight", random.normal(size=shape))
                if self.architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                    self.add(f"blk.{layer}.{name}.bias", f"{hf}.bias", random.normal(size=shape[:1]))

    def add(self, name: str, hf_name: str, values: np.ndarray) -> None:
        """Vectors stay float32, as converters do; matrices become `kind`."""
        values = values.astype(np.float32)
        if values.ndim == 1:
            self.tensors[name] = self.expected[hf_name] = values
            return
        self.expected[hf_name] = quantised(values, self.kind)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        if self.architecture == "llama" and heads:
            values = values[interleaved_rows(heads)]
        self.tensors[name] = values

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        values: dict[str, int | float | str] = {
            "block_count": LAYERS,
            "context_length": 128,
            "embedding_length": WIDTH,
            "feed_forward_length": FFN,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 50000.0,
            "rope.dimension_count": HEAD_DIM,
        }
        values = {f"{self.architecture}.{key}": value for key, value in values.items()}
        values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
        for key, value in (values | self.metadata).items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
        for name, array in self.tensors.items():
            if array.ndim == 1:
                writer.add_tensor(name, array)
            else:
                writer.add_tensor(name, gguf.quants.quantize(array, self.kind), raw_dtype=self.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def interleaved_rows(heads: int) -> list[int]:
    """Row order of q and k in files of arch llama: of each head row 0, d/2, 1, d/2 + 1, ..."""
    half = HEAD_DIM // 2
    pairs = [(index, index + half) for index in range(half)]
    return [head * HEAD_DIM + row for head in range(heads) for pair in pairs for row in pair]


def quantised(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Values after a round trip through `kind`, by the gguf package, in float32."""
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
