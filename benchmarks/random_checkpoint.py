"""Checkpoints of random weights in real models' shapes, in Hugging Face's layout: timing without downloads.

    python benchmarks/random_checkpoint.py mimo_agree OUT      # writes OUT/mimo_agree

llama135m     SmolLM2-135M's shape (Llama, tied embeddings), 0.25 GiB
mimo          a 1.4 B model of MiMo's kind with one MTP module, 2.7 GiB; drafts are nearly never right
mimo_agree    the same shape, hence the same work, but drafts are nearly always right (0.98): see `silenced`
mimo4b_agree  likewise, 4.5 B in Qwen3-4B's shape, 8.4 GiB; the MTP module is a file beside the model, and
              drafts among 16384 ids, to which the target keeps too
tiny          as mimo_agree in small, for tests; tiny_head as mimo4b_agree

Weights are bf16. The tokenizer knows single bytes; token ids above 255 have no text.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mtp_jax.config import ModelConfig
from mtp_jax.loading.mtp_head import DRAFT_VOCAB_IDS
from mtp_jax.loading.safetensors_dir import MTP_HEAD_FILE
from mtp_jax.models.registry import LM_HEAD, expected_tensors, mtp_prefix

BF16 = np.dtype(ml_dtypes.bfloat16)
PIECE = 2**22  # numbers that are drawn at a time: 16 MiB of float32
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mimo": "MiMoForCausalLM"}

LLAMA_135M = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)
MIMO = ModelConfig(
    model_type="mimo",
    vocab_size=32000,
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=6144,
    rope_theta=640000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    attention_bias=True,
    num_nextn_predict_layers=1,
    eos_token_ids=(2,),
)
MIMO_4B = dataclasses.replace(
    MIMO,
    vocab_size=151936,
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    intermediate_size=9728,
)
TINY = ModelConfig(
    model_type="mimo",
    vocab_size=512,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    attention_bias=True,
    num_nextn_predict_layers=1,
    eos_token_ids=(2,),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A checkpoint: its shape, and how its weights are drawn."""

    model: ModelConfig
    std: float  # of the weights
    agree: bool = False  # whether the MTP module is made to agree with its target
    draft_vocab: int | None = None  # ids that drafts are chosen from, by a module in a file of its own


CHECKPOINTS = {
    "llama135m": Recipe(LLAMA_135M, 0.041),
    "mimo": Recipe(MIMO, 0.02),
    "mimo_agree": Recipe(MIMO, 0.02, agree=True),
    "mimo4b_agree": Recipe(MIMO_4B, 0.02, agree=True, draft_vocab=16384),
    "tiny": Recipe(TINY, 0.1, agree=True),
    "tiny_head": Recipe(TINY, 0.1, agree=True, draft_vocab=128),
}


def silenced(name: str) -> bool:
    """Weights that are zero where drafts shall agree with their target.

    Without what attention and ffn write, a token's state is its embedding, so the target's next token
    depends on the last token alone. The MTP module gets that token's embedding too, and `_select_embedding`
    passes it on to the same LM head: both choose the same token, but for roundings in bf16. Every other
    weight stays random, and every product is computed, so that the work is that of the model.
    """
    return name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))


def _select_embedding(out: np.ndarray) -> None:
    """input_proj over [hidden | embedding] that keeps the second half."""
    width = out.shape[0]
    out[:] = 0
    out[np.arange(width), width + np.arange(width)] = 1


def _draw(out: np.ndarray, name: str, recipe: Recipe, seed: Sequence[int]) -> None:
    """Fills `out`, bf16, with the weights of one tensor."""
    if name.endswith("norm.weight"):
        out[:] = 1
    elif recipe.agree and silenced(name):
        out[:] = 0
    elif recipe.agree and name.endswith("input_proj.weight"):
        _select_embedding(out)
    else:
        rng = np.random.Generator(np.random.SFC64(seed))
        flat = out.reshape(-1)
        for start in range(0, flat.size, PIECE):
            piece = flat[start : start + PIECE]
            drawn = rng.standard_normal(piece.size, dtype=np.float32)
            drawn *= np.float32(recipe.std)
            piece[:] = drawn.astype(BF16)
    if name == LM_HEAD and recipe.draft_vocab is not None:
        out[recipe.draft_vocab :] = 0  # logits of 0: never the best among thousands of random ones


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], recipe: Recipe, seed: int) -> int:
    """Writes a safetensors file, tensors drawn in parallel into the mapped file; the bytes of weights."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * BF16.itemsize
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + offset)
    data = np.memmap(path, BF16, "r+", offset=8 + len(head))

    def fill(index: int, name: str) -> None:
        start, end = (byte // BF16.itemsize for byte in header[name]["data_offsets"])
        _draw(data[start:end].reshape(shapes[name]), name, recipe, (seed, index))

    workers = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:  # numpy draws without the interpreter's lock
        for done in [pool.submit(fill, index, name) for index, name in enumerate(shapes)]:
            done.result()
    data.flush()
    return offset


def write_head(path: Path, shapes: Mapping[str, tuple[int, ...]], recipe: Recipe, seed: int) -> int:
    """Writes the MTP module as a file of its own, with its draft vocabulary; the bytes of weights."""
    tensors = {name: np.zeros(shape, BF16) for name, shape in shapes.items()}
    for index, (name, out) in enumerate(tensors.items()):
        _draw(out, name, recipe, (seed, index, 1))
    ids = {mtp_prefix(recipe.model) + DRAFT_VOCAB_IDS: np.arange(recipe.draft_vocab, dtype=np.int32)}
    save_file(tensors | ids, path)
    return sum(tensor.nbytes for tensor in tensors.values())


def config_json(model: ModelConfig) -> dict[str, object]:
    """`config.json` of a model, by Hugging Face's names."""
    plain = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
    )
    values: dict[str, object] = {name: getattr(model, name) for name in plain}
    values |= {
        "architectures": [ARCHITECTURES[model.model_type]],
        "eos_token_id": model.eos_token_ids[0],
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if model.num_nextn_predict_layers:
        values["num_nextn_predict_layers"] = model.num_nextn_predict_layers
    return values


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level tokens of one byte each, ids 0 to 255."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


def write_checkpoint(name: str, directory: Path, seed: int = 0) -> int:
    """Writes the checkpoint `name` of CHECKPOINTS into `directory`; the bytes of its weights."""
    recipe = CHECKPOINTS[name]
    shapes = expected_tensors(recipe.model)
    module = {name: shape for name, shape in shapes.items() if name.startswith(mtp_prefix(recipe.model))}
    model = recipe.model
    directory.mkdir(parents=True, exist_ok=True)
    size = 0
    if recipe.draft_vocab is not None:
        size = write_head(directory / MTP_HEAD_FILE, module, recipe, seed)
        shapes = {name: shape for name, shape in shapes.items() if name not in module}
        model = dataclasses.replace(model, num_nextn_predict_layers=0)
    (directory / "config.json").write_text(json.dumps(config_json(model), indent=1) + "\n")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return size + write_weights(directory / "model.safetensors", shapes, recipe, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=tuple(CHECKPOINTS))
    parser.add_argument("out", type=Path, help="folder to write the directory NAME into")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    directory = args.out / args.name
    size = write_checkpoint(args.name, directory, args.seed)
    print(f"{directory}: {size / 2**30:.2f} GiB in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
