"""Qwen4Exp's MTP module and n-gram hash in plain NumPy: no model library, no torch.

The residual is four streams. At position p, with the target's streams s_p before the final mixer and the next
token t_{p+1}:
  u_p = fc_hidden(pre_fc_norm_hidden(s_p)) + fc_embedding(pre_fc_norm_embedding(E[t_{p+1}]))
    one norm over all four streams at once; fc_hidden on each stream; the embedding's part added to each
  v_p = layer(u)_p, one decoder layer with hyper-connections, indexed gated attention and experts
  logits for t_{p+2} = lm_head hyper_connection_mixer(v_p)
A second draft recycles the streams v_P, with token d_1 at position P + 1. Which positions it attends to:
  draft_*: those that row P selected in step 0, whatever the step; so neither itself nor the other drafts
  fresh_draft_*: every step's row selects for itself, as in the trunk

The indexer averages the keys of every four tokens, then normalises them and rotates them as the first. A
row takes the best complete groups among those up to itself, and the incomplete one at its end.
"""

from pathlib import Path

import numpy as np
from qwen_mtp import DRAFTS, Array, Checkpoint, feed_forward, gated_attention, norm, rotate, sigmoid, silu


def per_stream_norm(c: Checkpoint, streams: Array, weight: Array) -> Array:
    """streams [n, streams * width], each normalised for itself."""
    apart = streams.reshape(len(streams), c.text["hc_count"], -1)
    return norm(apart, weight.reshape(apart.shape[1:]), c.eps).reshape(streams.shape)


def mix(c: Checkpoint, w: dict[str, Array], streams: Array) -> tuple[Array, Array | None]:
    """What a sub-layer reads, [n, width], and how much of its output each stream takes, [n, streams, 1]."""
    count = c.text["hc_count"]
    normed = per_stream_norm(c, streams, w["hc_norm.weight"])
    gate = silu(normed @ w["input_mix_weight_down.weight"].T / count) @ w["input_mix_weight_up.weight"].T
    mixed = (sigmoid(gate) * normed).reshape(len(streams), count, -1).mean(1)
    if "block_inject_weight.weight" not in w:
        return mixed, None
    return mixed, 2 * sigmoid(normed @ w["block_inject_weight.weight"].T / count)[..., None]


def select(c: Checkpoint, w: dict[str, Array], x: Array) -> Array:
    """Which positions each row of x [n, width] attends to, bool [n, n]."""
    n, heads, dim = len(x), c.text["indexer_n_heads"], c.text["indexer_head_dim"]
    size = c.text["indexer_compress_ratio"]
    best, groups = c.text["indexer_budget"] // size, n // size
    both = (x @ w["index_qk_proj.weight"].T).reshape(n, heads + 1, dim)
    query = rotate(norm(both[:, :heads], w["q_layernorm.weight"], c.eps), np.arange(n), c.rotary, c.theta)
    pooled = both[: groups * size, heads:].reshape(groups, size, 1, dim).mean(1)
    pooled = norm(pooled, w["k_layernorm.weight"], c.eps)
    key = rotate(pooled, np.arange(groups) * size, c.rotary, c.theta)[:, 0]
    scores = np.maximum(np.einsum("qhd,kd->qhk", query, key), 0).sum(1) / np.float32(dim**0.5)
    allowed = np.zeros((n, n), bool)
    for row in range(n):
        complete = (row + 1) // size
        order = np.argsort(-scores[row, :complete], kind="stable")
        if complete > best:
            gap = scores[row, order[best - 1]] - scores[row, order[best]]
            assert gap > 1e-4, "an indexer near a tie"
        for group in order[:best]:
            allowed[row, group * size : (group + 1) * size] = True
        allowed[row, complete * size : row + 1] = True
    return allowed


def layer(c: Checkpoint, prefix: str, streams: Array, reuse_from: int | None = None) -> tuple[Array, Array]:
    """One indexed-attention layer over a whole sequence [n, streams * width].

    Rows behind `reuse_from` attend to what that row selected. Returns the streams and the selection [n, n].
    """
    x, inject = mix(c, c.part(f"{prefix}attn_hyper_connection."), streams)
    allowed = select(c, c.part(f"{prefix}self_attn.indexer."), x)
    if reuse_from is not None:
        allowed[reuse_from + 1 :] = allowed[reuse_from]
    out = gated_attention(c, c.part(f"{prefix}self_attn."), x, allowed)
    streams = streams + (inject * out[:, None]).reshape(streams.shape)
    x, inject = mix(c, c.part(f"{prefix}mlp_hyper_connection."), streams)
    out = feed_forward(c, c.part(f"{prefix}mlp."), x)
    return streams + (inject * out[:, None]).reshape(streams.shape), allowed


