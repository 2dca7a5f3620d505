"""Greedy decoding of the real engine, driven as the server drives it: tokens/s by drafts and batch size.

    python benchmarks/decode.py --model DIR --k 0,1,3 --batch 1,8,64 --prompt 32 --new 256 --json OUT.jsonl
    python benchmarks/decode.py --model default --k 0 --batch 1 --max-rounds 1,4,8

--model is a directory (see random_checkpoint.py), a GGUF file, or `default`. Prompts are random token ids,
all different; requests ignore end-of-sequence tokens. For each K and --max-rounds one engine is built. Each
batch size runs until a run needs no compiler, which warms up, then --repeat times; the fastest is shown.

Columns: `decode tok/s` is from the moment when all requests have their first token to the last step before
the first of them finishes; `ms/round` and `rounds/dispatch` are of the same time. `whole tok/s` is from the
first request's arrival to the last one's end. `accepted` is tokens a round and request, bonus token included;
`host ms` the host's work around one dispatch, waiting for the device excluded; `compile s` what this batch
size added (the first one includes what the engine compiles at its start). `floor` is the share of a round
that one read of its weights takes at --bandwidth (the MTP module and its head once a draft; dense models).
With --profile, `busy` is the share of the middle of one more run in which the GPU ran something.
"""

import argparse
import dataclasses
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.device_profile import busy_us, profile
from benchmarks.settings import setting
from mtp_jax.bench.circumstances import circumstances, load_average
from mtp_jax.engine.build import Blueprint, construct, draw_blueprint
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.prepare import CACHE_OFF, prepare_jax
from mtp_jax.engine.stats import EngineStats
from mtp_jax.errors import InvalidValueError
from mtp_jax.request import EngineRequest, SamplingParams
from pallas_kernels.decode_attention import api as decode_attention
from pallas_kernels.few_rows import api as few_rows

EVERY_RUN = ("decode_tokens_per_s", "whole_s")  # recorded for every run, not only the fastest
MAX_WARMUPS = 4  # runs without a single new executable must come before that
COLUMNS = (
    ("K", "k", "d"),
    ("R max", "max_rounds", "d"),
    ("batch", "batch", "d"),
    ("decode tok/s", "decode_tokens_per_s", ".1f"),
    ("ms/round", "ms_per_round", ".3f"),
    ("accepted", "acceptance_length", ".3f"),
    ("host ms", "host_ms_per_dispatch", ".3f"),
    ("rounds/dispatch", "rounds_per_dispatch", ".2f"),
    ("floor", "share_of_floor", ".0%"),
    ("busy", "device_busy", ".1%"),
    ("whole tok/s", "whole_tokens_per_s", ".1f"),
    ("compile s", "compile_s", ".1f"),
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every batch size runs."""

    prompt: int  # tokens
    new: int  # tokens
    repeat: int
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """The engine after a step."""

    time: float  # seconds
    tokens: int  # delivered in this run so far
    rounds: int
    dispatches: int


@dataclasses.dataclass(frozen=True)
class Run:
    """One batch, from its arrival to its end."""

    batch: int
    start: Moment
    all_decode: Moment  # every request has its first token
    before_finish: Moment  # the last step before the first request finished
    end: Moment
    acceptance_length: float
    host_seconds: float  # of all dispatches

    def figures(self) -> dict[str, float | None]:
        """What the table shows; None where the requests were too short for a time with all decoding."""
        whole, window = self.end.time - self.start.time, self.before_finish.time - self.all_decode.time
        rounds = self.before_finish.rounds - self.all_decode.rounds
        dispatches = self.before_finish.dispatches - self.all_decode.dispatches
        tokens = self.before_finish.tokens - self.all_decode.tokens
        some = rounds > 0
        return {
            "decode_tokens_per_s": tokens / window if some else None,
            "ms_per_round": 1e3 * window / rounds if some else None,
            "rounds_per_dispatch": rounds / dispatches if some else None,
            "tokens_per_round_and_request": tokens / rounds / self.batch if some else None,
            "acceptance_length": self.acceptance_length,
            "host_ms_per_dispatch": 1e3 * self.host_seconds / (self.end.dispatches - self.start.dispatches),
            "whole_tokens_per_s": self.end.tokens / whole,
            "whole_s": whole,
            "first_tokens_s": self.all_decode.time - self.start.time,
        }


class Driver:
    """Runs batches on one engine. The server's loop is the same: step, then stats."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._runs = self._dispatches = 0
        _compile_exactly(engine)

    @property
    def num_compiled(self) -> int:
        return len(self._engine.executables.compile_seconds)

    @property
    def compile_seconds(self) -> float:
        return sum(self._engine.executables.compile_seconds.values())

    def run(self, batch: int, work: Workload) -> Run:
        """Decodes `batch` requests at once, each with a prompt that the engine has not seen."""
        engine, begun, moments = self._engine, set(), []
        requests, before, finished = self._requests(batch, work), engine.stats(), False
        start, after = self._moment(before, 0), before
        last = start
        for request in requests:
            engine.add_request(request)
        while engine.has_work():
            outputs, known = engine.step(), after.ticks
            after = engine.stats()
            self._dispatches += after.ticks > known  # a dispatch was read; none has less than one tick
            last = self._moment(after, last.tokens + sum(len(output.token_ids) for output in outputs))
            begun.update(output.request_id for output in outputs)
            finished = finished or any(output.finish_reason is not None for output in outputs)
            if len(begun) == batch and not (finished and moments):
                moments.append(last)
        assert last.tokens == batch * work.new, "a request that ignores end-of-sequence runs to its length"
        if after.num_preemptions > before.num_preemptions:
            raise InvalidValueError("--batch", batch, "as many requests as the KV cache holds to their end")
        drafts = after.num_drafts - before.num_drafts
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        host = after.host_seconds_per_dispatch * last.dispatches
        host -= before.host_seconds_per_dispatch * start.dispatches
        length = 1 + accepted / drafts if drafts else 1.0
        return Run(batch, start, moments[0], moments[-1], last, length, host)

    def _requests(self, batch: int, work: Workload) -> list[EngineRequest]:
        self._runs += 1
        rng = random.Random(f"{work.seed} {self._runs} {batch}")
        vocab = self._engine.model_config.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=work.new, ignore_eos=True)
        return [
            EngineRequest(f"{self._runs}-{index}", tuple(rng.choices(range(vocab), k=work.prompt)), params)
            for index in range(batch)
        ]

    def _moment(self, stats: EngineStats, tokens: int) -> Moment:
        # Ticks are counted a stage, and a round of the ring is as many ticks as there are stages.
        rounds = stats.ticks // self._engine.config.stages**2
        return Moment(time.perf_counter(), tokens, rounds, self._dispatches)


