"""How many drafts stand, on prompts that no head was trained on, and how much the text repeats itself.

    python benchmarks/acceptance.py --mtp-head HEAD --k 3 --temperature 0,1 --max-tokens 128 --json OUT.jsonl
    python benchmarks/acceptance.py --model DIR --k 0        # only the text: no head needed

All prompts run at once, as many as there are slots (--set max_num_seqs=N). One engine is built for each K,
and each temperature is one row of the table. Seeds are fixed, so a row can be made again.

Columns: `p1`, `p2`, ... share of the rounds in which the draft at this position stood, and so all before it;
`p2|1` share of those rounds among the ones where the draft before it stood. `length` is the mean accepted
length: tokens a round, the target's own included. `tok/s` is of the whole run, with prompts, and with
compiling where programs are not cached: --warm-up runs everything once before. `distinct` is the share of
distinct 4-grams of tokens, the mean over the answers, and of all answers together: where it is below one
half, the target goes in circles, and acceptance means little.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.settings import setting
from mtp_jax.bench.acceptance import SpeculationCounts, from_engine
from mtp_jax.bench.circumstances import circumstances, load_average
from mtp_jax.errors import InvalidValueError
from mtp_jax.llm import LLM
from mtp_jax.request import SamplingParams
from mtp_jax.train.prompts import Conversation, prompt_ids, read_prompts
from mtp_jax.train.repetition import distinct_share, pooled_distinct_share

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"


@dataclasses.dataclass(frozen=True)
class Row:
    """One temperature at one K."""

    model: str
    k: int
    temperature: float
    num_prompts: int
    num_tokens: int
    tokens_per_s: float
    speculation: SpeculationCounts
    distinct_mean: float
    distinct_all: float

    @property
    def conditional(self) -> list[float]:
        """Acceptance at position j + 1 in rounds where the draft at position j stood; K entries."""
        counts = (self.speculation.num_drafts, *self.speculation.accepted_per_position)
        return [now / before if before else 0.0 for before, now in itertools.pairwise(counts)]

    def as_json(self) -> dict[str, object]:
        values = dataclasses.asdict(self)
        del values["speculation"]
        return values | self.speculation.as_json() | {"acceptance_conditional": self.conditional}


def measure(llm: LLM, prompts: Sequence[Conversation], k: int, temperature: float, max_tokens: int) -> Row:
    """Answers all prompts."""
    # An answer's seed is its prompt's number: it does not depend on how many prompts there are.
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
        for number in range(len(prompts))
    ]
    ids = [prompt_ids(llm.get_tokenizer(), prompt) for prompt in prompts]
    before, began = from_engine(llm.stats()), time.perf_counter()
    results = llm.generate(ids, params)
    seconds = time.perf_counter() - began
    answers = [result.outputs[0].token_ids for result in results]
    num_tokens = sum(map(len, answers))
    return Row(
        model=llm.engine.model_name,
        k=k,
        temperature=temperature,
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / seconds,
        speculation=from_engine(llm.stats()).since(before),
        distinct_mean=float(np.mean([distinct_share(answer) for answer in answers])),
        distinct_all=pooled_distinct_share(answers),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    most = max(row.k for row in rows)
    titles = ["K", "temperature", "prompts", "tokens"]
    titles += [f"p{position}" for position in range(1, most + 1)]
    titles += [f"p{position}\\|{position - 1}" for position in range(2, most + 1)]
    titles += ["length", "tok/s", "distinct, mean", "distinct, all"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [str(row.k), f"{row.temperature:g}", str(row.num_prompts), str(row.num_tokens)]
        cells += _padded([f"{100 * rate:.1f} %" for rate in row.speculation.rate_per_position], most)
        cells += _padded([f"{100 * rate:.1f} %" for rate in row.conditional[1:]], max(most - 1, 0))
        length = row.speculation.mean_accepted_length
        cells += [f"{length:.3f}" if row.k else "–", f"{row.tokens_per_s:.1f}"]
        cells += [f"{row.distinct_mean:.3f}", f"{row.distinct_all:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _padded(cells: list[str], count: int) -> list[str]:
    return cells + ["–"] * (count - len(cells))


def described_machine() -> list[str]:
    """Command, date, machine, versions and devices."""
    kind = jax.devices()[0].device_kind
    return circumstances(f"{jax.device_count()} x {kind} ({jax.default_backend()})")


def benchmark(args: argparse.Namespace, k: int) -> list[Row]:
    """All temperatures on one engine."""
    prompts = read_prompts(args.prompts)[: args.limit]
    rows = []
    with LLM(
        None if args.model == "default" else args.model,
        num_speculative_tokens=k,
        mtp_head=args.mtp_head if k else None,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        compile_cache=args.compile_cache,
        **dict(args.set),
    ) as llm:
        for temperature in args.temperature:
            for _ in range(1 + args.warm_up):
                row = measure(llm, prompts, k, temperature, args.max_tokens)
            rows.append(row)
            print(
                f"# K={k} temperature {temperature:g}: {row.tokens_per_s:.1f} tok/s, {load_average()}",
                flush=True,
            )
            if args.json:
                line = row.as_json() | {"circumstances": [*described_machine(), load_average()]}
                with args.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return rows


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="directory, GGUF file or `default`")
    parser.add_argument("--mtp-head", help="file or folder with the MTP module, if the model brings none")
    parser.add_argument("--k", type=_integers, default=[3], help="drafts a round; 0 is plain decoding")
    parser.add_argument("--temperature", type=_numbers, default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="text, one prompt a line, or .jsonl")
    parser.add_argument("--limit", type=int, help="only so many prompts, from the first on")
    parser.add_argument(
        "--max-model-len", type=int, default=1024, help="context that the engine is built for"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE",
                        help="any other field of EngineConfig, such as max_num_seqs=100")  # fmt: skip
    parser.add_argument("--warm-up", action="store_true", help="run everything once before it is timed")
    parser.add_argument("--compile-cache", help="folder for compiled programs, or `off`")
    parser.add_argument("--json", type=Path, help="file to append one line a result to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = []
    try:
        for k in args.k:
            rows += benchmark(args, k)
    except InvalidValueError as error:  # such as drafts for a model without an MTP module
        print(error, file=sys.stderr)
        return 2
    print(*described_machine(), "", table(rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