def module(
    c: Checkpoint, streams: Array, tokens: Array, reuse_from: int | None = None
) -> tuple[Array, Array]:
    """(mixed [n, width], streams [n, streams * width]) from streams and the tokens that follow them, [n]."""
    w = c.part("mtp.")
    hidden = norm(streams, w["pre_fc_norm_hidden.weight"], c.eps)
    hidden = hidden.reshape(len(streams), c.text["hc_count"], -1) @ w["fc_hidden.weight"].T
    embedding = (
        norm(c.embedding[tokens], w["pre_fc_norm_embedding.weight"], c.eps) @ w["fc_embedding.weight"].T
    )
    x = (hidden + embedding[:, None]).reshape(streams.shape)
    out, _ = layer(c, "mtp.layers.0.", x, reuse_from)
    return mix(c, c.part("mtp.hyper_connection_mixer."), out)[0], out


def draft(c: Checkpoint, streams: Array, tokens: Array, reuse: bool) -> tuple[Array, Array]:
    """DRAFTS steps from the last row: mixed [DRAFTS, width], streams [DRAFTS, streams * width]."""
    anchor = len(streams) - 1
    outputs, wide = [], []
    for _ in range(DRAFTS):
        mixed, out = module(c, streams, tokens, anchor if reuse else None)
        outputs.append(mixed[-1])
        wide.append(out[-1])
        streams = np.concatenate([streams, out[-1:]])
        tokens = np.append(tokens, np.argmax(c.head @ mixed[-1]))
    return np.stack(outputs), np.stack(wide)


def mtp_golden(directory: Path, golden: dict[str, Array]) -> dict[str, Array]:
    """Teacher-forced outputs at all positions but the last, and recycled drafts from some anchors.

    Returns:
      mtp_hidden [n-1, width], after the mixer; mtp_streams [n-1, streams * width]; mtp_logits [n-1, vocab]
      anchors [a]: positions P that drafting starts from, with t_{P+1} as the newest token
      draft_ids [a, DRAFTS]; draft_hidden, draft_streams, draft_logits [a, DRAFTS, ...]; fresh_draft_*
    """
    c = Checkpoint(directory)
    ids, streams = golden["ids"], golden["layers"][-1]
    forced, wide = module(c, streams[:-1], ids[1:])
    anchors = [0, 7, 20, len(ids) - 2]
    result = {"mtp_hidden": forced, "mtp_streams": wide, "mtp_logits": forced @ c.head.T}
    result["anchors"] = np.array(anchors, np.int32)
    for name, reuse in {"draft": True, "fresh_draft": False}.items():
        both = [draft(c, streams[: anchor + 1], ids[1 : anchor + 2], reuse) for anchor in anchors]
        hidden = np.stack([one[0] for one in both])
        logits = hidden @ c.head.T
        result |= {f"{name}_hidden": hidden, f"{name}_streams": np.stack([one[1] for one in both])}
        result |= {f"{name}_logits": logits, f"{name}_ids": logits.argmax(-1).astype(np.int32)}
    return result


def splitmix64(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def hash_constants(text: dict, index: int = 0) -> tuple[list[int], list[int]]:
    """Multipliers, one a token of the n-gram, and table sizes, one a head, of the index-th PLE layer."""
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    half = max(1, ((1 << 63) - 1) // text["vocab_size"] // 2)
    start = text.get("seed", 1234) + 10007 * index
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    multipliers = [
        2 * (splitmix64((start + gamma * (i + 1)) & mask) % half) + 1 for i in range(text["ngram_size"])
    ]
    sizes, candidate = [], text["ngram_vocab_size_base"]
    while len(sizes) < heads * (index + 1):
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            sizes.append(candidate)
        candidate += 1
    return multipliers, sizes[heads * index :]


def ngram_rows(text: dict, ids: Array) -> Array:
    """Rows of the n-gram table for each token, [n, heads], by Python's integers: exact whatever the size.

    A token before the sequence, or behind an end-of-sequence token on the way back, counts as one.
    """
    multipliers, sizes = hash_constants(text)
    eos, per = text["eos_token_id"], text["heads_per_ngram"]
    rows = np.zeros((len(ids), len(sizes)), np.int64)
    for at in range(len(ids)):
        mixed, cut = int(ids[at]) * multipliers[0], False
        for back in range(1, text["ngram_size"]):
            cut = cut or at - back < 0 or ids[at - back] == eos
            mixed ^= (eos if cut else int(ids[at - back])) * multipliers[back]
            for head in range((back - 1) * per, back * per):
                rows[at, head] = mixed % sizes[head] + sum(sizes[:head])
    return rows


def check_layer(directory: Path, golden: dict[str, Array], index: int) -> float:
    """Largest error of `layer` as the trunk's layer `index`, one with attention, against transformers'."""
    c = Checkpoint(directory)
    out, allowed = layer(c, f"{c.trunk}layers.{index}.", golden["layers"][index - 1])
    assert (allowed.sum(1) < np.arange(1, len(allowed) + 1)).any(), "the indexer leaves nothing out"
    return float(np.abs(out - golden["layers"][index]).max())
