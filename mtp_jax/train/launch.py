"""From options to a trained head: text, target, module, run, export, report."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtp_jax import __version__
from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import WeightSource, default_model_path, resolve_model
from mtp_jax.loading.fingerprint import target_fingerprint
from mtp_jax.progress import PhaseBars
from mtp_jax.server.arguments import flag_of
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.attention import best_implementation
from mtp_jax.train.corpus import Corpus, fingerprint
from mtp_jax.train.curves import draw_curves, read_curves
from mtp_jax.train.distill import Distillation, Frozen
from mtp_jax.train.export import HeadInfo, export_head
from mtp_jax.train.files import writable_folder, write_whole
from mtp_jax.train.initial import draft_vocabulary, initial_params
from mtp_jax.train.optimizer import Schedule
from mtp_jax.train.packing import Packer
from mtp_jax.train.step import replicated
from mtp_jax.train.text import data_folder
from mtp_jax.train.trainer import Outcome, Run, RunPlan, arrays_of
from mtp_jax.train.trunk import Packed, Target, check_trainable, read_target
from mtp_jax.train.unroll import Params
from sharding.mesh import make_mesh

HEAD_FILE, REPORT_FILE, RUN_FILE = "mtp_head.safetensors", "report.json", "run.json"
# A run that goes on may change these; the others would bend its curve.
_FREE = (
    "data",
    "time_limit",
    "devices",
    "checkpoint_every",
    "generate_only",
    "shard",
    "tokens",
    "prompts",
    "held_out_prompts",
    "max_num_seqs",
    "temperatures",
    "own_prompts",
    "max_tokens",
    "out",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run needs besides its flags."""

    options: TrainOptions
    folder: Path
    mesh: Mesh
    dtype: jnp.dtype
    plan: RunPlan
    train: Packer
    held_out: Packer


def train_head(options: TrainOptions) -> Outcome:
    """Trains and exports a head for a frozen target.

    Raises:
      InvalidValueError: an option or a file that cannot work, with its name.
    """
    source = resolve_model(options.model)
    check_trainable(source.config)
    corpus = Corpus.open(data_folder(options))
    check_text(corpus, source)
    train, held_out = corpus.split(options.held_out_samples, options.seed)
    setting = make_setting(options, train, held_out)
    remember(setting.folder, options)
    draft_ids = draft_vocabulary(train.token_counts(source.config.vocab_size), options.draft_vocab_size)
    bars = PhaseBars()
    target = read_target(
        source.config,
        source.read,
        setting.dtype,
        lambda done, total: bars("reading", done, total),
        source.names(),
    )
    frozen = jax.device_put(_frozen(target, draft_ids), replicated(setting.mesh))
    params = initial_params(
        source.config, frozen.target, options.init, options.seed, first_row(setting.train)
    )
    implementation = best_implementation(setting.dtype, source.config.head_dim)
    loss = Distillation(
        source.config,
        options.weights_of_steps(),
        implementation,
        label_weight=options.label_weight,
        greedy_weight=options.greedy_weight,
    )
    outcome = Run(setting.folder, setting.plan, setting.mesh, loss, frozen)(
        params, setting.train, setting.held_out
    )
    _export(setting, source, draft_ids, outcome)
    report = {
        "target": _name(options, source),
        "corpus": {
            "train_samples": train.num_samples,
            "train_tokens": train.num_tokens,
            "held_out_samples": held_out.num_samples,
            "draft_vocabulary_share": _share(held_out, draft_ids, source.config.vocab_size),
        },
        "attention": implementation,
    }
    finish(setting, outcome, report)
    return outcome


def check_text(corpus: Corpus, source: WeightSource) -> None:
    """Raises InvalidValueError where the text's token ids are not those of the target."""
    vocab_size = source.config.vocab_size
    if corpus.origin.vocab_size > vocab_size:
        legal = f"text of this target, with token ids below {vocab_size}"
        raise InvalidValueError("--data", f"a vocabulary of {corpus.origin.vocab_size}", legal)
    tokenizer = fingerprint(source.tokenizer())
    if corpus.origin.tokenizer != tokenizer:
        got = f"text by {corpus.origin.target} with the tokenizer {corpus.origin.tokenizer}"
        raise InvalidValueError("--data", got, f"text with this target's tokenizer, {tokenizer}")


