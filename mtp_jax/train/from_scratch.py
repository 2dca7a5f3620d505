"""Training a small target and its MTP module together on text: small checkpoints that mean something."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from mtp_jax.config import ModelConfig
from mtp_jax.errors import InvalidValueError
from mtp_jax.loading.hf_config import config_from_directory, mtp_count_field
from mtp_jax.loading.hf_fields import read_json
from mtp_jax.models.block import layer_leaves
from mtp_jax.models.leaves import Leaf, tensors_of
from mtp_jax.models.registry import EMBEDDING, LM_HEAD, layer_prefix
from mtp_jax.text.from_hf import tokenizer_from_directory
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.attention import best_implementation
from mtp_jax.train.corpus import Corpus, Origin, Sample, ShardHeader, fingerprint, shard_paths, write_shard
from mtp_jax.train.export import mtp_tensors, save_tensors
from mtp_jax.train.initial import random_leaf, random_params
from mtp_jax.train.joint import Joint, JointLoss
from mtp_jax.train.launch import finish, make_setting, remember
from mtp_jax.train.text import data_folder
from mtp_jax.train.trainer import Outcome, Run
from mtp_jax.train.trunk import Target, check_trainable, final_norm_leaf, layer_runs

MODEL_FOLDER = "model"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_ROW_SCALE = 0.02  # of embedding rows: logits start near 0


def train_from_scratch(options: TrainOptions) -> Outcome:
    """Trains target and module, and exports a directory that `--model` loads.

    Raises:
      InvalidValueError: an option or a file that cannot work, with its name.
    """
    folder = config_folder(options)
    config = dataclasses.replace(config_from_directory(folder), num_nextn_predict_layers=1)
    check_trainable(config)
    if options.text:
        write_corpus(options, folder)
    corpus = Corpus.open(data_folder(options))
    if corpus.origin.vocab_size > config.vocab_size:
        legal = f"at least {corpus.origin.vocab_size}, the text's vocabulary"
        raise InvalidValueError("config.json: vocab_size", config.vocab_size, legal)
    train, held_out = split(corpus, options.held_out_samples, options.seed)
    setting = make_setting(options, train, held_out)
    remember(setting.folder, options)
    implementation = best_implementation(setting.dtype, config.head_dim)
    loss = JointLoss(
        config, options.num_speculative_tokens, options.mtp_loss_weight, implementation, setting.dtype
    )
    params = cast(optax.Params, initial_joint(config, options.seed))
    outcome = Run(setting.folder, setting.plan, setting.mesh, loss, None)(
        params, setting.train, setting.held_out
    )
    trained = cast(Joint, outcome.state.best)
    export_model(setting.folder / MODEL_FOLDER, folder, config, trained, setting.dtype)
    finish(setting, outcome, {"corpus": {"samples": train.num_samples, "tokens": train.num_tokens}})
    return outcome


def config_folder(options: TrainOptions) -> Path:
    """The folder of `--from-scratch`: given itself, or by its config.json."""
    path = Path(str(options.from_scratch)).expanduser()
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        legal = "a config.json, or a folder with one (and a tokenizer)"
        raise InvalidValueError("--from-scratch", options.from_scratch, legal)
    return folder


def write_corpus(options: TrainOptions, folder: Path) -> None:
    """Tokenizes `--text` into the data folder, unless text is there; every token is trained on.

    Raises:
      InvalidValueError: a file that cannot be read. CheckpointError: no tokenizer beside the configuration.
    """
    data = data_folder(options)
    if shard_paths(data):
        return
    tokenizer = tokenizer_from_directory(folder)
    samples = []
    for name in options.text:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValueError("--text", name, f"a text file ({error})") from error
        ids = tokenizer.encode(text)
        pieces = range(0, len(ids), options.sequence_length)
        samples += [Sample([], ids[start : start + options.sequence_length], 1.0) for start in pieces]
    data.mkdir(parents=True, exist_ok=True)
    origin = Origin("text", tokenizer.vocab_size, fingerprint(tokenizer))
    write_shard(data / "text.safetensors", ShardHeader(origin), samples)


def split(corpus: Corpus, held_out_samples: int, seed: int) -> tuple[Corpus, Corpus]:
    """A training part and `held_out_samples` others. Unlike `Corpus.split`, equal prompts (none) are fine."""
    if not 0 < held_out_samples < corpus.num_samples:
        legal = f"1 to {corpus.num_samples - 1}, for {corpus.num_samples} samples of text"
        raise InvalidValueError("--held-out-samples", held_out_samples, legal)
    order = np.random.default_rng([seed, 7]).permutation(corpus.num_samples)
    return corpus.select(np.sort(order[held_out_samples:])), corpus.select(np.sort(order[:held_out_samples]))


def initial_joint(config: ModelConfig, seed: int) -> Joint:
    """Random fp32 weights; matrices that add to the residual stream are smaller in deep targets."""
    rng = np.random.default_rng(seed)
    depth = np.float32((2 * config.num_hidden_layers) ** -0.5)

    def stack(leaf: Leaf, count: int) -> jnp.ndarray:
        values = np.stack([random_leaf(leaf, rng) for _ in range(count)])
        return jnp.asarray(
            values * (depth if leaf.path[-1] in ("o", "down", "shared_down") else np.float32(1))
        )

    layers = tuple(
        {leaf.name: stack(leaf, len(run)) for leaf in layer_leaves(config, kind)}
        for kind, run in layer_runs(config)
    )

    def table() -> jnp.ndarray:
        values = rng.standard_normal((config.vocab_size, config.hidden_size), dtype=np.float32)
        return jnp.asarray(values * np.float32(_ROW_SCALE))

    target = Target(
        layers=layers,
        embedding=table(),
        lm_head=None if config.tie_word_embeddings else table(),
        final_norm=jnp.ones((config.hidden_size,), jnp.float32),
    )
    return Joint(target, random_params(config, rng))


def export_model(folder: Path, origin: Path, config: ModelConfig, params: Joint, dtype: jnp.dtype) -> None:
    """A Hugging Face directory: configuration, weights with the MTP module's, a tokenizer if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    target = params.target
    tensors = {EMBEDDING: np.asarray(target.embedding)}
    tensors |= final_norm_leaf(config).tensors(np.asarray(target.final_norm), "")
    if target.lm_head is not None:
        tensors[LM_HEAD] = np.asarray(target.lm_head)
    for (kind, layers), stacked in zip(layer_runs(config), target.layers, strict=True):
        host = {name: np.asarray(leaf) for name, leaf in stacked.items()}
        for row, layer in enumerate(layers):
            arrays = {name: leaf[row] for name, leaf in host.items()}
            tensors |= tensors_of(layer_leaves(config, kind), arrays, layer_prefix(layer))
    tensors |= mtp_tensors(config, params.mtp)
    stored = np.dtype(np.float32) if dtype == jnp.float32 else np.dtype(ml_dtypes.bfloat16)
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"}, stored)
    values = dict(read_json(origin / "config.json")) | {
        mtp_count_field(config.model_type): 1,
        "torch_dtype": str(stored),
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
