"""Sparse latent attention on this machine's GPU: errors against fp32, then device time, beside FlashMLA.

    python benchmarks/sparse_mla.py --loads t64_n128,t64_n64 --tunings 'default;splits=2'
    python benchmarks/sparse_mla.py --flashmla PATH/_flashmla_C.abi3.so   (see benchmarks/flashmla.py)

Errors are ‖out - ref‖ / ‖ref‖ on fresh inputs, a fifth of the indices -1, one token without any, every row
that none names NaN; `lse` is the largest difference. NaN says that something is wrong with what must be
exact: the token without rows, or repeats that differ.

`us` is wall time of one call in a device loop of a static count, joins of shares included; `kernels us` is
the profiler's, gaps left out. TFLOP/s and GB/s (of rows, each once a token) are of `us`. All calls of a loop
have the same inputs: what fits the L2 cache is read from there, as in FlashMLA's own benchmark.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.device_profile import profile
from mtp_jax.bench.circumstances import circumstances
from pallas_kernels.sparse_mla import mosaic_gpu, reference
from pallas_kernels.sparse_mla.mosaic_gpu import Tuning
from pallas_kernels.sparse_mla.shapes import LOADS, ROW, SCALE, VALUE, Load

ROWS = 1 << 20  # of the cache
REPEATS = 7
WINDOW = 65536  # rows that a token's are drawn from
HEADER = (
    f"{'load':>12} {'tuning':34} {'error':>8} {'lse':>8} {'us':>9} {'kernels us':>10} {'TFLOP/s':>8}"
    f" {'GB/s':>7} {'/FlashMLA':>9}"
)


def tuning_of(text: str) -> Tuning:
    """`splits=2`, or `default`."""
    pairs = [] if text == "default" else [part.partition("=") for part in text.split(",")]
    return Tuning(**{key: int(value) for key, _, value in pairs})


def as_taken(load: Load, tuning: Tuning) -> Tuning:
    """With the number of shares that this load gets."""
    return dataclasses.replace(
        tuning, splits=tuning.splits or mosaic_gpu.choose_splits(load.tokens, load.heads, load.chosen)
    )


@jax.jit
def in_fp32(q: jax.Array, cache: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    return reference.sparse_mla(q.astype(jnp.float32), cache, indices, SCALE, VALUE)


def shapes_of(load: Load, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of queries, cache and indices."""
    q = jax.ShapeDtypeStruct((load.tokens, load.heads, ROW), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((load.tokens, load.chosen), jnp.int32)
    return q, jax.ShapeDtypeStruct((rows, ROW), jnp.bfloat16), indices


@functools.cache
def compiled_once(load: Load, tuning: Tuning) -> Callable:
    run = functools.partial(mosaic_gpu.sparse_mla, scale=SCALE, tuning=tuning)
    return jax.jit(run).lower(*shapes_of(load, 3 * load.chosen)).compile()


@functools.cache
def error_of(load: Load, tuning: Tuning) -> tuple[float, float]:
    """Of the output and of its log-sum-exp; NaN where a token without rows, or a repeat, is not exact."""
    tokens = load.tokens
    random = np.random.default_rng(int(time.time()))
    rows = 3 * load.chosen
    indices = np.stack([random.permutation(2 * load.chosen)[: load.chosen] for _ in range(tokens)])
    indices[random.random(indices.shape) < 0.2] = -1
    if tokens > 1:
        indices[1] = -1
    cache = random.normal(size=(rows, ROW))
    cache[np.setdiff1d(np.arange(rows), indices)] = np.nan
    q = jnp.asarray(random.normal(size=(tokens, load.heads, ROW)), jnp.bfloat16)
    operands = (q, jnp.asarray(cache, jnp.bfloat16), jnp.asarray(indices, jnp.int32))
    run = compiled_once(load, tuning)
    results = [run(*operands) for _ in range(5)]
    want, want_lse = in_fp32(*operands)
    if not all(bool((a == b).all()) for result in results for a, b in zip(result, results[0], strict=True)):
        return float("nan"), float("nan")
    out, lse = results[0]
    if tokens > 1 and not (bool((out[1] == 0).all()) and bool(jnp.isneginf(lse[1]).all())):
        return float("nan"), float("nan")
    out, want = out.astype(jnp.float32), want.astype(jnp.float32)
    gap = jnp.where(jnp.isneginf(want_lse), 0.0, jnp.abs(lse - want_lse)).max()
    return float(jnp.linalg.norm((out - want).ravel()) / jnp.linalg.norm(want.ravel())), float(gap)


@functools.cache
def cache() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (ROWS, ROW), jnp.bfloat16)


def draw(load: Load, window: int) -> tuple[jax.Array, jax.Array]:
    """Queries, and indices: 64 sets of rows, each in one of several windows, as FlashMLA's side has them."""
    random = np.random.default_rng(0)
    windows = 16 if window == WINDOW else 1
    sets = range(min(load.tokens, 64))
    base = [random.permutation(window)[: load.chosen] + (i % windows) * window for i in sets]
    indices = np.stack([base[i % 64] for i in range(load.tokens)])
    q = jax.random.normal(jax.random.key(2), (load.tokens, load.heads, ROW), jnp.bfloat16)
    return q, jnp.asarray(indices, jnp.int32)


