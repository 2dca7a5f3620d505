"""DeepSeek's and GLM's blocks and MTP module in plain NumPy, float32, and the module's golden outputs.

Reads a checkpoint directory in the published layout and nothing else: no torch, no transformers. It covers
MLA (deepseek_v3), MLA with the indexer's sparse attention (deepseek_v32, glm_moe_dsa) and grouped-query
attention with q/k norms and partial rotary dimensions (glm4_moe), each with the sigmoid router. The same
blocks run the whole target too, which moe_golden.py compares with transformers: that is what proves them.

At position p, with target hidden state h_p (after the final norm) and the next token t_{p+1}:
  u_p = eh_proj [enorm(E[t_{p+1}]) | hnorm(h_p)]
  y_p = shared_head.norm(block(u)_p), causal, rotary position p (that of h_p), own keys and values
  logits for t_{p+2} = lm_head y_p
A second draft recycles: hidden y_P (after the norm), token d_1, position P + 1, attending to the rows 0..P
that were made from the target's hidden states. The embedding at position 0 is not zeroed. With
`index_share_for_mtp_iteration` the recycled rows take the index row of row P verbatim: they attend neither
to one another nor to themselves. Without it every step runs the indexer.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

DRAFTS = 3
LATENT_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says: so does transformers
KEY_NORM_EPS = 1e-6

Array = np.ndarray


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return weight * (x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def best(scores: Array, count: int) -> tuple[Array, float]:
    """Mask of the `count` largest along the last axis, and the smallest lead over the best one left out."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order[..., :count], True, -1)
    if count >= scores.shape[-1]:
        return mask, np.inf
    ranked = np.take_along_axis(scores, order, -1)
    with np.errstate(invalid="ignore"):
        lead = ranked[..., count - 1] - ranked[..., count]
    return mask, float(np.nanmin(lead))


def as_index_sets(mask: Array, count: int) -> Array:
    """int32 [..., count]: the true columns of every row, ascending, the rest -1."""
    columns = np.where(mask, np.arange(mask.shape[-1]), np.iinfo(np.int32).max)
    columns = np.sort(columns, -1)
    room = np.full((*mask.shape[:-1], max(0, count - mask.shape[-1])), np.iinfo(np.int32).max)
    columns = np.concatenate([columns, room], -1)[..., :count]
    return np.where(columns == np.iinfo(np.int32).max, -1, columns).astype(np.int32)


class Rotary:
    """Rotates a whole sequence [n, heads, dim], whose row number is its position."""

    def __init__(self, config: dict, dim: int):
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta", config.get("rope_theta"))
        pairs = np.arange(0, dim, 2) / dim
        self.frequencies = theta**-pairs
        self.magnitude, self.score_factor = 1.0, 1.0
        if rope.get("rope_type", rope.get("type", "default")) == "yarn":
            self._yarn(rope, dim, theta)

    def _yarn(self, rope: dict, dim: int, theta: float) -> None:
        def pair_of(turns: float) -> float:
            length = rope["original_max_position_embeddings"]
            return dim * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(theta))

        low = max(np.floor(pair_of(rope["beta_fast"])), 0)
        high = min(np.ceil(pair_of(rope["beta_slow"])), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        self.frequencies = self.frequencies * (ramp / rope["factor"] + (1 - ramp))
        m, m_all = (0.1 * rope[k] * np.log(rope["factor"]) + 1 for k in ("mscale", "mscale_all_dim"))
        self.magnitude = m / m_all
        self.score_factor = m_all**2  # all of the magnitude that is not in cos and sin goes into the softmax

    def __call__(self, x: Array, interleaved: bool) -> Array:
        angles = np.arange(x.shape[0])[:, None, None] * self.frequencies
        cos = (np.cos(angles) * self.magnitude).astype(np.float32)
        sin = (np.sin(angles) * self.magnitude).astype(np.float32)
        half = x.shape[-1] // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        turned = [a * cos - b * sin, b * cos + a * sin]
        return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)


