"""The text of a run: where it lies, and having the target write it."""

import collections
import gc
import itertools
import json
import sys
from pathlib import Path

import jax

from mtp_jax.config import EngineConfig
from mtp_jax.engine.build import EngineFieldValue, EngineOptions, build_engine
from mtp_jax.loading import resolve_model
from mtp_jax.progress import PhaseBars
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.corpus import shard_paths
from mtp_jax.train.generate import GenerateOptions, generate_corpus
from mtp_jax.train.prompts import read_prompts

_CPU_SEQS, _ACCELERATOR_SEQS = 16, 256


def data_folder(options: TrainOptions) -> Path:
    """`--data`, or `data` in the run's folder."""
    return Path(options.data) if options.data else Path(options.out) / "data"


def needs_text(options: TrainOptions) -> bool:
    """Whether text is still to be written: where there is none, or where its writing did not end.

    A folder given by `--data` that holds text is taken as it is.
    """
    if options.generate_only:
        return True
    folder = data_folder(options)
    return not shard_paths(folder) or (options.data is None and not _all_ended(folder))


def write_text(options: TrainOptions) -> None:
    """Builds an engine without drafts and has it write the text; goes on with text that is there.

    Raises:
      InvalidValueError: an option, a prompt file or a shard that cannot work, with its name.
    """
    conversations = [read_prompts(path) for path in options.prompts]
    held_out = [read_prompts(path, "--held-out-prompts") for path in options.held_out_prompts]
    generate = GenerateOptions(
        num_tokens=options.tokens,
        seconds=options.time_limit if options.generate_only else None,
        seed=options.seed,
        shard=options.shard,
        temperatures=options.temperatures,
        max_tokens=options.max_tokens,
        own_prompts=options.own_prompts,
        conversations=tuple(itertools.chain.from_iterable(conversations)),
        held_out=tuple(itertools.chain.from_iterable(held_out)),
    )
    source = resolve_model(options.model)
    seqs = _CPU_SEQS if jax.default_backend() == "cpu" else _ACCELERATOR_SEQS
    rows = options.max_num_seqs or seqs
    # A sample that is longer than a row would be cut.
    context = min(options.sequence_length, source.config.max_position_embeddings)
    page = EngineConfig.page_size
    overrides: dict[str, EngineFieldValue] = {
        "num_speculative_tokens": 0,
        "max_num_seqs": rows,
        "max_model_len": context,
        # Slots are always full and somebody always waits: one size of everything, little to compile.
        "min_rows": rows,
        "min_table_tokens": context,
        "max_rounds": 1,
        "prefill_chunk": 64,
        # Room for all slots and for the prompts that they share; several processes may share a device.
        "num_pages": (rows + 8) * -(-context // page),
    }
    bars = PhaseBars()
    engine = build_engine(EngineOptions(options.model, dtype=options.dtype, overrides=overrides), bars)
    bars.close()
    folder = data_folder(options)
    try:
        counts = generate_corpus(engine, folder, generate)
    finally:
        engine.close()
    del engine
    gc.collect()  # weights and caches may be in cycles with the engine; training wants their memory
    print(counts.describe(), file=sys.stderr)
    _ended(folder, options).write_text(
        json.dumps({"samples": counts.samples, "tokens": counts.tokens}) + "\n"
    )


def _ended(folder: Path, options: TrainOptions) -> Path:
    """The file that says that this process's part is written to the end."""
    index, count = options.shard
    return folder / f"written-{index}of{count}-seed{options.seed}.json"


def _all_ended(folder: Path) -> bool:
    """Whether all parts of the text are written to the end, in however many it was cut."""
    parts = collections.Counter(path.stem.partition("of")[2] for path in folder.glob("written-*of*.json"))
    return any(found == int(cut.partition("-")[0]) for cut, found in parts.items())
