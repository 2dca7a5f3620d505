"""SmolLM2 in torch from its GGUF file, read with the gguf package alone (none of mtp_jax's own code)."""

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYER = {
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
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load(path: str) -> LlamaForCausalLM:
    """LlamaForCausalLM in float32 with the file's dequantised weights."""
    reader = gguf.GGUFReader(path)

    def field(key: str):
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=not any(t.name == "output.weight" for t in reader.tensors),
        attn_implementation="eager",
    )
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                count = heads if parts[2] == "attn_q" else kv_heads
                dim = values.shape[0] // count
                # llama.cpp's converter interleaves the rotary halves; rows 0, 2, 4, ... are the first half
                order = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
                values = torch.cat([head[order] for head in values.split(dim)])
            name = f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
        else:
            name = f"{TOP[parts[0]]}.{parts[1]}"
        state[name] = values
    model = LlamaForCausalLM(config).eval().float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(missing) <= allowed and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model