class Reference:
    """A checkpoint. `margins` collects by how much each router and top-k decision was made."""

    def __init__(self, directory: Path):
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self.layers = self.config["num_hidden_layers"]
        self.eps = self.config["rms_norm_eps"]
        self.latent = "kv_lora_rank" in self.config
        self.sparse = "index_topk" in self.config
        if self.latent:
            dim = self.config["qk_rope_head_dim"]
        else:
            dim = int(self.config["head_dim"] * self.config["partial_rotary_factor"])
        self.rotary_dim, self.rotary = dim, Rotary(self.config, dim)
        self.margins: list[float] = []

    def linear(self, name: str, x: Array) -> Array:
        out = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def norm(self, name: str, x: Array, eps: float | None = None) -> Array:
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps if eps is None else eps)

    # Attention over one whole sequence [n, width]; `visible` [n, n] says which key a row may see

    def attend(self, q: Array, k: Array, v: Array, visible: Array, scale: float) -> Array:
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(scale)
        weights = softmax(np.where(visible, scores, -np.inf))
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)

    def mla(self, name: str, x: Array, latent_q: Array, visible: Array) -> Array:
        c, n, heads = self.config, len(x), self.config["num_attention_heads"]
        nope, rank = c["qk_nope_head_dim"], c["kv_lora_rank"]
        projection = "q_proj" if c["q_lora_rank"] is None else "q_b_proj"
        q = self.linear(f"{name}.{projection}", latent_q).reshape(n, heads, -1)
        kv = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        latent = self.norm(f"{name}.kv_a_layernorm", kv[:, :rank], LATENT_EPS)
        key_rot = self.rotary(kv[:, None, rank:], interleaved=True)
        kv = self.linear(f"{name}.kv_b_proj", latent).reshape(n, heads, nope + c["v_head_dim"])
        q = np.concatenate([q[..., :nope], self.rotary(q[..., nope:], interleaved=True)], -1)
        k = np.concatenate([kv[..., :nope], key_rot.repeat(heads, 1)], -1)
        scale = q.shape[-1] ** -0.5 * self.rotary.score_factor
        return self.linear(f"{name}.o_proj", self.attend(q, k, kv[..., nope:], visible, scale))

    def gqa(self, name: str, x: Array, visible: Array) -> Array:
        c, n, dim = self.config, len(x), self.config["head_dim"]
        q, k, v = (self.linear(f"{name}.{p}_proj", x).reshape(n, -1, dim) for p in "qkv")
        if c["use_qk_norm"]:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        turned = self.rotary_dim
        q, k = (
            np.concatenate([self.rotary(y[..., :turned], interleaved=False), y[..., turned:]], -1)
            for y in (q, k)
        )
        share = c["num_attention_heads"] // c["num_key_value_heads"]
        out = self.attend(q, k.repeat(share, 1), v.repeat(share, 1), visible, dim**-0.5)
        return self.linear(f"{name}.o_proj", out)

    def index(self, name: str, x: Array, latent_q: Array) -> Array:
        """The lightning indexer's choice: bool [n, n], at most index_topk keys a row, none in the future."""
        c, n, heads = self.config, len(x), self.config["index_n_heads"]
        q = self.linear(f"{name}.wq_b", latent_q).reshape(n, heads, -1)
        k = self.linear(f"{name}.wk", x)
        k = k - k.mean(-1, keepdims=True)
        k = rms_norm(k, self.weights[f"{name}.k_norm.weight"], KEY_NORM_EPS)
        k = (k + self.weights[f"{name}.k_norm.bias"])[:, None]
        interleaved, turned = c["model_type"] == "glm_moe_dsa", self.rotary_dim
        q, k = (
            np.concatenate([self.rotary(y[..., :turned], interleaved), y[..., turned:]], -1) for y in (q, k)
        )
        weights = self.linear(f"{name}.weights_proj", x) * np.float32(heads**-0.5)
        agreement = np.maximum(np.einsum("qhd,kd->qhk", q, k[:, 0]) * np.float32(q.shape[-1] ** -0.5), 0)
        scores = np.einsum("qh,qhk->qk", weights, agreement)
        causal = np.tril(np.ones((n, n), bool))
        mask, margin = best(np.where(causal, scores, -np.inf), c["index_topk"])
        self.margins.append(margin)
        return mask & causal

    # Feed-forward

    def ffn(self, name: str, x: Array) -> Array:
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", gate * sigmoid(gate) * self.linear(f"{name}.up_proj", x))

    def moe(self, name: str, x: Array) -> Array:
        c, n = self.config, len(x)
        scores = sigmoid(self.linear(f"{name}.gate", x))
        choice = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        groups = choice.reshape(n, c["n_group"], -1)
        kept, margin = best(np.sort(groups, -1)[..., -2:].sum(-1), c["topk_group"])
        choice = np.where(kept[..., None], groups, -np.inf).reshape(n, -1)
        chosen, other_margin = best(choice, c["num_experts_per_tok"])
        self.margins += [margin, other_margin]
        weights = np.where(chosen, scores, 0)
        if c["norm_topk_prob"]:
            weights = weights / (weights.sum(-1, keepdims=True) + np.float32(1e-20))
        weights = weights * np.float32(c["routed_scaling_factor"])
        out = self.ffn(f"{name}.shared_experts", x)
        for expert in range(c["n_routed_experts"]):
            rows = np.flatnonzero(chosen[:, expert])
            out[rows] += weights[rows, expert, None] * self.ffn(f"{name}.experts.{expert}", x[rows])
        return out

    # Layers

    def block(
        self, layer: int, x: Array, chosen: Array | None = None, last_verified: int | None = None
    ) -> tuple[Array, Array]:
        """A decoder layer over one whole sequence [n, width].

        Args:
          chosen: the keys that an earlier layer's indexer chose [n, n]; None: this layer's own do
          last_verified: rows behind this one take its choice of keys instead of their own
        Returns: the residual stream after the layer, and the keys that each row saw [n, n]
        """
        name = f"model.layers.{layer}"
        inner = self.norm(f"{name}.input_layernorm", x)
        attention = f"{name}.self_attn"
        if self.latent:
            latent_q = inner
            if self.config["q_lora_rank"] is not None:
                latent_q = self.linear(f"{attention}.q_a_proj", inner)
                latent_q = self.norm(f"{attention}.q_a_layernorm", latent_q, LATENT_EPS)
            if chosen is None and self.sparse:
                chosen = self.index(f"{attention}.indexer", inner, latent_q)
            elif chosen is None:
                chosen = np.tril(np.ones((len(x), len(x)), bool))
            if last_verified is not None:
                chosen = chosen.copy()
                chosen[last_verified + 1 :] = chosen[last_verified]
            x = x + self.mla(attention, inner, latent_q, chosen)
        else:
            chosen = np.tril(np.ones((len(x), len(x)), bool))
            x = x + self.gqa(attention, inner, chosen)
        inner = self.norm(f"{name}.post_attention_layernorm", x)
        dense = layer < self.config["first_k_dense_replace"]
        return x + (self.ffn if dense else self.moe)(f"{name}.mlp", inner), chosen

    def owns_indexer(self, layer: int) -> bool:
        return f"model.layers.{layer}.self_attn.indexer.wk.weight" in self.weights

    def target(self, ids: Array) -> tuple[Array, Array, list[Array]]:
        """The final norm's output [n, width], every layer's [L, n, width], and the indexers' choices."""
        x, chosen = self.weights["model.embed_tokens.weight"][ids], None
        layers, choices = [], []
        for layer in range(self.layers):
            owns = self.owns_indexer(layer)
            x, chosen = self.block(layer, x, None if owns else chosen)
            layers.append(x)
            choices += [chosen] if owns else []
        return self.norm("model.norm", x), np.stack(layers), choices

    def logits(self, hidden: Array) -> Array:
        return hidden @ self.weights["lm_head.weight"].T

    def mtp(self, hidden: Array, tokens: Array, last_verified: int | None = None) -> tuple[Array, Array]:
        """y [n, width] and the keys seen [n, n], from hidden states and the tokens that follow them."""
        name = f"model.layers.{self.layers}"
        embedding = self.weights["model.embed_tokens.weight"][tokens]
        both = [self.norm(f"{name}.enorm", embedding), self.norm(f"{name}.hnorm", hidden)]
        u = self.linear(f"{name}.eh_proj", np.concatenate(both, -1))
        y, chosen = self.block(self.layers, u, last_verified=last_verified)
        return self.norm(f"{name}.shared_head.norm", y), chosen


