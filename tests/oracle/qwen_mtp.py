"""The MTP module of Qwen3-Next, Qwen3.5 and its MoE in plain NumPy, float32: no model library, no torch.

It reads a checkpoint directory. At position p, with the target's hidden state h_p (after the final norm) and
the next token t_{p+1}:
  u_p = fc [pre_fc_norm_embedding(E[t_{p+1}]) | pre_fc_norm_hidden(h_p)]
  y_p = norm(layer(u)_p), one decoder layer with gated attention, rotary position p, keys of its own
  logits for t_{p+2} = lm_head y_p (the embedding's rows where the head is tied)
A second draft recycles: hidden y_P (after the norm), token d_1, position P + 1, attending to the rows 0..P
that were made from the target's hidden states. The embedding at position 0 is not zeroed.

`check_layer` runs the same layer with the weights of a trunk layer: there transformers is the judge.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

DRAFTS = 3
Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm whose stored weight is the distance from one."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps)) * (1 + weight)


def rotate(x: Array, positions: Array, dims: int, theta: float) -> Array:
    """Rotary embedding of the first `dims` features of x [n, heads, dim]: halves, not pairs."""
    half = dims // 2
    speeds = (theta ** (-np.arange(half) / half)).astype(np.float32)
    angles = positions.astype(np.float32)[:, None, None] * speeds
    cos, sin = np.cos(angles), np.sin(angles)
    a, b, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Checkpoint:
    """Weights and sizes of a directory.

    Attributes:
      tensors: everything in the safetensors files, by its name there
      text: the text model's configuration (config.json itself, or its text_config)
      trunk: what the names of the text model begin with
    """

    def __init__(self, directory: Path):
        self.tensors: dict[str, Array] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.tensors |= load_file(path)
        config = json.loads((directory / "config.json").read_text())
        self.text = config.get("text_config", config)
        self.trunk = "model.language_model." if "text_config" in config else "model."
        rope = self.text.get("rope_parameters", self.text)
        self.theta = rope["rope_theta"]
        self.rotary = int(self.text["head_dim"] * rope["partial_rotary_factor"])
        self.eps = self.text["rms_norm_eps"]
        self.embedding = self.tensors[self.trunk + "embed_tokens.weight"]
        tied = self.embedding if config["tie_word_embeddings"] else None
        self.head = self.tensors["lm_head.weight"] if tied is None else tied

    def part(self, prefix: str) -> dict[str, Array]:
        """Tensors whose names begin with `prefix`, by the rest of their names."""
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}


def gated_attention(c: Checkpoint, w: dict[str, Array], x: Array, allowed: Array | None = None) -> Array:
    """x [n, width] -> [n, width]; row number is position.

    q_proj yields, head by head, a query and then a gate. `allowed` [n, n] may forbid more than the future.
    """
    n, heads, kv = len(x), c.text["num_attention_heads"], c.text["num_key_value_heads"]
    dim, at = c.text["head_dim"], np.arange(n)
    query, gate = np.split((x @ w["q_proj.weight"].T).reshape(n, heads, 2 * dim), 2, -1)
    key = (x @ w["k_proj.weight"].T).reshape(n, kv, dim)
    value = (x @ w["v_proj.weight"].T).reshape(n, kv, dim)
    query = rotate(norm(query, w["q_norm.weight"], c.eps), at, c.rotary, c.theta)
    key = rotate(norm(key, w["k_norm.weight"], c.eps), at, c.rotary, c.theta)
    key, value = np.repeat(key, heads // kv, 1), np.repeat(value, heads // kv, 1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.float32(dim**0.5)
    visible = np.tri(n, dtype=bool) if allowed is None else allowed
    mixed = np.einsum("hqk,khd->qhd", softmax(np.where(visible, scores, -np.inf)), value)
    return (mixed * sigmoid(gate)).reshape(n, -1) @ w["o_proj.weight"].T


def swiglu(w: dict[str, Array], name: str, x: Array) -> Array:
    gate, up = x @ w[f"{name}gate_proj.weight"].T, x @ w[f"{name}up_proj.weight"].T
    return (silu(gate) * up) @ w[f"{name}down_proj.weight"].T


def expert(w: dict[str, Array], index: int, x: Array) -> Array:
    """One expert of a layer that keeps them one by one, or all in two tensors (gate rows first)."""
    if "experts.gate_up_proj" not in w:
        return swiglu(w, f"experts.{index}.", x)
    gate, up = np.split(x @ w["experts.gate_up_proj"][index].T, 2, -1)
    return (silu(gate) * up) @ w["experts.down_proj"][index].T


def feed_forward(c: Checkpoint, w: dict[str, Array], x: Array) -> Array:
    """x [n, width] -> [n, width]: dense, or the best experts, weighted to sum to one, and a shared one."""
    if "gate.weight" not in w:
        return swiglu(w, "", x)
    chances, out = softmax(x @ w["gate.weight"].T), np.zeros_like(x)
    for row, chance in enumerate(chances):
        order, count = np.argsort(-chance, kind="stable"), c.text["num_experts_per_tok"]
        best = order[:count]
        assert chance[order[count - 1]] - chance[order[count]] > 1e-4, "a router near a tie"
        for index in best:
            out[row] += chance[index] / chance[best].sum() * expert(w, index, x[row])
    return out + sigmoid(x @ w["shared_expert_gate.weight"].T) * swiglu(w, "shared_expert.", x)


def layer(c: Checkpoint, w: dict[str, Array], x: Array) -> Array:
    """A decoder layer with full attention over one whole sequence [n, width]."""
    inner = {part: {k.removeprefix(part): v for k, v in w.items()} for part in ("self_attn.", "mlp.")}
    x = x + gated_attention(c, inner["self_attn."], norm(x, w["input_layernorm.weight"], c.eps))
    return x + feed_forward(c, inner["mlp."], norm(x, w["post_attention_layernorm.weight"], c.eps))


def module(c: Checkpoint, hidden: Array, tokens: Array) -> Array:
    """y [n, width] from hidden states [n, width] and the tokens that follow them, [n]."""
    w = c.part("mtp.")
    embedding = norm(c.embedding[tokens], w["pre_fc_norm_embedding.weight"], c.eps)
    hidden = norm(hidden, w["pre_fc_norm_hidden.weight"], c.eps)
    x = np.concatenate([embedding, hidden], -1) @ w["fc.weight"].T
    return norm(layer(c, c.part("mtp.layers.0."), x), w["norm.weight"], c.eps)


def mtp_golden(directory: Path, golden: dict[str, Array]) -> dict[str, Array]:
    """Teacher-forced outputs at all positions but the last, and recycled drafts from some anchors.

    Returns:
      mtp_hidden [n-1, width], mtp_logits [n-1, vocab]: row p from h_p and t_{p+1}
      anchors [a]: positions P that drafting starts from, with t_{P+1} as the newest token
      draft_ids [a, DRAFTS]; draft_hidden [a, DRAFTS, width]; draft_logits [a, DRAFTS, vocab]:
        step 0 is row P; step j recycles step j-1's hidden state and token at position P + j
    """
    c = Checkpoint(directory)
    ids, hidden = golden["ids"], golden["hidden"]
    forced = module(c, hidden[:-1], ids[1:])
    anchors = [0, 7, 20, len(ids) - 2]
    drafts = np.zeros((len(anchors), DRAFTS, hidden.shape[1]), np.float32)
    for index, anchor in enumerate(anchors):
        states, tokens = hidden[: anchor + 1], ids[1 : anchor + 2]
        for step in range(DRAFTS):
            last = drafts[index, step] = module(c, states, tokens)[-1]
            states = np.concatenate([states, last[None]])
            tokens = np.append(tokens, np.argmax(c.head @ last))
    logits = drafts @ c.head.T
    return {
        "mtp_hidden": forced,
        "mtp_logits": forced @ c.head.T,
        "anchors": np.array(anchors, np.int32),
        "draft_ids": logits.argmax(-1).astype(np.int32),
        "draft_hidden": drafts,
        "draft_logits": logits,
    }


def check_layer(directory: Path, golden: dict[str, Array], index: int) -> float:
    """Largest error of `layer` as the trunk's layer `index`, a full-attention one, against transformers'."""
    c = Checkpoint(directory)
    out = layer(c, c.part(f"{c.trunk}layers.{index}."), golden["layers"][index - 1])
    return float(np.abs(out - golden["layers"][index]).max())
