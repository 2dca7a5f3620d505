"""transformers' outputs for a mixture-of-experts checkpoint, and the checks between it and deepseek_mtp.py.

What transformers 5.24 does, as read in its source and checked here against the NumPy reference:
  - q_a_layernorm and kv_a_layernorm have eps 1e-6 in every family, also where rms_norm_eps is 1e-5 (GLM).
    q_norm, k_norm (glm4_moe) and enorm, hnorm, shared_head.norm have rms_norm_eps; the indexer's k_norm is a
    LayerNorm with eps 1e-6. In tiny_glm_moe_dsa 1e-5 for the latent norms would move logits by 4e-4.
  - MLA's rotary pairs are interleaved in the weights. Its implementation leaves the rotated vectors
    de-interleaved, query and key alike, which no dot product sees. The indexer's are half-split in
    deepseek_v32 and interleaved in glm_moe_dsa: by class, no field of the config is read.
  - glm_moe_dsa overwrites head_dim with qk_rope_head_dim, and fails on index_topk_freq null (GLM-5.1's, which
    means 1) unless indexer_types is there.
  - The indexer runs under eager attention too: its choice becomes an additive mask. Rows that see fewer than
    index_topk keys get masked ones as well, which the causal mask hides again. Its scores have
    head_dim^-0.5 inside the relu and heads^-0.5 on the weights; no Hadamard transform.
  - Groups that the router drops get -inf, not 0.
  - generate(use_mtp=True) gives the MTP layer position p + 1 for h_p; that shifts every position alike, so
    that the outputs are those of position p.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from deepseek_mtp import Reference, as_index_sets
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

DECODED = 16
TOLERANCE = 5e-5  # float32 in two orders of summation, of values of a few units


def load(directory: Path) -> PreTrainedModel:
    """By from_pretrained, which must find every tensor but those of the MTP layer."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    assert all(name.startswith(mtp) for name in info["unexpected_keys"]), info
    return model.eval()


@torch.no_grad()
def target_golden(model: PreTrainedModel, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Golden outputs of the target.

    Returns:
      ids [n]; hidden [n, width] after the final norm; logits [n, vocab]: one prefill
      layers [L, n, width]: the residual stream after every layer
      decode_logits [DECODED, vocab]: the last tokens one by one, through transformers' cache
      topk [owners, n, index_topk], with indexers only: the chosen keys, ascending, the rest -1
    """
    layers, topk = [], []

    def keep(kept: list[torch.Tensor]) -> Callable[..., None]:
        return lambda module, args, out: kept.append((out[0] if isinstance(out, tuple) else out)[0].clone())

    hooks = [layer.register_forward_hook(keep(layers)) for layer in model.model.layers]
    for layer in model.model.layers:
        indexer = getattr(layer.self_attn, "indexer", None)
        hooks += [indexer.register_forward_hook(keep(topk))] if indexer is not None else []
    batch = torch.from_numpy(ids).long()[None]
    hidden = model.model(input_ids=batch).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    golden = {"ids": ids.astype(np.int32), "hidden": hidden.numpy(), "layers": torch.stack(layers).numpy()}
    golden["logits"] = model.lm_head(hidden).numpy()
    if topk:
        mask = np.zeros((len(topk), len(ids), len(ids)), bool)
        np.put_along_axis(mask, torch.stack(topk).long().numpy(), True, -1)
        golden["topk"] = as_index_sets(mask & np.tril(mask[0] | True), model.config.index_topk)

    start = len(ids) - DECODED
    out = model(input_ids=batch[:, :start], use_cache=True)
    rows = []
    for position in range(start, len(ids)):
        out = model(input_ids=batch[:, position : position + 1], cache=out.cache, use_cache=True)
        rows.append(out.logits[0, 0])
    golden["decode_logits"] = torch.stack(rows).numpy()
    close(golden["decode_logits"], golden["logits"][start:], "cached decode and prefill")
    return golden


def close(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    error = np.abs(ours - theirs).max()
    assert ours.shape == theirs.shape and error < TOLERANCE, (what, ours.shape, theirs.shape, error)
    print(f"  {what}: {error:.1e}")


def check_target(reference: Reference, golden: dict[str, np.ndarray]) -> None:
    """The NumPy blocks, run as the target, must agree with transformers layer by layer."""
    hidden, layers, choices = reference.target(golden["ids"])
    close(layers, golden["layers"], "NumPy and transformers, layers")
    close(hidden, golden["hidden"], "NumPy and transformers, hidden")
    if choices:
        sets = as_index_sets(np.stack(choices), reference.config["index_topk"])
        np.testing.assert_array_equal(sets, golden["topk"])


@torch.no_grad()
def check_mtp(model: PreTrainedModel, reference: Reference, golden: dict[str, np.ndarray]) -> None:
    """The first draft must be the one of transformers' MTP model, alone and inside generate(use_mtp=True)."""
    # Which tensors are the MTP layer's is a pattern of the class, written for the released layer counts.
    type(model)._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{reference.layers}\..*"]
    model._keys_to_ignore_on_load_unexpected = type(model)._keys_to_ignore_on_load_unexpected
    module = MtpModel.from_pretrained(model).eval()
    ids, hidden = torch.from_numpy(golden["ids"]).long(), torch.from_numpy(golden["hidden"])
    firsts = []
    for anchor in golden["anchors"].tolist():
        _, logits, _ = module(
            input_ids=ids[None, 1 : anchor + 2],
            last_hidden_states=hidden[None, : anchor + 1],
            attention_mask=None,
            position_ids=torch.arange(1, anchor + 2)[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
        firsts.append(logits[0, 0].numpy())
    close(golden["draft_logits"][:, 0], np.stack(firsts), "first drafts, NumPy and transformers")

    calls, forward = [], MtpModel.forward

    def watched(self: MtpModel, *args: object, **kwargs: object) -> object:
        out = forward(self, *args, **kwargs)
        calls.append((kwargs["full_input_ids"][0].numpy().copy(), out[1][0, 0].numpy()))
        return out

    MtpModel.forward = watched
    try:
        served = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        drafted = model.generate(ids[None, :20], use_mtp=True, **served)[0]
    finally:
        MtpModel.forward = forward
    assert torch.equal(drafted, model.generate(ids[None, :20], **served)[0])
    for tokens, theirs in calls:  # the text so far, whose last token is the newest, and the draft's logits
        states, _, _ = reference.target(tokens[:-1])
        ours = reference.logits(reference.mtp(states, tokens[1:])[0][-1])
        close(ours, theirs, f"draft inside generate at position {len(tokens) - 2}")
