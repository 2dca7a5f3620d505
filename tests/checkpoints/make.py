"""Makes the tiny trained checkpoints beside this file, each with the trainer's own command.

    python -m tests.checkpoints.make mimo      # or another name in CONFIGS

Writes configuration, tokenizer and text into a work folder, runs `python -m mtp_jax.train --from-scratch` on
them (minutes on a CPU core; a run that was stopped goes on), and copies the model here.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from mtp_jax.train.__main__ import main as train
from tests.checkpoints import ledger

HERE = Path(__file__).parent
PAGES = 3000
VOCAB = 576
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS: dict[str, dict[str, object]] = {
    "mimo": COMMON | {"model_type": "mimo", "num_key_value_heads": 2, "head_dim": 16},
    # Two stages of two layers: the second begins with a layer that shares the first one's indexer.
    "glm_moe_dsa": COMMON
    | {
        "model_type": "glm_moe_dsa",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 16,
        "indexer_types": ["full", "shared", "shared", "full"],
        "index_share_for_mtp_iteration": True,
        "first_k_dense_replace": 1,
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "qwen3_5_moe": COMMON
    | {
        "model_type": "qwen3_5_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
    },
}
FLAGS = {
    "steps": 700,
    "batch-tokens": 2048,
    "sequence-length": 128,
    "num-speculative-tokens": 3,
    "learning-rate": 3e-3,
    "muon-learning-rate": 1e-2,
    "warmup-steps": 50,
    "mtp-loss-weight": 0.5,
    "ema": 0.99,
    "held-out-samples": 64,
    "evaluate-every": 100,
    "checkpoint-every": 200,
    "dtype": "float32",
    "devices": 1,
}
# An update computes more; 200 of them were too few.
_LONGER = {"batch-tokens": 1024, "steps": 1500}
OWN_FLAGS: dict[str, dict[str, float]] = {"glm_moe_dsa": _LONGER, "qwen3_5_moe": _LONGER}


def write_inputs(name: str, folder: Path) -> None:
    """config.json, tokenizer.json (byte-level pairs, learnt from the text) and text.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n")
    text = ledger.text(0, PAGES)
    (folder / "text.txt").write_text(text)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("--work", type=Path, help="work folder; else a temporary one")
    parser.add_argument("--time-limit", type=float, help="seconds after which training ends early")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix=f"{options.name}-"))
    if not (work / "text.txt").is_file():
        write_inputs(options.name, work)
    flags = FLAGS | OWN_FLAGS.get(options.name, {})
    command = ["--from-scratch", str(work), "--text", str(work / "text.txt"), "--out", str(work / "run")]
    command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    if options.time_limit:
        command += ["--time-limit", str(options.time_limit)]
    print("python -m mtp_jax.train", *command, file=sys.stderr)
    if code := train(command):
        return code
    shutil.copytree(work / "run" / "model", HERE / options.name, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
