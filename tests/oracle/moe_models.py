"""Tiny random checkpoints of the mixture-of-experts families with an MTP layer, with golden outputs, float32.

    python moe_models.py --out ../golden
    python moe_models.py --out ../golden --only tiny_glm4_moe

  tiny_deepseek_v3/   MLA, YaRN, two expert groups of which one is kept, 4 layers; the MTP layer repeats
                      embed_tokens and shared_head.head, as the release does
  tiny_moonlight/     the same without a latent of the queries (q_lora_rank null), YaRN and groups, 3 layers
  tiny_deepseek_v32/  tiny_deepseek_v3 with an indexer in each of 3 layers and in the MTP layer
  tiny_glm_moe_dsa/   GLM-5.2's form, 5 layers: an owner, three that share its choice, an owner; the MTP layer
                      has its own indexer, but neither embedding nor head; head_dim is a trap
  tiny_glm4_moe/      grouped-query attention with biases, q/k norms and half of each head rotated, 5 layers

Tensor names, config.json and per-expert tensors are those of the released checkpoints (one file, float32, and
a tokenizer of bytes); transformers loads each from its directory. NAME.npz has what moe_golden.py says of the
target and deepseek_mtp.py of the MTP layer. A seed is drawn anew until no router, top-k or greedy decision
that goes into the goldens is closer to a tie than MARGIN: so every correct float32 engine decides alike.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from deepseek_mtp import Reference, mtp_golden
from moe_golden import check_mtp, check_target, load, target_golden
from safetensors.numpy import save_file
from tiny_models import LENGTH, byte_tokenizer, fresh, write_json
from transformers import logging

MARGIN = 3e-4
GAIN = 0.7  # sharper attention would amplify float32 rounding to 1e-4 in the logits
Config = dict[str, object]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

COMMON: Config = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 8}
COMMON |= {"num_attention_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3}
COMMON |= {"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
COMMON |= {"num_nextn_predict_layers": 1, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
COMMON |= {"tie_word_embeddings": False, "attention_dropout": 0.0, "torch_dtype": "float32"}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2}

LATENT: Config = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "attention_bias": False, "moe_layer_freq": 1, "ep_size": 1}
LATENT |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "pretraining_tp": 1}
INDEXER: Config = {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 16}

DEEPSEEK: Config = COMMON | LATENT | {"v_head_dim": 16, "n_group": 2, "topk_group": 1, "rms_norm_eps": 1e-6}
DEEPSEEK |= {"rope_theta": 10000, "max_position_embeddings": 2560}
DEEPSEEK["rope_scaling"] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "type": "yarn",
}

DEEPSEEK_V3: Config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
DEEPSEEK_V3 |= DEEPSEEK | {"num_hidden_layers": 4}
MOONLIGHT: Config = DEEPSEEK_V3 | {"q_lora_rank": None, "n_group": 1, "num_hidden_layers": 3}
MOONLIGHT |= {"rope_scaling": None, "max_position_embeddings": 512}
DEEPSEEK_V32: Config = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
DEEPSEEK_V32 |= DEEPSEEK | INDEXER | {"num_hidden_layers": 3}

GLM_MOE_DSA: Config = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}
GLM_MOE_DSA |= COMMON | LATENT | INDEXER
GLM_MOE_DSA |= {"num_hidden_layers": 5, "first_k_dense_replace": 2, "v_head_dim": 24, "qk_head_dim": 24}
GLM_MOE_DSA |= {"head_dim": 16, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "pad_token_id": 0}
GLM_MOE_DSA |= {"max_position_embeddings": 1024, "rope_interleave": True, "indexer_rope_interleave": True}
GLM_MOE_DSA |= {"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}}
GLM_MOE_DSA |= {"moe_router_dtype": "float32", "index_topk_freq": 4, "index_skip_topk_offset": 1}
GLM_MOE_DSA |= {"index_topk_pattern": None, "index_share_for_mtp_iteration": True}
GLM_MOE_DSA |= {"indexer_types": ["full", "shared", "shared", "shared", "full"]}
GLM_MOE_DSA |= {"mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"]}

GLM4_MOE: Config = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
GLM4_MOE |= COMMON | {"num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 16}
GLM4_MOE |= {"use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None}
GLM4_MOE |= {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "pad_token_id": 0}
GLM4_MOE |= {"max_position_embeddings": 512, "attention_bias": True}

MODELS: dict[str, Config] = {
    "tiny_deepseek_v3": DEEPSEEK_V3,
    "tiny_moonlight": MOONLIGHT,
    "tiny_deepseek_v32": DEEPSEEK_V32,
    "tiny_glm_moe_dsa": GLM_MOE_DSA,
    "tiny_glm4_moe": GLM4_MOE,
}


def ffn_shapes(name: str, width: int, inner: int) -> Shapes:
    yield f"{name}.gate_proj.weight", (inner, width)
    yield f"{name}.up_proj.weight", (inner, width)
    yield f"{name}.down_proj.weight", (width, inner)


def attention_shapes(c: Config, name: str, owns_indexer: bool) -> Shapes:
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        shared = c["num_key_value_heads"]
        for projection, count in (("q", heads), ("k", shared), ("v", shared)):
            yield f"{name}.{projection}_proj.weight", (count * c["head_dim"], width)
            yield f"{name}.{projection}_proj.bias", (count * c["head_dim"],)
        yield f"{name}.q_norm.weight", (c["head_dim"],)
        yield f"{name}.k_norm.weight", (c["head_dim"],)
        yield f"{name}.o_proj.weight", (width, heads * c["head_dim"])
        return
    q_rank, rank, value = c["q_lora_rank"], c["kv_lora_rank"], c["v_head_dim"]
    nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    if q_rank is None:
        yield f"{name}.q_proj.weight", (heads * (nope + rope), width)
    else:
        yield f"{name}.q_a_proj.weight", (q_rank, width)
        yield f"{name}.q_a_layernorm.weight", (q_rank,)
        yield f"{name}.q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield f"{name}.kv_a_proj_with_mqa.weight", (rank + rope, width)
    yield f"{name}.kv_a_layernorm.weight", (rank,)
    yield f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{name}.o_proj.weight", (width, heads * value)
    if owns_indexer:
        dim = c["index_head_dim"]
        yield f"{name}.indexer.wq_b.weight", (c["index_n_heads"] * dim, q_rank)
        yield f"{name}.indexer.wk.weight", (dim, width)
        yield f"{name}.indexer.k_norm.weight", (dim,)
        yield f"{name}.indexer.k_norm.bias", (dim,)
        yield f"{name}.indexer.weights_proj.weight", (c["index_n_heads"], width)


def shapes(c: Config) -> Shapes:
    """Name and shape of every tensor, the MTP layer's repeated ones aside."""
    width, vocab, trunk = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    kinds = c.get("indexer_types", ["full"] * trunk)
    yield "model.embed_tokens.weight", (vocab, width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocab, width)
    for layer in range(trunk + 1):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
        owns = "index_topk" in c and (layer == trunk or kinds[layer] == "full")
        yield from attention_shapes(c, f"{name}.self_attn", owns)
        if layer < c["first_k_dense_replace"]:
            yield from ffn_shapes(f"{name}.mlp", width, c["intermediate_size"])
            continue
        yield f"{name}.mlp.gate.weight", (c["n_routed_experts"], width)
        yield f"{name}.mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)
        yield from ffn_shapes(f"{name}.mlp.shared_experts", width, c["moe_intermediate_size"])
        for expert in range(c["n_routed_experts"]):
            yield from ffn_shapes(f"{name}.mlp.experts.{expert}", width, c["moe_intermediate_size"])
    yield f"model.layers.{trunk}.enorm.weight", (width,)
    yield f"model.layers.{trunk}.hnorm.weight", (width,)
    yield f"model.layers.{trunk}.eh_proj.weight", (width, 2 * width)
    yield f"model.layers.{trunk}.shared_head.norm.weight", (width,)