def _compile_exactly(engine: Engine) -> None:
    """Makes the engine compile each bucket when it first asks for it.

    A server compiles them all in the background, and runs larger ones until then. Here only those that
    the runs need are compiled, and the runs measure what a server is after some minutes.
    """
    executables = engine.executables
    executables.find = lambda bucket: (bucket, executables.compile(bucket))  # type: ignore[method-assign]


def measure(driver: Driver, batch: int, work: Workload) -> list[Run]:
    """Warms up until a run compiles nothing, then the timed runs, fastest first."""
    for _ in range(MAX_WARMUPS):
        known = driver.num_compiled
        driver.run(batch, work)
        if driver.num_compiled == known:
            break
    runs = []
    while len(runs) < work.repeat:
        known = driver.num_compiled
        run = driver.run(batch, work)
        if driver.num_compiled == known:  # else a draft's luck led into a bucket that was new
            runs.append(run)
    return sorted(runs, key=lambda run: run.end.time - run.start.time)


def round_bytes(blueprint: Blueprint, k: int) -> int | None:
    """Weights that a round reads; None for models with experts, where it depends on their choice."""
    if blueprint.model.experts is not None:
        return None
    parts = blueprint.memory.parts
    head = parts.embedding  # an LM head of its own is as large
    ids = blueprint.program.layout.draft_vocab or blueprint.model.vocab_size
    return parts.trunk + head + k * (parts.mtp + head * ids // blueprint.model.vocab_size)


def device_busy(driver: Driver, batch: int, work: Workload) -> float | None:
    """Share of the middle half of a run in which the GPU ran something; None where it tells nothing."""
    kernels = profile(lambda: driver.run(batch, work))
    if not kernels:
        return None
    begin, end = (kernels[len(kernels) * quarter // 4].start_us for quarter in (1, 3))
    return busy_us(kernels, begin, end) / (end - begin)


def table(rows: Sequence[dict]) -> str:
    """The results as one Markdown table."""
    lines = ["| " + " | ".join(title for title, _, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = ("–" if row[key] is None else format(row[key], form) for _, key, form in COLUMNS)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def engine_options(args: argparse.Namespace, k: int, max_rounds: int | None) -> EngineOptions:
    """Options of the engine for one K and one number of rounds; what is left out is the engine's choice."""
    overrides: dict[str, int | str | bool] = {
        "stages": args.stages,
        "num_speculative_tokens": k,
        "max_num_seqs": max(args.batch),
        "max_model_len": args.max_model_len,
    }
    if max_rounds is not None:
        overrides["max_rounds"] = max_rounds
    return EngineOptions(
        model=None if args.model == "default" else args.model,
        dtype=args.dtype,
        background_compile=False,
        overrides=overrides | dict(args.set),
    )


def benchmark(args: argparse.Namespace, k: int, max_rounds: int | None) -> list[dict]:
    """All batch sizes on one engine."""
    blueprint = draw_blueprint(engine_options(args, k, max_rounds))
    print(*(f"# {line}" for line in blueprint.describe().splitlines()), sep="\n", flush=True)
    began = time.perf_counter()
    engine = construct(blueprint)
    print(f"# engine built in {time.perf_counter() - began:.1f} s, {load_average()}", flush=True)
    driver, compiled, rows = Driver(engine), 0.0, []
    work = Workload(args.prompt, args.new, args.repeat, args.seed)
    for batch in args.batch:
        runs = measure(driver, batch, work)
        row = {"model": blueprint.model_name, "k": k, "max_rounds": engine.config.max_rounds, "batch": batch}
        row |= {"stages": args.stages, "dtype": engine.config.dtype, "prompt": args.prompt, "new": args.new}
        row["xla_layers"] = args.xla_layers
        row |= runs[0].figures() | {"compile_s": driver.compile_seconds - compiled}
        floor, ms = round_bytes(blueprint, k), row["ms_per_round"]
        row["share_of_floor"] = floor / args.bandwidth / 1e9 / ms if floor and ms else None
        row["device_busy"] = device_busy(driver, batch, work) if args.profile else None
        figures = [run.figures() for run in runs]
        row |= {f"{name}_of_all_runs": [each[name] for each in figures] for name in EVERY_RUN}
        row["circumstances"] = [*described_machine(), load_average()]
        compiled = driver.compile_seconds
        rows.append(row)
        rate = row["decode_tokens_per_s"]
        shown = "" if rate is None else f"{rate:.1f} tokens/s decoding, "
        print(
            f"# K={k} batch {batch}: {shown}{row['whole_tokens_per_s']:.1f} whole, {load_average()}",
            flush=True,
        )
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    engine.close()
    return rows


def described_machine() -> list[str]:
    """Command, date, machine, versions and devices."""
    kind = jax.devices()[0].device_kind
    return circumstances(f"{jax.device_count()} x {kind} ({jax.default_backend()})")


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="directory, GGUF file or `default`")
    parser.add_argument("--k", type=_integers, default=[0, 1, 3], help="drafts a round; 0 is plain decoding")
    parser.add_argument("--batch", type=_integers, default=[1, 8, 64], help="requests at a time")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--max-rounds", type=_integers, default=[None], help="default: the engine's choice")
    parser.add_argument(
        "--max-model-len", type=int, default=1024, help="context that the engine is built for"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE",
                        help="any other field of EngineConfig, such as page_size=32")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=3, help="timed runs; the fastest is shown")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--xla-layers", action="store_true", help="decode without pallas_kernels/few_rows"
                        " and decode_attention: what they bring")  # fmt: skip
    parser.add_argument("--compile-cache", default=CACHE_OFF, help="folder for compiled programs")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the device, for `floor`")
    parser.add_argument("--profile", action="store_true", help="find how busy the GPU is, in one more run")
    parser.add_argument("--json", type=Path, help="file to append one line a result to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_jax(args.stages, args.compile_cache)
    if args.xla_layers:
        few_rows.on_hopper = decode_attention.on_hopper = lambda: False
    print(*described_machine(), "", sep="\n", flush=True)
    rows, refused = [], []
    for max_rounds in args.max_rounds:
        for k in args.k:
            try:
                rows += benchmark(args, k, max_rounds)
            except InvalidValueError as error:  # such as drafts for a model without an MTP module
                refused.append(f"K = {k}: {error}")
            gc.collect()  # an engine's memory must be free before the next one plans its own
    print("", table(rows), *refused, sep="\n")
    return 1 if refused and not rows else 0


if __name__ == "__main__":
    sys.exit(main())
