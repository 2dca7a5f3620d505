"""The text of a run: where it lies, and having the target write it."""

import gc
import itertools
import json
import re
import sys
from pathlib import Path

import jax

from mtp_jax.config import EngineConfig
from mtp_jax.engine.build import build_engine
from mtp_jax.engine.options import EngineFieldValue, EngineOptions
from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import resolve_model
from mtp_jax.progress import PhaseBars
from mtp_jax.train.arguments import TrainOptions
from mtp_jax.train.corpus import shard_paths
from mtp_jax.train.files import writable_folder, write_whole
from mtp_jax.train.generate import GenerateOptions, generate_corpus, part_name
from mtp_jax.train.prompts import read_prompts

_PART = re.compile(r"(\d+)of(\d+)-seed(\d+)")  # of `part_name`
_CPU_SEQS, _ACCELERATOR_SEQS = 16, 256


def data_folder(options: TrainOptions) -> Path:
    """`--data`, or `data` in the run's folder."""
    return Path(options.data) if options.data else Path(options.out) / "data"


def needs_text(options: TrainOptions) -> bool:
    """Whether text is still to be written: where there is none, or where this command did not end its part.

    Shards of other names than a part's are taken as they are.

    Raises:
      InvalidValueError: parts of the text that other commands write are not ended; names the first.
    """
    folder = data_folder(options)
    if options.generate_only or not shard_paths(folder):
        return True
    missing, own = _missing_parts(folder), (*options.shard, options.seed)
    for index, count, seed in missing:
        if (index, count, seed) != own:
            legal = (
                f"text whose writing has ended; {part_name((index, count), seed)} has not: "
                f"write it with --generate-only --shard {index}/{count} --seed {seed}"
            )
            raise InvalidValueError("--data", str(folder), legal)
    return bool(missing)


def write_text(options: TrainOptions) -> None:
    """Builds an engine without drafts and has it write the text; goes on with text that is there.

    Raises:
      InvalidValueError: an option, a prompt file or a shard that cannot work, with its name.
    """
    folder = writable_folder(data_folder(options), "--out" if options.data is None else "--data")
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
    try:
        counts = generate_corpus(engine, folder, generate)
    finally:
        engine.close()
    del engine
    gc.collect()  # weights and caches may be in cycles with the engine; training wants their memory
    print(counts.describe(), file=sys.stderr)
    summary = {"samples": counts.samples, "tokens": counts.tokens}
    write_whole(_ended(folder, options.shard, options.seed), json.dumps(summary) + "\n")


def _ended(folder: Path, shard: tuple[int, int], seed: int) -> Path:
    """The file that says that a part is written to the end."""
    return folder / f"written-{part_name(shard, seed)}.json"


def _missing_parts(folder: Path) -> list[tuple[int, int, int]]:
    """Index, count and seed of all parts that are not written to the end, of cuts that have a shard."""
    found = [_PART.match(path.name) for path in shard_paths(folder)]
    cuts = sorted({(int(match[2]), int(match[3])) for match in found if match})
    parts = ((index, count, seed) for count, seed in cuts for index in range(count))
    return [part for part in parts if not _ended(folder, part[:2], part[2]).is_file()]