def mtp_golden(model: Reference, ids: Array, hidden: Array) -> dict[str, Array]:
    """Teacher-forced outputs at all positions but the last, and recycled drafts from some anchors.

    Returns:
      mtp_hidden [n-1, width], mtp_logits [n-1, vocab]: row p from h_p and t_{p+1}
      anchors [a]: positions P that drafting starts from, with t_{P+1} as the newest token
      draft_ids [a, DRAFTS]; draft_hidden [a, DRAFTS, width]; draft_logits [a, DRAFTS, vocab]:
        step 0 is row P; step j recycles step j-1's hidden state and token at position P + j
      with an indexer also mtp_topk [n-1, index_topk] and draft_topk [a, DRAFTS, index_topk]
    """
    forced, chosen = model.mtp(hidden[:-1], ids[1:])
    anchors = [0, 3, 7, 20, 33, len(ids) - 2]
    share = model.config.get("index_share_for_mtp_iteration", False)
    steps, keys = [], []
    for anchor in anchors:
        states, tokens = hidden[: anchor + 1], ids[1 : anchor + 2]
        chain, seen = [], np.zeros((DRAFTS, len(ids) + DRAFTS), bool)
        for step in range(DRAFTS):
            rows, visible = model.mtp(states, tokens, anchor if share else None)
            chain.append(rows[-1])
            seen[step, : len(rows)] = visible[-1]
            states = np.concatenate([states, rows[-1:]])
            tokens = np.append(tokens, model.logits(rows[-1]).argmax())
        steps.append(np.stack(chain))
        keys.append(seen)
    drafts = np.stack(steps)
    logits = model.logits(drafts)
    golden = {
        "mtp_hidden": forced,
        "mtp_logits": model.logits(forced),
        "anchors": np.array(anchors, np.int32),
        "draft_ids": logits.argmax(-1).astype(np.int32),
        "draft_hidden": drafts,
        "draft_logits": logits,
    }
    if model.sparse:
        count = model.config["index_topk"]
        golden["mtp_topk"] = as_index_sets(chosen, count)
        golden["draft_topk"] = as_index_sets(np.stack(keys), count)
    return golden
