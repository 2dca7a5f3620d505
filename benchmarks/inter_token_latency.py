"""What long prompts cost those who are being answered: inter-token latency while they are read, and before.

    python benchmarks/inter_token_latency.py --k 0 --streams 8 --prompts 4 --prompt-tokens 8000
    python benchmarks/inter_token_latency.py --stages 2 --prompt-tokens 2000 --set prefill_chunk=32

Three phases in one engine: `steady`, streams alone; `beside prompts`, the same streams while prompts of
random tokens are read; `prompts alone`, as many other prompts with nobody beside them. A latency is the time
from one increment of a stream to its next, seen where the engine is stepped; a dispatch is one round
(max_rounds=1), as it is in any case where a prompt is read. A chunk's stage time is a tick of the last phase:
a tick has a chunk in every stage. The promise: beside prompts, the 99th percentile is at most twice the
steady median and a chunk's stage time.

Everything runs once before it is timed, so that nothing is compiled in between.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.settings import setting
from mtp_jax.bench.circumstances import circumstances, load_average
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import InvalidValueError
from mtp_jax.llm import LLM
from mtp_jax.request import EngineRequest, SamplingParams

MOST_TOKENS = 4000  # of a stream; it is aborted long before


@dataclasses.dataclass(frozen=True)
class Phases:
    """Latencies in seconds, in the order in which they were seen, and ticks of the prompts alone."""

    steady: list[float]
    beside: list[float]
    prompt_seconds: float
    prompt_ticks: int
    useful_share: float  # of stage-ticks, while prompts are read beside streams

    @property
    def chunk(self) -> float:
        return self.prompt_seconds / self.prompt_ticks

    @property
    def bound(self) -> float:
        return 2 * float(np.median(self.steady)) + self.chunk


class Load:
    """Streams and prompts of random tokens in one engine."""

    def __init__(self, engine: Engine, seed: int):
        self._engine, self._rng, self._count = engine, np.random.default_rng(seed), 0
        self._last: dict[str, float] = {}  # when a stream's last increment came
        self._prompts: set[str] = set()  # not read to their ends

    def add(self, num_prompt_tokens: int, *, is_stream: bool) -> None:
        name = f"{'stream' if is_stream else 'prompt'} {self._count}"
        ids = self._rng.integers(3, self._engine.model_config.vocab_size, num_prompt_tokens)
        room = self._engine.config.max_model_len - num_prompt_tokens
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=min(MOST_TOKENS, room) if is_stream else 1
        )
        self._engine.add_request(EngineRequest(name, tuple(ids.tolist()), params))
        self._count += 1
        if is_stream:
            self._last[name] = 0.0
        else:
            self._prompts.add(name)

    def run(self, goes_on: Callable[[], bool]) -> list[float]:
        """Steps the engine; the latencies that streams saw."""
        seen = []
        while goes_on():
            outputs, now = self._engine.step(), time.perf_counter()
            for output in outputs:
                name = output.request_id
                if output.finish_reason is not None:
                    self._prompts.discard(name)
                    assert name not in self._last, "a stream came to its end: fewer prompts, or shorter ones"
                elif output.token_ids and name in self._last:
                    if self._last[name]:
                        seen.append(now - self._last[name])
                    self._last[name] = now
        return seen

    @property
    def has_prompts(self) -> bool:
        return bool(self._prompts)

    def all_began(self) -> bool:
        return all(self._last.values())

    def end_streams(self) -> None:
        for name in self._last:
            self._engine.abort(name)
        self._last.clear()
        while self._engine.has_work():
            self._engine.step()


def measure(engine: Engine, args: argparse.Namespace, seed: int) -> Phases:
    """All three phases."""
    load = Load(engine, seed)

    def add_prompts() -> None:
        for _ in range(args.prompts):
            load.add(args.prompt_tokens, is_stream=False)

    for _ in range(args.streams):
        load.add(args.stream_prompt, is_stream=True)
    load.run(lambda: not load.all_began())
    left = iter(range(args.steady_steps))
    steady = load.run(lambda: next(left, None) is not None)
    before = engine.stats()
    add_prompts()
    beside = load.run(lambda: load.has_prompts)
    after = engine.stats()
    load.end_streams()
    add_prompts()
    began, first = time.perf_counter(), engine.stats().ticks
    load.run(lambda: load.has_prompts)
    seconds, stages = time.perf_counter() - began, engine.config.stages
    return Phases(
        steady=steady,
        beside=beside,
        prompt_seconds=seconds,
        prompt_ticks=(engine.stats().ticks - first) // (stages * engine.config.data),
        useful_share=(after.useful_ticks - before.useful_ticks) / (after.ticks - before.ticks),
    )


def table(phases: Phases) -> str:
    """The phases as a Markdown table, and what they say of the promise."""
    lines = ["| latency, ms | p50 | p90 | p99 | most | increments |", "|---" * 6 + "|"]
    for name, seen in (("steady", phases.steady), ("beside prompts", phases.beside)):
        figures = np.percentile(np.array(seen) * 1e3, (50, 90, 99, 100))
        lines.append(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + f" | {len(seen)} |")
    tail = float(np.percentile(phases.beside, 99))
    lines += [
        "",
        f"prompts alone: {phases.prompt_seconds:.1f} s, {phases.prompt_ticks} ticks, "
        f"a chunk's stage time {phases.chunk * 1e3:.1f} ms",
        f"useful stage-ticks beside prompts: {phases.useful_share:.1%}",
        f"p99 beside prompts / (2 x steady p50 + a chunk's stage time) = {tail / phases.bound:.2f}",
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="directory, GGUF file or `default`")
    parser.add_argument("--k", type=int, default=0, help="drafts a round; 0 is plain decoding")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8, help="requests that are answered all the time")
    parser.add_argument("--stream-prompt", type=int, default=32, help="tokens")
    parser.add_argument("--steady-steps", type=int, default=100, help="dispatches of the first phase")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=8000, help="of a prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile-cache", help="folder for compiled programs, or `off`")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE",
                        help="any other field of EngineConfig, such as prefill_chunk=64")  # fmt: skip
    args = parser.parse_args(argv)
    args.set = [("max_rounds", 1), *args.set]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        with LLM(
            None if args.model == "default" else args.model,
            stages=args.stages,
            num_speculative_tokens=args.k,
            dtype=args.dtype,
            compile_cache=args.compile_cache,
            enable_prefix_caching=False,
            **dict(args.set),
        ) as llm:
            measure(llm.engine, args, seed=0)
            phases = measure(llm.engine, args, seed=1)
    except InvalidValueError as error:
        print(error, file=sys.stderr)
        return 2
    kind = jax.devices()[0].device_kind
    described = circumstances(f"{jax.device_count()} x {kind} ({jax.default_backend()})")
    print(*described, load_average(), "", table(phases), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
