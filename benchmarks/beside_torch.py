"""Our greedy decoding at batch 1 beside transformers in torch: same file, same machine, turn and turn about.

    python benchmarks/beside_torch.py --torch-python ORACLE_ENV/bin/python

Each pair runs `decode.py` and `torch_baseline.py` one after the other, in processes of their own, in float32,
on all CPUs of this process; the order within a pair alternates. Both sides count the tokens after the first.
A side's rate is the median of its timed runs; least and most are beside it.

The machine must be idle otherwise. Others' load does not slow both sides alike: torch's threads wait for one
another at every operation, so that a busy machine flatters us.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mtp_jax.bench.circumstances import circumstances, load_average
from mtp_jax.loading import default_model_path

FOLDER = Path(__file__).resolve().parent
IDLE_LOAD = 0.5  # load average above which others are at work
RATES = re.compile(r"^(torch \S+, \d+ threads, \w+): (.*) tokens/s$", re.MULTILINE)


def _run(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{run.stdout}{run.stderr}")
    return run.stdout


def ours(args: argparse.Namespace, scratch: Path) -> list[float]:
    """Tokens/s of the engine, a run each."""
    result = scratch / "ours.jsonl"
    result.unlink(missing_ok=True)
    flags = ["--k", "0", "--batch", "1", "--prompt", "5", "--dtype", "float32", "--model", str(args.gguf)]
    flags += ["--new", str(args.tokens + 1), "--repeat", str(args.runs), "--json", str(result)]
    flags += ["--compile-cache", str(scratch / "compiled")]
    _run([sys.executable, str(FOLDER / "decode.py"), *flags])
    return json.loads(result.read_text())["decode_tokens_per_s_of_all_runs"]


def theirs(args: argparse.Namespace) -> tuple[list[float], str]:
    """Tokens/s of torch, a run each, and which torch that is."""
    command = [args.torch_python, str(FOLDER / "torch_baseline.py"), "--gguf", str(args.gguf)]
    command += ["--tokens", str(args.tokens), "--runs", str(args.runs), "--threads", str(args.threads)]
    match = RATES.search(_run(command))
    if match is None:
        raise SystemExit("torch_baseline.py printed no rates")
    return [float(rate) for rate in match[2].split(", ")], match[1]


def shown(rates: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", required=True, help="interpreter that has torch and transformers")
    parser.add_argument("--gguf", type=Path, help="model; default: the default model's file")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="timed tokens a run")
    parser.add_argument(
        "--runs", type=int, default=3, help="timed runs of a process, after those that warm up"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch's threads")
    args = parser.parse_args()
    args.gguf = args.gguf or default_model_path()
    print(*circumstances(), f"model     {args.gguf.name}", "", sep="\n", flush=True)
    busy = os.getloadavg()[0] > IDLE_LOAD
    ratios, torch = [], ""
    print("| pair | mtp-jax tok/s | torch tok/s | ratio | machine |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            if pair % 2:
                (other, torch), own = theirs(args), ours(args, Path(folder))
            else:
                own, (other, torch) = ours(args, Path(folder)), theirs(args)
            ratios.append(statistics.median(own) / statistics.median(other))
            print(
                f"| {pair + 1} | {shown(own)} | {shown(other)} | {ratios[-1]:.2f} | {load_average()} |",
                flush=True,
            )
    print(f"\nmedian ratio {statistics.median(ratios):.2f} to {torch}")
    if busy:
        print("The machine was busy when this began: the ratio flatters us and is not to be quoted.")


if __name__ == "__main__":
    main()
