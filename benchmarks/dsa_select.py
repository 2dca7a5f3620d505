"""The two kernels that choose positions for sparse attention, beside XLA, on this machine's GPU.

    python benchmarks/dsa_select.py
    python benchmarks/dsa_select.py --logits 64x1x32768,64x4x32768:h32:p16 --tunings 'default;consumers=3'
    python benchmarks/dsa_select.py --topk 64x131072 --topk-tunings 'blocks=1;blocks=2' --json OUT.jsonl

A load of `indexer_logits` is batch x query tokens a row x live positions [/ table positions], one of
`topk_indices` rows x length. First each variant is checked on fresh random inputs: ragged lengths, pages and
positions of nobody poisoned with NaN or inf, results written over NaN, repeats equal bit by bit; logits
against the fp32 reference (‖out - ref‖ / ‖ref‖ over seen positions of some rows, -inf elsewhere), indices
against the exact set, with and without ties. Then all rows have `live` positions and the time is that of all
kernels of a call by the profiler: launches and gaps left out, inputs rotating through more than the L2 cache.
`floor us` is what must be read and written, once, at --bandwidth, or, if longer, the product at --tflops.
"""

import argparse
import collections
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.device_profile import profile
from mtp_jax.bench.circumstances import circumstances
from pallas_kernels.indexer_logits import mosaic_gpu as logits_gpu
from pallas_kernels.indexer_logits import reference as logits_reference
from pallas_kernels.indexer_logits.shapes import LOADS as LOGITS_LOADS
from pallas_kernels.indexer_logits.shapes import WIDTH, Load
from pallas_kernels.topk_indices import mosaic_gpu as topk_gpu
from pallas_kernels.topk_indices import reference as topk_reference
from pallas_kernels.topk_indices.shapes import LOADS as TOPK_LOADS
from pallas_kernels.topk_indices.shapes import Rows

L2_BYTES = 120e6
CALLS = 12
FLOAT8 = jnp.float8_e4m3fn
Run = Callable[..., jax.Array]


@dataclasses.dataclass
class Case:
    """One variant on one shape, with what was found."""

    op: str
    shape: str
    name: str
    us: float = float("nan")
    floor_us: float = float("nan")
    error: float = float("nan")
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""

    def line(self) -> str:
        share = self.floor_us / self.us * 100 if self.us else 0.0
        rest = " ".join(f"{us:.1f} {name[:14]}" for name, us in list(self.kernels.items())[1:3])
        return (
            f"{self.op:7} {self.shape:28} {self.name:22} {self.us:8.1f} {self.floor_us:7.1f} {share:4.0f}%"
            f" {self.error:8.1e} {rest} {self.note}"
        )


def kernel_times(run: Run, inputs: list[tuple]) -> dict[str, float]:
    """us of every kernel, for one call, by the profiler; the longest first."""
    jax.block_until_ready([run(*one) for one in inputs])
    total = collections.defaultdict[str, float](float)
    for kernel in profile(
        lambda: [jax.block_until_ready(run(*inputs[i % len(inputs)])) for i in range(CALLS)]
    ):
        total[kernel.name] += kernel.us
    return {name: us / CALLS for name, us in sorted(total.items(), key=lambda item: -item[1])}


def repeats(run: Run, inputs: tuple) -> tuple[jax.Array, str]:
    """(the result, a complaint) of a few calls that write over NaN or -2."""
    results = []
    for _ in range(4):
        shape = jax.eval_shape(run, *inputs)
        bad = jnp.nan if jnp.issubdtype(shape.dtype, jnp.floating) else -2
        poison = [jnp.full(shape.shape, bad, shape.dtype).block_until_ready() for _ in range(3)]
        del poison
        results.append(run(*inputs))
    same = all(bool(jnp.array_equal(one, results[0], equal_nan=True)) for one in results)
    return results[0], "" if same else "REPEATS DIFFER"


