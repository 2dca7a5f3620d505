"""Tiny random checkpoints in Hugging Face's layout, with golden outputs, float32.

    python tiny_models.py --out ../golden

  tiny_qwen2/   biases, untied head, linear rotary scaling; one file, config.json in the older form
  tiny_llama3/  Llama 3's rotary scaling, tied, head_dim other than hidden / heads; bfloat16, three shards
  tiny_mimo/    Qwen2-type target with an MTP module (model.mtp_layers.0.*), and a tokenizer of bytes

and beside each NAME.npz: `ids` [n], `hidden` [n, width] after the final norm, `logits` [n, vocab];
for tiny_mimo also what mimo_mtp.py says.
"""

import argparse
import json
import shutil
from pathlib import Path

import mimo_mtp
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

LENGTH = 48
SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that matter: logits spread over several units, norms off one, biases off zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.2 * noise
        elif parameter.ndim == 1:
            parameter.data = 0.3 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.data = 0.4 * noise
        else:
            parameter.data = noise * (1.2 / parameter.shape[1] ** 0.5)


@torch.no_grad()
def target_golden(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(3, SIZES["vocab_size"], LENGTH)
    hidden = model.model(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
    logits = model.lm_head(hidden)
    return {"ids": ids.astype(np.int32), "hidden": hidden.numpy(), "logits": logits.numpy()}


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def older_config(kind: str, **fields: object) -> dict[str, object]:
    """config.json as it was before `rope_parameters`."""
    values = {k: v for k, v in SIZES.items() if k != "attn_implementation"}
    return {"model_type": kind, "hidden_act": "silu", "torch_dtype": "float32"} | values | fields


def qwen2(out: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters=rope, tie_word_embeddings=False)).eval()
    randomise(model, 1)
    directory = fresh(out / "tiny_qwen2")
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    scaling = {"type": "linear", "factor": 2.0}
    fields = {"rope_theta": 20000.0, "rope_scaling": scaling, "tie_word_embeddings": False}
    write_json(directory / "config.json", older_config("qwen2", rms_norm_eps=1e-6, **fields))
    np.savez_compressed(out / "tiny_qwen2.npz", **target_golden(model, 1))


def llama3(out: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(
        **SIZES, head_dim=16, rope_parameters=rope, tie_word_embeddings=True, rms_norm_eps=1e-5
    )
    model = LlamaForCausalLM(config).eval()
    randomise(model, 2)
    model.to(torch.bfloat16)
    model.tie_weights()
    directory = fresh(out / "tiny_llama3")
    model.save_pretrained(directory, max_shard_size="50KB")
    assert (directory / "model.safetensors.index.json").is_file()
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 5]})
    # Read back rather than cast back: casting the model rounds its rotary frequencies too.
    loaded = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    np.savez_compressed(out / "tiny_llama3.npz", **target_golden(loaded.eval(), 2))


def byte_tokenizer(directory: Path) -> None:
    """A tokenizer for 256 ids: three special ones, and every byte but three that UTF-8 never uses."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in visible}
    alphabet |= {byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(visible)))}
    kept = [alphabet[byte] for byte in range(256) if byte not in (0xC0, 0xC1, 0xFF)]
    names = ["<|pad|>", "<|bos|>", "<|eos|>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(names + kept)}, []))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    special = {"pad_token": names[0], "bos_token": names[1], "eos_token": names[2]}
    write_json(directory / "tokenizer_config.json", special | {"chat_template": template})


@torch.no_grad()
def mimo(out: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 640000.0}
    config = Qwen2Config(**SIZES, rope_parameters=rope, tie_word_embeddings=False, rms_norm_eps=1e-5)
    model = Qwen2ForCausalLM(config).eval()
    randomise(model, 3)
    module = mimo_mtp.MtpModule(config)
    randomise(module, 4)
    directory = fresh(out / "tiny_mimo")
    state = model.state_dict() | {f"model.mtp_layers.0.{k}": v for k, v in module.state_dict().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    fields = {"rope_theta": 640000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    fields |= {"attention_bias": True, "num_nextn_predict_layers": 1, "head_dim": 8}
    write_json(directory / "config.json", older_config("mimo", **fields))
    byte_tokenizer(directory)
    golden = target_golden(model, 3)
    mimo_mtp.check_block(model, golden)
    np.savez_compressed(out / "tiny_mimo.npz", **golden, **mimo_mtp.mtp_golden(model, module, golden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for make in (qwen2, llama3, mimo):
        make(out)
    for path in sorted(out.rglob("*")):
        print(f"{path.stat().st_size:8d} {path.relative_to(out)}")


if __name__ == "__main__":
    main()