@functools.cache
def compiled_loop(load: Load, tuning: Tuning, turns: int) -> Callable:
    """`turns` calls in a row, none of which the compiler may leave out."""

    def run(q, cache, indices):
        def turn(_, carry):
            q, out, lse = carry
            q, _, _ = jax.lax.optimization_barrier((q, out, lse))
            return q, *mosaic_gpu.sparse_mla(q, cache, indices, SCALE, tuning=tuning)

        start = (q, jnp.zeros((*q.shape[:2], VALUE), q.dtype), jnp.zeros(q.shape[:2], jnp.float32))
        return jax.lax.fori_loop(0, turns, turn, start)[1:]

    return jax.jit(run).lower(*shapes_of(load, ROWS)).compile()


def turns_of(load: Load) -> int:
    """Calls that take some 20 ms."""
    return max(4, min(200, int(20e3 / max(10.0, 1.2 * load.tokens * load.heads / 128))))


def measure(load: Load, tuning: Tuning, window: int) -> tuple[float, float]:
    """(wall us, kernel us) of one call."""
    q, indices = draw(load, window)
    turns = turns_of(load)
    run = compiled_loop(load, tuning, turns)

    def call() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(q, cache(), indices))
        return time.perf_counter() - start

    call()
    wall = statistics.median(call() for _ in range(REPEATS)) * 1e6 / turns
    return wall, kernel_us(call) / turns


def kernel_us(run: Callable[[], object]) -> float:
    """Of all kernels of one call, by the profiler."""
    return sum(kernel.us for kernel in profile(run))


def flashmla(python: str, library: str, loads: list[Load]) -> dict[tuple[int, int], list[float]]:
    """us of FlashMLA by (tokens, heads): with a bfloat16 cache, with its fp8 cache."""
    shapes = [f"{load.tokens}x{load.heads}" for load in loads if load.heads >= 64]
    command = [python, str(Path(__file__).parent / "flashmla.py"), library, *shapes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        print("FlashMLA:", done.stderr[-600:])
    lines = [line.split() for line in done.stdout.splitlines() if line.count(" ") == 3]
    return {(int(t), int(n)): [float(x) for x in us] for t, n, *us in lines}


def few(load: Load) -> Load:
    """As many tokens as errors are looked for in."""
    return dataclasses.replace(load, tokens=min(load.tokens, 8))


def compile_all(names: list[str], texts: list[str]) -> None:
    """All cases side by side; what fails does so again, with its message, when its turn comes."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, text in itertools.product(names, texts):
            load, tuning = LOADS[name], tuning_of(text)
            pool.submit(compiled_loop, load, tuning, turns_of(load))
            pool.submit(compiled_once, few(load), as_taken(load, tuning))


def line(name: str, text: str, window: int, anchor: float | None, found: dict) -> str:
    load, note = LOADS[name], ""
    error = lse = us = kernels = float("nan")
    try:
        tuning = tuning_of(text)
        error, lse = error_of(few(load), as_taken(load, tuning))
        us, kernels = measure(load, tuning, window)
    except Exception as problem:  # one variant that does not compile must not hide the others
        note = f"  {type(problem).__name__}: {str(problem)[:150]}"
    flops = 2 * load.tokens * load.heads * load.chosen * (ROW + VALUE)
    share = anchor / us if anchor else float("nan")
    found[f"{name} {text}"] = {
        "error": error,
        "lse": lse,
        "us": us,
        "kernels_us": kernels,
        "flashmla_us": anchor,
    }
    return (
        f"{name:>12} {text:34} {error:8.1e} {lse:8.1e} {us:9.2f} {kernels:10.2f} {flops / us / 1e6:8.1f}"
        f" {load.tokens * load.chosen * ROW * 2 / us / 1e3:7.0f} {share:9.2f}{note}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", default=",".join(LOADS), help=f"of {', '.join(LOADS)}")
    parser.add_argument("--tunings", default="default", help="variants, separated by `;`")
    parser.add_argument("--window", type=int, default=WINDOW, help="rows that a token's are drawn from")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after that")
    parser.add_argument("--flashmla", metavar="FILE", help="the library that vLLM ships")
    parser.add_argument("--flashmla-python", default="python3", help="a Python that has torch")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    names = arguments.loads.split(",")
    anchors: dict[tuple[int, int], list[float]] = {}
    if arguments.flashmla:
        loads = [LOADS[name] for name in names]
        anchors = flashmla(arguments.flashmla_python, arguments.flashmla, loads)
        for (tokens, heads), us in anchors.items():
            print(
                f"FlashMLA {tokens:5} tokens {heads:4} heads: bf16 {us[0]:8.2f} us, fp8 cache {us[1]:8.2f} us"
            )
    print("\n".join(circumstances(jax.devices()[0].device_kind)), HEADER, sep="\n", flush=True)
    found: dict[str, dict] = {}
    compile_all(names, arguments.tunings.split(";"))
    for name in names:
        anchor = anchors.get((LOADS[name].tokens, LOADS[name].heads), [None])[0]
        for text in arguments.tunings.split(";"):
            if time.monotonic() < end:
                print(line(name, text, arguments.window, anchor, found), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