@functools.partial(jax.jit, static_argnames=("load", "heads", "page", "dtype"))
def draw_logits(key: jax.Array, load: Load, heads: int, page: int, dtype) -> tuple:
    """q, weights, keys, table, scales; the last page is nobody's and holds NaN."""
    keys = jax.random.split(key, 5)
    own = -(-load.live // page)
    pages, rows = load.batch * own + 1, load.batch * load.queries
    order = jax.random.permutation(keys[0], pages - 1).reshape(load.batch, own)
    table = jnp.full((load.batch, load.table // page), pages - 1, jnp.int32).at[:, :own].set(order)
    q = jax.random.normal(keys[1], (rows, heads, WIDTH), jnp.bfloat16).astype(dtype)
    weights = jax.random.normal(keys[2], (rows, heads), jnp.float32)
    cache = jax.random.normal(keys[3], (pages, page, WIDTH), jnp.bfloat16).astype(dtype)
    cache = cache.at[-1].set(jnp.asarray(jnp.nan, dtype))
    scales = jax.random.uniform(keys[4], (pages, page), jnp.float32, 0.5, 2.0).at[-1].set(jnp.nan)
    return q, weights, cache, table, scales if dtype == FLOAT8 else None


def check_logits(run: Run, inputs: tuple, load: Load, seed: int) -> tuple[float, str]:
    q, weights, cache, table, scales = inputs
    last = jax.random.randint(jax.random.key(seed), (load.batch, 1), load.queries - 1, load.live)
    positions = last.at[0].set(load.live - 1) - jnp.arange(load.queries - 1, -1, -1)
    if load.batch > 2:
        positions = positions.at[1].set(-1)
    out, note = repeats(run, (q, weights, cache, table, positions, scales))
    rows = jnp.array(sorted({0, min(1, load.batch - 1), load.batch // 2, load.batch - 1}))
    tokens = (rows[:, None] * load.queries + jnp.arange(load.queries)).reshape(-1)
    want = jax.jit(logits_reference.indexer_logits)(
        q[tokens], weights[tokens], cache, table[rows], positions[rows], scales
    )
    found, seen = out[tokens], want > -jnp.inf
    if not bool(((found == -jnp.inf) == ~seen).all()):
        note += " -INF IS ELSEWHERE"
    gap = jnp.linalg.norm(jnp.where(seen, found - want, 0.0)) / jnp.linalg.norm(jnp.where(seen, want, 0.0))
    return float(gap), note


def xla_logits(q, weights, cache, table, positions, scales) -> jax.Array:
    """The engine's einsum, on keys in bfloat16."""
    (b, t), page = positions.shape, cache.shape[1]
    keys = cache[table].reshape(b, -1, WIDTH).astype(jnp.bfloat16)
    heads = q.astype(jnp.bfloat16).reshape(b, t, *q.shape[1:])
    scores = jnp.einsum("btih,bsh->btis", heads, keys, preferred_element_type=jnp.float32)
    scores = jnp.einsum("btis,bti->bts", jax.nn.relu(scores), weights.reshape(b, t, -1))
    if scales is not None:
        scores *= scales[table].reshape(b, 1, -1)
    seen = jnp.arange(table.shape[1] * page) <= positions[:, :, None]
    return jnp.where(seen, scores, -jnp.inf).reshape(b * t, -1)


def logits_floor(load: Load, heads: int, dtype, arguments: argparse.Namespace) -> float:
    """us."""
    item = 132 if dtype == FLOAT8 else 2 * WIDTH
    moved = load.batch * load.live * (item + 4 * load.queries)
    work = 2 * heads * WIDTH * load.batch * load.queries * load.live
    rate = arguments.tflops * (2 if dtype == FLOAT8 else 1)
    return max(moved / arguments.bandwidth, work / rate) / 1e6


def logits_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for seed, text in enumerate(filter(None, arguments.logits.split(","))):
        load, heads, page, dtype = read_load(text, arguments)
        tunings = arguments.tunings.split(";") if seed < arguments.tuned else ["default"]
        item = 132 if dtype == FLOAT8 else 256
        sets = int(min(12, L2_BYTES // (load.batch * load.live * item) + 1))
        inputs = [draw_logits(jax.random.key(9 * seed + i), load, heads, page, dtype) for i in range(sets)]
        positions = jnp.broadcast_to(load.live - jnp.arange(load.queries, 0, -1), (load.batch, load.queries))
        full = [(*one[:4], positions, one[4]) for one in inputs]
        variants: list[tuple[str, Run]] = []
        if arguments.xla and load.batch * load.queries * load.live <= 1 << 21:
            variants.append(("xla", xla_logits))
        variants += [
            (name, functools.partial(logits_gpu.indexer_logits, tuning=read_tuning(name, logits_gpu.Tuning)))
            for name in tunings
        ]
        for name, run in variants:
            case = Case("logits", text, name, floor_us=logits_floor(load, heads, dtype, arguments))
            run = jax.jit(run)
            with noted(case):
                if name != "xla":
                    case.error, case.note = check_logits(run, inputs[0], load, seed)
                case.kernels = kernel_times(run, full)
                case.us = sum(case.kernels.values())
            yield case


def check_topk(run: Run, load: Rows, seed: int) -> tuple[float, str]:
    """(share of rows that differ, complaint)."""
    keys, notes, wrong = jax.random.split(jax.random.key(seed), 4), "", 0
    position = jnp.arange(load.length)
    plain = jax.random.normal(keys[0], (load.rows, load.length))
    lengths = jax.random.randint(keys[1], (load.rows,), 0, load.length).at[0].set(load.length)
    several = {
        "random": plain,
        "ties": jnp.round(plain * 4),
        "equal": jnp.ones_like(plain),
        "relu": jnp.maximum(plain - 2.2, -0.0),
        "few": jnp.where(plain > 2.5, plain, -jnp.inf),
    }
    for name, scores in several.items():
        for own in (lengths, jnp.full_like(lengths, load.length)):
            given = jnp.where(position < own[:, None], scores, jnp.inf)
            found, note = repeats(run, (given, own))
            want = jax.jit(topk_reference.topk_indices, static_argnums=2)(given, own, load.k)
            bad = int((found != want).any(axis=1).sum())
            wrong += bad
            notes += note + (f" {bad} ROWS WRONG ({name})" if bad else "")
    return wrong / (2 * len(several) * load.rows), notes


def topk_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for seed, text in enumerate(filter(None, arguments.topk.split(","))):
        load = Rows(*(int(part) for part in text.split("x")))
        sets = int(min(64, L2_BYTES // (4 * load.rows * load.length) + 1))
        inputs = [
            (jax.random.normal(jax.random.key(i), (load.rows, load.length)), jnp.full(load.rows, load.length))
            for i in range(min(sets, CALLS))
        ]
        variants: list[tuple[str, Run]] = []
        if arguments.xla:
            variants.append(("lax.top_k", lambda scores, lengths, k=load.k: jax.lax.top_k(scores, k)[1]))
        for name in arguments.topk_tunings.split(";") if seed < arguments.tuned_topk else ["default"]:
            tuning = read_tuning(name, topk_gpu.Tuning)
            variants.append((name, functools.partial(topk_gpu.topk_indices, k=load.k, tuning=tuning)))
        for name, run in variants:
            floor = 4 * load.rows * load.length / arguments.bandwidth / 1e6
            case, run = Case("topk", text, name, floor_us=floor), jax.jit(run)
            with noted(case):
                if name != "lax.top_k":
                    case.error, case.note = check_topk(run, load, seed)
                case.kernels = kernel_times(run, inputs)
                case.us = sum(case.kernels.values())
            yield case


class noted:
    """One variant that does not compile must not hide the others."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, _) -> bool:
        if isinstance(error, Exception):
            self.case.note = f"{type(error).__name__}: {str(error)[:200]}"
            return True
        return False


def read_load(text: str, arguments: argparse.Namespace) -> tuple[Load, int, int, object]:
    """`64x1x32768[/TABLE][:h32][:p16][:bf16]`."""
    shape, *options = text.split(":")
    rows, _, table = shape.partition("/")
    batch, queries, live = (int(part) for part in rows.split("x"))
    heads, page, dtype = 64, 64, FLOAT8
    for option in options:
        if option == "bf16":
            dtype = jnp.bfloat16
        elif option[0] == "h":
            heads = int(option[1:])
        else:
            page = int(option[1:])
    return Load(batch, queries, live, int(table or live)), heads, page, dtype


def read_tuning(text: str, kind):
    """`stages=3,consumers=2`, or `default`."""
    if text == "default":
        return kind()
    return kind(**{key: int(value) for key, _, value in (part.partition("=") for part in text.split(","))})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    loads = [f"{x.batch}x{x.queries}x{x.live}/{x.table}" for x in LOGITS_LOADS]
    loads += ["64x1x32768:bf16", "64x1x32768:h32", "64x1x32768:p16", "64x1x32768:p16:bf16"]
    parser.add_argument("--logits", default=",".join(loads), help="with :h32, :p16 (page size) or :bf16")
    parser.add_argument("--topk", default=",".join(f"{x.rows}x{x.length}" for x in TOPK_LOADS))
    parser.add_argument("--tunings", default="default", help="variants of the first --tuned loads")
    parser.add_argument("--topk-tunings", default="default")
    parser.add_argument("--tuned", type=int, default=99)
    parser.add_argument("--tuned-topk", type=int, default=99)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--tflops", type=float, default=790.0, help="of bfloat16; twice that of float8")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after that")
    parser.add_argument("--xla", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    print("\n".join(circumstances(jax.devices()[0].device_kind)), flush=True)
    print(f"{'op':7} {'shape':28} {'variant':22} {'us':>8} {'floor':>7}       {'error':>8} other kernels")
    for cases in (topk_cases(arguments), logits_cases(arguments)):
        for case in cases:
            print(case.line(), flush=True)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(case)) + "\n")
            if time.monotonic() > end:
                return


if __name__ == "__main__":
    main()
