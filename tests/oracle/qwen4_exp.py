"""A tiny random Qwen4Exp checkpoint in its published layout, float32, with goldens.

    python qwen4_exp.py --out ../golden

  tiny_qwen4_exp/   four residual streams, indexed attention in the fourth layer, a hashed n-gram embedding in
                    the second (table in four parts, hash constants as int64), summed MTP input, vision tower

and beside it tiny_qwen4_exp.npz with what delta_models.py lists (`layers` [L, n, 4 * width] are the streams;
`hidden` is the final mixer's output, which the head reads: there is no final norm), and
  ngram_ids [n, heads]: rows of the n-gram table
  ple_window [9, 4 * width], ple_context [2]: of layer 1 after all n tokens, oldest first: the last inputs of
    the dilated convolution (normalised values), and the last tokens
  and what qwen4_mtp.py says.

transformers computes the target from the directory. It was seen to do, besides what delta_models.py says:
  - PLE's layers count from one; its table's parts follow each other; it adds to the streams before the layer
  - the gated value is added as it is; only what goes into the convolution is normalised
  - the gate is sign(x) sqrt(max(|x|, 1e-6)) before the sigmoid
  - the delta net's output gate is a sigmoid (output_gate_type)
  - `full_attention` in layer_types means indexed attention
"""

import argparse
import json
from pathlib import Path

import delta_models
import numpy as np
import qwen4_mtp
import torch
from delta_models import Tensors, check_decays, draw, load, margin, mrope_golden, nested_config, published
from safetensors.numpy import save_file
from tiny_models import byte_tokenizer, fresh, write_json
from transformers import AutoConfig, PreTrainedModel, Qwen4ExpForConditionalGeneration

PARTS, WIDTH, STREAMS = 4, 24, 4


def config() -> dict[str, object]:
    fields = {"hidden_size": WIDTH, "linear_key_head_dim": 8, "linear_value_head_dim": 10, "bos_token_id": 1}
    fields |= delta_models.EXPERTS | {"moe_intermediate_size": 4, "output_gate_type": "sigmoid"}
    fields |= {"hc_count": STREAMS, "hc_lowrank": 4, "partial_rotary_factor": 0.5}
    fields |= {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 12}
    fields |= {"indexer_budget": 16, "indexer_compress_ratio": 4}
    fields |= {"ple_layer_ids": [2], "ple_embed_dim": 32, "ple_conv_kernel_size": 4, "ngram_size": 3}
    fields |= {"heads_per_ngram": 4, "ngram_vocab_size_base": 37, "make_ngram_vocab_size_divisible_by": 16}
    fields |= {"split_ngram_parts": PARTS}
    fields["mtp"] = {"hybrid": True, "layer_types": ["full_attention"], "num_hidden_layers": 1}
    fields["mtp"] |= {"rope_theta": 10000.0, "mtp_use_hidden_state_from_layer": None}
    whole = nested_config("qwen4_exp", "Qwen4ExpForConditionalGeneration", False, **fields)
    return whole | {"vision_config": whole["vision_config"] | {"out_hidden_size": WIDTH}}


def in_parts(tensors: Tensors) -> Tensors:
    """The n-gram table as the release stores it."""
    table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
    parts = np.split(tensors.pop(f"{table}.weight"), PARTS)
    return tensors | {f"{table}.shard_{i}.weight": part.copy() for i, part in enumerate(parts)}


def mtp_tensors(tensors: Tensors, random: np.random.Generator) -> Tensors:
    """The MTP module: its layer has the shapes of the trunk's fourth, its mixer those of the final one."""
    trunk, shapes = "model.language_model.", {}
    for name, tensor in tensors.items():
        if name.startswith(f"{trunk}layers.3."):
            shapes[name.replace(f"{trunk}layers.3.", "mtp.layers.0.")] = tensor.shape
        if name.startswith(f"{trunk}hyper_connection_mixer."):
            shapes[name.replace(trunk, "mtp.")] = tensor.shape
    shapes |= {f"mtp.fc_{part}.weight": (WIDTH, WIDTH) for part in ("embedding", "hidden")}
    shapes["mtp.pre_fc_norm_embedding.weight"] = (WIDTH,)
    shapes["mtp.pre_fc_norm_hidden.weight"] = (STREAMS * WIDTH,)
    return {name: draw(name, shape, random) for name, shape in sorted(shapes.items())}


@torch.no_grad()
def ngram_golden(model: PreTrainedModel, ids: np.ndarray) -> Tensors:
    rows, ple = [], model.model.language_model.layers[1].ple
    hook = ple.ple_embedding.ngram_embedding.register_forward_hook(
        lambda m, args, out: rows.append(args[0][0])
    )
    out = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=True)
    hook.remove()
    states = out.cache.layers[1].conv_states
    return {
        "ngram_ids": rows[0].numpy().astype(np.int32),
        "ple_window": states[1][0].T.numpy(),
        "ple_context": states[2][0].numpy().astype(np.int32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    random = np.random.default_rng(4)
    directory = fresh(out / "tiny_qwen4_exp")
    write_json(directory / "config.json", config())
    model = Qwen4ExpForConditionalGeneration(AutoConfig.from_pretrained(directory))
    tensors = in_parts(published(model.state_dict(), False, False, random))
    tensors["lm_head.weight"] *= np.float32(2.5)  # the mixer's gates make its output small
    tensors |= mtp_tensors(tensors, random)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer(directory)
    model = load(Qwen4ExpForConditionalGeneration, directory)
    ids = random.integers(3, 250, 72)
    ids[[5, 30, 31, 33]] = 2  # n-grams do not reach behind an end-of-sequence token
    check_decays(model, ids)
    golden = delta_models.target_golden(model, ids) | mrope_golden(model, ids) | ngram_golden(model, ids)
    text = json.loads((directory / "config.json").read_text())["text_config"]
    np.testing.assert_array_equal(qwen4_mtp.ngram_rows(text, ids), golden["ngram_ids"])
    error = qwen4_mtp.check_layer(directory, golden, 3)
    assert error < 1e-4, error
    golden |= qwen4_mtp.mtp_golden(directory, golden)
    assert min(margin(golden["draft_logits"]), margin(golden["fresh_draft_logits"])) > 1e-3
    assert np.abs(golden["draft_logits"] - golden["fresh_draft_logits"]).max() > 0.1
    np.savez_compressed(out / "tiny_qwen4_exp.npz", **golden)
    print(f"logits' deviation {golden['logits'].std():.2f}, MTP layer as the trunk's: {error:.1e}")
    print(
        sum(path.stat().st_size for path in directory.iterdir()), (out / "tiny_qwen4_exp.npz").stat().st_size
    )


if __name__ == "__main__":
    main()
