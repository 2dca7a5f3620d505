"""MiMo's MTP module in plain torch (transformers has no `mimo`), and its golden outputs.

At position p, with target hidden state h_p (after the final norm) and the next token t_{p+1}:
  u_p = input_proj [hidden_layernorm(h_p) | token_layernorm(E[t_{p+1}])]
  y_p = final_layernorm(block(u)_p), a decoder layer with causal attention and rotary position p
  logits for t_{p+2} = lm_head y_p
A second draft recycles: hidden y_P, token d_1, position P + 1, attending to the rows 0..P that were
made from the target's hidden states. The embedding at position 0 is not zeroed.
"""

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config

DRAFTS = 3


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, config: Qwen2Config):
        super().__init__()
        width, self.heads, self.kv_heads = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.dim = width // self.heads
        self.theta = config.rope_parameters["rope_theta"]
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=True)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=True)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=True)
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [n, heads, dim]; row number is position; halves, not pairs."""
        half = self.dim // 2
        frequencies = self.theta ** -(torch.arange(half) / half)
        angles = torch.arange(x.shape[0])[:, None, None] * frequencies  # [n, 1, half]
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        q = self.rotate(self.q_proj(x).view(n, self.heads, self.dim))
        k = self.rotate(self.k_proj(x).view(n, self.kv_heads, self.dim))
        v = self.v_proj(x).view(n, self.kv_heads, self.dim)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return self.o_proj(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder layer over one whole sequence [n, width]; Qwen2's weight names."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = Mlp(width, config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpModule(Block):
    """The module; its parameters are those of MiMo's `model.mtp_layers.0.`."""

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = RMSNorm(width, eps)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """y [n, width] from hidden states and the embeddings of the following tokens, both [n, width]."""
        both = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedding)], -1)
        return self.final_layernorm(super().forward(self.input_proj(both)))


def check_block(model: PreTrainedModel, golden: dict[str, np.ndarray]) -> None:
    """The plain block above, given the target's weights, must agree with transformers."""
    x = model.model.embed_tokens(torch.from_numpy(golden["ids"]).long())
    for layer in model.model.layers:
        block = Block(model.config)
        block.load_state_dict(layer.state_dict())
        x = block(x)
    error = (model.model.norm(x) - torch.from_numpy(golden["hidden"])).abs().max()
    assert error < 1e-4, error


def mtp_golden(
    model: PreTrainedModel, module: MtpModule, golden: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Teacher-forced outputs at all positions but the last, and recycled drafts from some anchors.

    Returns:
      mtp_hidden [n-1, width], mtp_logits [n-1, vocab]: row p from h_p and t_{p+1}
      anchors [a]: positions P that drafting starts from, with t_{P+1} as the newest token
      draft_ids [a, DRAFTS]; draft_hidden [a, DRAFTS, width]; draft_logits [a, DRAFTS, vocab]:
        step 0 is row P; step j recycles step j-1's hidden state and token at position P + j
    """
    table = model.model.embed_tokens.weight
    ids, hidden = torch.from_numpy(golden["ids"]).long(), torch.from_numpy(golden["hidden"])
    forced = module(hidden[:-1], table[ids[1:]])
    anchors = [0, 7, 20, len(ids) - 2]
    steps = []
    for anchor in anchors:
        states, tokens = hidden[: anchor + 1], ids[1 : anchor + 2]
        chain = []
        for _ in range(DRAFTS):
            last = module(states, table[tokens])[-1]
            chain.append(last)
            states = torch.cat([states, last[None]])
            tokens = torch.cat([tokens, model.lm_head(last).argmax()[None]])
        steps.append(torch.stack(chain))
    drafts = torch.stack(steps)
    logits = model.lm_head(drafts)
    return {
        "mtp_hidden": forced.numpy(),
        "mtp_logits": model.lm_head(forced).numpy(),
        "anchors": np.array(anchors, np.int32),
        "draft_ids": logits.argmax(-1).numpy().astype(np.int32),
        "draft_hidden": drafts.numpy(),
        "draft_logits": logits.numpy(),
    }