def draw(c: Config, seed: int) -> dict[str, np.ndarray]:
    """Weights that matter: logits spread over several units, norms in 0.5 to 2, biases away from zero.

    Some of the router's biases are negative enough that a chosen group's third expert scores below 0.
    """
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(c):
        if name.endswith("norm.weight"):
            value = random.uniform(0.5, 2, shape)
        elif len(shape) == 1:
            value = random.uniform(0.1, 0.6, shape) * random.choice([-1, 1], shape)
        elif "embed_tokens" in name or "lm_head" in name:
            value = random.normal(0, 0.4, shape)
        else:
            value = random.normal(0, GAIN / shape[1] ** 0.5, shape)
        weights[name] = value.astype(np.float32)
    if c["model_type"] != "glm_moe_dsa":
        mtp = f"model.layers.{c['num_hidden_layers']}"
        weights[f"{mtp}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
        weights[f"{mtp}.shared_head.head.weight"] = weights["lm_head.weight"].copy()
    return weights


def closest_call(reference: Reference, ids: np.ndarray) -> float:
    """The smallest margin of any decision on the way to the goldens."""
    reference.margins.clear()
    hidden, _, _ = reference.target(ids)
    drafts = mtp_golden(reference, ids, hidden)["draft_logits"]
    greedy = [np.sort(rows, -1) for rows in (drafts, reference.logits(hidden))]
    return min(reference.margins + [float((rows[..., -1] - rows[..., -2]).min()) for rows in greedy])


def make(name: str, config: Config, out: Path) -> None:
    directory = fresh(out / name)
    write_json(directory / "config.json", config)
    byte_tokenizer(directory)
    for seed in range(1000):
        save_file(draw(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
        ids = np.random.default_rng(seed).integers(3, config["vocab_size"], LENGTH)
        reference = Reference(directory)
        margin = closest_call(reference, ids)
        if margin > MARGIN:
            break
    print(f"{name}: seed {seed}, closest decision {margin:.1e}")
    model = load(directory)
    golden = target_golden(model, ids)
    check_target(reference, golden)
    golden |= mtp_golden(reference, ids, golden["hidden"])
    if "index_topk" not in config:  # for the others transformers has no MTP layer
        check_mtp(model, reference, golden)
    np.savez_compressed(out / f"{name}.npz", **golden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=MODELS)
    args = parser.parse_args()
    logging.set_verbosity_error()  # the MTP layer, unexpected by the target, is checked in moe_golden.py
    logging.disable_progress_bar()
    for name, config in MODELS.items():
        if args.only in (None, name):
            make(name, config, args.out)
            for path in sorted(args.out.glob(f"{name}*")):
                for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                    print(f"{file.stat().st_size:8d} {file.relative_to(args.out)}")


if __name__ == "__main__":
    main()
