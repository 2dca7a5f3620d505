"""Golden logits and greedy tokens of SmolLM2-135M-Instruct, computed by transformers in torch, float32.

    python smollm2.py --gguf .../SmolLM2-135M-Instruct.Q4_1.gguf --out ../golden/smollm2.npz

For each prompt P the file holds
  P_ids               int32 [n]           the prompt's tokens
  P_argmax, P_max     int32, f32 [n]      at every position
  P_positions         int32 [16]          where the following were taken
  P_subset_logits     f32 [16, 512]       logits of the ids in `subset`
  P_logsumexp         f32 [16]
  P_top8_ids, P_top8  int32, f32 [16, 8]
  P_greedy            int32 [64]          greedy continuation, not stopped by end-of-sequence tokens
  P_greedy_top2_ids, P_greedy_top2        the two best at each of these steps: a near-tie shows
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from prompts import PROMPTS
from smollm2_model import load
from transformers import AutoTokenizer, LlamaForCausalLM

STEPS, SUBSET, POSITIONS = 64, 512, 16


@torch.no_grad()
def greedy(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Greedy tokens [steps], and ids and logits of the two best at each step [steps, 2]."""
    cache, tokens, top_ids, top = None, [], [], []
    for _ in range(STEPS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        values, best = out.logits[0, -1].topk(2)
        tokens.append(int(best[0]))
        top_ids.append(best.numpy())
        top.append(values.numpy())
        ids = best[:1][None]
    return np.array(tokens, np.int32), np.stack(top_ids).astype(np.int32), np.stack(top)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name)
    model = load(str(args.gguf))
    random = np.random.default_rng(0)
    subset = np.sort(random.choice(model.config.vocab_size, SUBSET, replace=False)).astype(np.int32)
    golden = {"subset": subset}
    for name, prompt in PROMPTS.items():
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        assert len(ids) > 200, (name, len(ids))
        batch = torch.tensor([ids])
        logits = model(input_ids=batch).logits[0]
        inner = random.choice(len(ids) - 2, POSITIONS - 2, replace=False) + 1
        where = np.sort(np.concatenate([[0, len(ids) - 1], inner])).astype(np.int32)
        some = logits[torch.from_numpy(where).long()]
        top, top_ids = some.topk(8)
        tokens, best_ids, best = greedy(model, batch)
        golden |= {
            f"{name}_ids": np.array(ids, np.int32),
            f"{name}_argmax": logits.argmax(-1).numpy().astype(np.int32),
            f"{name}_max": logits.max(-1).values.numpy(),
            f"{name}_positions": where,
            f"{name}_subset_logits": some[:, torch.from_numpy(subset).long()].numpy(),
            f"{name}_logsumexp": some.logsumexp(-1).numpy(),
            f"{name}_top8_ids": top_ids.numpy().astype(np.int32),
            f"{name}_top8": top.numpy(),
            f"{name}_greedy": tokens,
            f"{name}_greedy_top2_ids": best_ids,
            f"{name}_greedy_top2": best,
        }
        margin = (best[:, 0] - best[:, 1]).min()
        print(f"{name}: {len(ids)} tokens, smallest greedy margin {margin:.4f}")
        print(repr(tokenizer.decode(tokens)))
    np.savez_compressed(args.out, **golden)
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