def make_setting(options: TrainOptions, train: Corpus, held_out: Corpus) -> Setting:
    """Mesh, packing and length of a run.

    Raises:
      InvalidValueError: rows that do not divide over the devices; --devices beyond those there are.
    """
    num_devices = options.devices or len(jax.devices())
    try:
        mesh = make_mesh(1, data=num_devices)
    except ValueError as error:
        raise InvalidValueError("--devices", num_devices, str(error)) from error
    part = options.micro_batch_tokens or options.batch_tokens
    if part // options.sequence_length % num_devices:
        flag = "--batch-tokens" if options.micro_batch_tokens is None else "--micro-batch-tokens"
        legal = f"a multiple of {options.sequence_length} x {num_devices} devices (see --devices)"
        raise InvalidValueError(flag, part, legal)
    rows = options.batch_tokens // options.sequence_length
    sizes = (rows, options.sequence_length, options.seed)
    packers = [Packer(train, *sizes), Packer(held_out, *sizes, whole=True)]
    steps = options.steps or max(1, round(options.epochs * packers[0].steps_per_epoch))
    schedule = Schedule(
        steps=steps,
        peak=options.learning_rate,
        warmup=options.warmup_steps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        optimizer=options.optimizer,
        muon_peak=options.muon_learning_rate,
        ema=options.ema,
    )
    plan = RunPlan(
        schedule=schedule,
        micro_batches=options.batch_tokens // part,
        evaluate_every=options.evaluate_every,
        evaluate_batches=packers[1].steps_per_epoch,
        checkpoint_every=options.checkpoint_every,
        time_limit=options.time_limit,
    )
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return Setting(options, Path(options.out), mesh, jnp.dtype(dtype), plan, *packers)


def first_row(packer: Packer) -> Packed:
    """One row of the text, [1, S]."""
    batch = packer.batch(0)
    return Packed(*(jnp.asarray(array[:1]) for array in arrays_of(batch)))


def remember(folder: Path, options: TrainOptions) -> None:
    """Writes the options into the folder, or compares them with those of the run that is there.

    Raises:
      InvalidValueError: the folder holds a run with other options (names the flag), cannot be written,
        or its record of the options is broken.
    """
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE}
    values = json.loads(json.dumps(values))
    path = folder / RUN_FILE
    if path.is_file():
        before = _read_options(path)
        for name, value in values.items():
            if before.get(name) != value:
                legal = f"{before.get(name)!r}, as the run in {folder} has it, or another --out"
                raise InvalidValueError(flag_of(name), value, legal)
        return
    writable_folder(folder, "--out")
    write_whole(path, json.dumps(values, indent=2) + "\n")


def _read_options(path: Path) -> dict[str, object]:
    legal = "the options of a run as JSON, or another --out"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidValueError(str(path), str(error), legal) from error
    if not isinstance(values, dict):
        raise InvalidValueError(str(path), values, legal)
    return values


def finish(setting: Setting, outcome: Outcome, report: dict[str, object]) -> None:
    """Writes the picture of the curves and the report; a rerun that had nothing to do leaves the report."""
    folder, device = setting.folder, setting.mesh.devices.flat[0]
    draw_curves(read_curves(folder / "curves.jsonl"), folder / "curves.png")
    if outcome.updates == 0 and _steps_reported(folder / REPORT_FILE) == outcome.steps:
        return
    report = {
        "options": dataclasses.asdict(setting.options),
        **report,
        "steps": outcome.steps,
        "held_out": outcome.held_out,
        "seconds": round(outcome.seconds, 1),
        "tokens_per_second": round(outcome.tokens_per_second),
        "devices": f"{setting.mesh.devices.size} x {device.device_kind}",
        "dtype": str(setting.dtype),
        "versions": {"mtp_jax": __version__, "jax": jax.__version__},
    }
    write_whole(folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")


def _steps_reported(path: Path) -> object:
    """Updates of the run that a report is of; None where there is no whole report."""
    try:
        return json.loads(path.read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _frozen(target: Target, draft_ids: np.ndarray | None) -> Frozen:
    if draft_ids is None:
        return Frozen(target, None, None)
    rows = np.asarray(target.head)[draft_ids]
    return Frozen(target, rows, draft_ids)  # type: ignore[arg-type]


def _share(corpus: Corpus, draft_ids: np.ndarray | None, vocab_size: int) -> float:
    """Share of the held-out text that the draft vocabulary can say."""
    counts = corpus.token_counts(vocab_size)
    return 1.0 if draft_ids is None else round(float(counts[draft_ids].sum() / counts.sum()), 5)


def _export(setting: Setting, source: WeightSource, draft_ids: np.ndarray | None, outcome: Outcome) -> None:
    greedy = bool(outcome.held_out["greedy_lines"])
    accepted = outcome.held_out["accepted_greedy" if greedy else "accepted"]
    assert isinstance(accepted, list)
    info = HeadInfo(
        target=_name(setting.options, source),
        target_fingerprint=target_fingerprint(source),
        steps=outcome.steps,
        accepted=tuple(accepted),
        accepted_of="greedy text" if greedy else "sampled text",
    )
    path = setting.folder / HEAD_FILE
    export_head(path, source.config, cast(Params, outcome.state.best), draft_ids, info)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


def _name(options: TrainOptions, source: WeightSource) -> str:
    path = default_model_path() if options.model is None else Path(options.model).resolve()
    return path.stem if path.suffix == ".gguf" else path.name
