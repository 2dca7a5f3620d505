"""Tiny random checkpoints of the gated-delta-net families in their published layout, float32, with goldens.

    python delta_models.py --out ../golden

  tiny_qwen3_next/    interleaved in_proj_qkvz and in_proj_ba, experts one by one, older form of config.json
  tiny_qwen3_5/       dense, tied head, text model inside model.language_model, M-RoPE, a vision tower
  tiny_qwen3_5_moe/   the same with experts in two tensors (one by one in the MTP module), untied

Five layers, full attention in the fourth. Beside each NAME.npz:
  ids [n]; layers [L, n, width], the residual stream after each layer; hidden [n, width] after the final norm;
  logits [n, vocab]; decode_logits [16, vocab]: the last 16 tokens one by one with a cache
  state [Hv, Dk, Dv], window [3, channels]: of layer 0 after all n tokens, from the stepwise run; the window
    holds the convolution's last inputs, oldest first, channels in the order queries, keys, values
  mrope_positions [3, n], mrope_hidden [n, width]: with an image's positions in the middle (not qwen3_next)
  and what qwen_mtp.py says

transformers computes the targets from the directories, so every name and shape in them is one that it takes:
loading leaves nothing missing and nothing over but `mtp.*`, which it ignores. What it was seen to do:
  - norms scale by 1 + weight, except the gated one inside the delta net, which scales by weight
  - queries and keys are divided by sqrt(sum of squares + 1e-6); queries then by sqrt(Dk)
  - a query and its gate lie together, head by head, in q_proj; the first features are rotated, in halves
  - experts' weights are rescaled to sum to one; qwen3_5_moe does so without asking norm_topk_prob
  - M-RoPE's pair f turns with H where f % 3 == 1 and f < 3 * section[1], with W where f % 3 == 2 and
    f < 3 * section[2], else with T
"""

import argparse
from pathlib import Path

import numpy as np
import qwen_mtp
import torch
from safetensors.numpy import save_file
from tiny_models import byte_tokenizer, fresh, write_json
from transformers import (
    AutoConfig,
    PreTrainedModel,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextForCausalLM,
)

DECODED = 16
Tensors = dict[str, np.ndarray]

SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 5, "full_attention_interval": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_conv_kernel_dim": 4}
SIZES |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 256}
SIZES |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0}
SIZES |= {"initializer_range": 0.02, "use_cache": True, "eos_token_id": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
EXPERTS |= {
    "shared_expert_intermediate_size": 8,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "in_channels": 3}
VISION |= {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 4}
VISION |= {"hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02, "deepstack_visual_indexes": []}
LAYER_TYPES = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]


def next_config() -> dict[str, object]:
    """As Qwen3-Next was released: nothing nested, no layer_types, and not a word about the MTP module."""
    fields = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "bos_token_id": 1}
    fields |= SIZES | EXPERTS | {"linear_key_head_dim": 16, "linear_value_head_dim": 8}
    fields |= {
        "intermediate_size": 48,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    fields |= {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_scaling": None}
    return fields | {"tie_word_embeddings": False, "torch_dtype": "float32"}


def nested_config(kind: str, architecture: str, tied: bool, **text: object) -> dict[str, object]:
    """As Qwen3.5 was released: a text model and a vision tower, the MTP count in the text model's part."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    inner = {"model_type": f"{kind}_text", "dtype": "float32", "tie_word_embeddings": tied} | SIZES
    inner |= {"layer_types": LAYER_TYPES, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    inner |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rope_parameters": rope}
    vision = VISION | {"model_type": kind, "out_hidden_size": SIZES["hidden_size"]}
    ids = {
        "vision_start_token_id": 251,
        "vision_end_token_id": 252,
        "image_token_id": 253,
        "video_token_id": 254,
    }
    outer = {"architectures": [architecture], "model_type": kind, "tie_word_embeddings": tied}
    return outer | ids | {"text_config": inner | text, "vision_config": vision}


def draw(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """A weight that matters: logits over several units, norms off one, heads that forget or remember."""
    noise = random.standard_normal(shape)
    octaves = random.uniform(-0.9, 0.9, shape)
    if "visual." in name:
        value = 0.2 * noise
    elif name.endswith("A_log"):
        value = np.log(np.geomspace(0.02, 3.0, shape[0]))[random.permutation(shape[0])]
    elif name.endswith("dt_bias"):
        value = random.uniform(-1.0, 1.0, shape)
    elif name.endswith("linear_attn.norm.weight"):
        value = 2**octaves
    elif "norm" in name.split(".")[-2]:
        value = 2**octaves - 1
    elif name.endswith("conv1d.weight"):
        value = 0.6 * noise
    elif "embed" in name or "lm_head" in name:
        value = 0.4 * noise
    else:
        # What a layer adds is small beside what it reads, or its rounding grows from layer to layer.
        gains = {"mlp.gate.weight": 2.0, "o_proj.weight": 0.5, "out_proj.weight": 0.5, "down_proj": 0.5}
        gains |= {"down_proj.weight": 0.5}
        value = noise * (next((g for end, g in gains.items() if name.endswith(end)), 1.0) / shape[-1] ** 0.5)
    return value.astype(np.float32)


def published(
    state: dict[str, torch.Tensor], apart: bool, tied: bool, random: np.random.Generator
) -> Tensors:
    """Random tensors under their published names, in a state's shapes; `apart`: experts one by one."""
    tensors = {}
    for name, tensor in sorted(state.items()):
        if tied and name == "lm_head.weight":
            continue
        value = draw(name, tuple(tensor.shape), random) if tensor.is_floating_point() else tensor.numpy()
        tensors |= split_experts(name, value) if apart else {name: value}
    return tensors


def split_experts(name: str, value: np.ndarray) -> Tensors:
    """{name: value}, or one tensor an expert and matrix where the experts are together."""
    if name.endswith("experts.gate_up_proj"):
        parts = {"gate_proj": 0, "up_proj": 1}
        stem = name.removesuffix("gate_up_proj")
        halves = [np.split(both, 2) for both in value]
        return {f"{stem}{e}.{p}.weight": h[i].copy() for e, h in enumerate(halves) for p, i in parts.items()}
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return {f"{stem}{e}.down_proj.weight": one.copy() for e, one in enumerate(value)}
    return {name: value}


def mtp_tensors(tensors: Tensors, full_layer: str, random: np.random.Generator) -> Tensors:
    """The MTP module: a layer with the shapes of the trunk's full-attention layer, its experts one by one."""
    width = SIZES["hidden_size"]
    shapes = {n.replace(full_layer, "mtp.layers.0."): t.shape for n, t in tensors.items() if full_layer in n}
    shapes |= {"mtp.fc.weight": (width, 2 * width), "mtp.norm.weight": (width,)}
    shapes |= {f"mtp.pre_fc_norm_{part}.weight": (width,) for part in ("embedding", "hidden")}
    module = {}
    for name, shape in sorted(shapes.items()):
        module |= split_experts(name, draw(name, shape, random))
    return module


def load(kind: type[PreTrainedModel], directory: Path) -> PreTrainedModel:
    """The model from the directory; a name or shape that transformers does not know is an error."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model, info = kind.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def watch(model: PreTrainedModel) -> tuple[list[torch.Tensor], list[float]]:
    """Lists that fill as the model runs: each layer's output, and each router's distance from a tie."""
    outputs, gaps = [], []
    for layer in text_model(model).layers:
        layer.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(lambda module, args, out: gaps.append(tie(out[0], module.top_k)))
    return outputs, gaps


def tie(logits: torch.Tensor, chosen: int) -> float:
    """Smallest difference in probability between the last expert chosen and the first that is not."""
    best = logits.softmax(-1).topk(chosen + 1).values
    return float((best[:, -2] - best[:, -1]).min())


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    return getattr(model.model, "language_model", model.model)


@torch.no_grad()
def target_golden(model: PreTrainedModel, ids: np.ndarray) -> Tensors:
    outputs, gaps = watch(model)
    batch = torch.from_numpy(ids).long()[None]
    hidden = text_model(model)(input_ids=batch, use_cache=False).last_hidden_state[0]
    layers = torch.stack(outputs)
    assert min(gaps, default=1.0) > 1e-4, f"a router within {min(gaps)} of a tie"
    logits = model.lm_head(hidden)
    assert 1 < logits.std() < 6, logits.std()
    split = len(ids) - DECODED
    out = model(input_ids=batch[:, :split], use_cache=True)
    steps = []
    for at in range(split, len(ids)):
        out = model(input_ids=batch[:, at : at + 1], cache=out.cache, use_cache=True)
        steps.append(out.logits[0, -1])
    stepwise = torch.stack(steps)
    # The chunked and the stepwise form differ by rounding alone; five layers let it grow to a few 1e-5.
    assert (stepwise - logits[split:]).abs().max() < 5e-5
    memory = out.cache.layers[0]
    return {
        "ids": ids.astype(np.int32),
        "layers": layers.numpy(),
        "hidden": hidden.numpy(),
        "logits": logits.numpy(),
        "decode_logits": stepwise.numpy(),
        "state": memory.recurrent_states[0][0].numpy(),
        "window": memory.conv_states[0][0, :, -3:].T.numpy(),
    }


@torch.no_grad()
def mrope_golden(model: PreTrainedModel, ids: np.ndarray) -> Tensors:
    """Ten tokens of text, an image of 4 by 6 places, text again from the highest position on."""
    image = np.stack([np.zeros(24), np.repeat(np.arange(4), 6), np.tile(np.arange(6), 4)])
    before, after = np.tile(np.arange(10), (3, 1)), np.tile(np.arange(len(ids) - 34), (3, 1))
    positions = np.concatenate([before, image + 10, after + 16], 1).astype(np.int32)
    inputs = {"input_ids": torch.from_numpy(ids).long()[None], "use_cache": False}
    out = text_model(model)(**inputs, position_ids=torch.from_numpy(positions).long()[:, None])
    plain = text_model(model)(**inputs).last_hidden_state
    assert (out.last_hidden_state - plain).abs().max() > 0.01, "the positions make no difference"
    return {"mrope_positions": positions, "mrope_hidden": out.last_hidden_state[0].numpy()}


@torch.no_grad()
def check_decays(model: PreTrainedModel, ids: np.ndarray) -> None:
    """Every delta net has tokens at which a head forgets, and some at which one remembers."""
    nets = [layer.linear_attn for layer in text_model(model).layers if hasattr(layer, "linear_attn")]
    outputs, hooks = [], []
    for net in nets:
        projection = net.in_proj_a if hasattr(net, "in_proj_a") else net.in_proj_ba
        hooks.append(projection.register_forward_hook(lambda module, args, out: outputs.append(out[0])))
    model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    for net, a in zip(nets, outputs, strict=True):
        a = a.unflatten(-1, (net.num_k_heads, -1))[..., -(net.num_v_heads // net.num_k_heads) :].flatten(1)
        decay = (-net.A_log.exp() * torch.nn.functional.softplus(a + net.dt_bias)).exp()
        assert decay.min() < 0.3 and decay.max() > 0.97, decay


def margin(logits: np.ndarray) -> float:
    best = np.sort(logits, -1)
    return float((best[..., -1] - best[..., -2]).min())


def make(
    name: str,
    kind: type[PreTrainedModel],
    config: dict[str, object],
    apart: bool,
    length: int,
    seed: int,
    out: Path,
) -> None:
    """Writes one checkpoint and its goldens."""
    random = np.random.default_rng(seed)
    directory = fresh(out / name)
    write_json(directory / "config.json", config)
    model = kind(AutoConfig.from_pretrained(directory))
    tied = bool(config["tie_word_embeddings"])
    tensors = published(model.state_dict(), apart, tied, random)
    prefix = "model.language_model." if "text_config" in config else "model."
    tensors |= mtp_tensors(tensors, f"{prefix}layers.3.", random)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer(directory)
    model = load(kind, directory)
    ids = random.integers(3, 250, length)
    golden = target_golden(model, ids)
    check_decays(model, ids)
    if "text_config" in config:
        golden |= mrope_golden(model, ids)
    error = qwen_mtp.check_layer(directory, golden, 3)
    assert error < 1e-4, error
    golden |= qwen_mtp.mtp_golden(directory, golden)
    assert margin(golden["draft_logits"]) > 1e-3, "a draft within 1e-3 of a tie"
    np.savez_compressed(out / f"{name}.npz", **golden)
    print(name, f"logits' deviation {golden['logits'].std():.2f}, MTP layer as the trunk's: {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    make("tiny_qwen3_next", Qwen3NextForCausalLM, next_config(), True, 56, 1, out)
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "intermediate_size": 48}
    dense = nested_config("qwen3_5", "Qwen3_5ForConditionalGeneration", True, **heads)
    make("tiny_qwen3_5", Qwen3_5ForConditionalGeneration, dense, False, 80, 2, out)
    heads = {"linear_key_head_dim": 12, "linear_value_head_dim": 8}
    sparse = nested_config("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", False, **heads, **EXPERTS)
    make("tiny_qwen3_5_moe", Qwen3_5MoeForConditionalGeneration, sparse, False, 72, 3, out)
    for path in sorted(out.rglob("tiny_qwen3_*")):
        print(f"{sum(f.stat().st_size for f in [path, *path.rglob('*')]):8d} {path.relative_to(out)}")


if __name__ == "__main__":
    main()
