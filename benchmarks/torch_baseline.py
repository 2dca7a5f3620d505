"""Greedy decoding of SmolLM2 by transformers in torch, float32, batch 1: what ours is compared with.

Runs in the environment of tests/oracle/requirements.txt (Python 3.11), not in the product's:

    python benchmarks/torch_baseline.py --gguf .../SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracle"))
from smollm2_model import load

# "The capital of France is" in SmolLM2's tokens; which tokens these are does not change the speed
PROMPT = [504, 3575, 282, 4649, 314]


@torch.no_grad()
def decode(model, tokens: int) -> tuple[list[int], float]:
    """Greedy tokens after the prompt and seconds for all but the first, which is the prompt's."""
    ids, cache, made, start = torch.tensor([PROMPT]), None, [], 0.0
    for _ in range(tokens + 1):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        made.append(int(ids))
        start = start or time.perf_counter()
    return made, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3, help="timed runs after one to warm up")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.gguf)
    model.set_attn_implementation(args.attention)
    decode(model, args.tokens)
    rates = []
    for _ in range(args.runs):
        made, seconds = decode(model, args.tokens)
        rates.append(args.tokens / seconds)
    print(f"first tokens: {made[:12]}")
    shown = ", ".join(f"{rate:.1f}" for rate in rates)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.attention}: {shown} tokens/s")


if __name__ == "__main__":
    main()
