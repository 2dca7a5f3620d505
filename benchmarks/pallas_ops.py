"""Kernels beside XLA on this machine's GPU: errors against fp32, then device time.

    python benchmarks/pallas_ops.py --models smollm2_135m,mimo_7b --loads 64x1x160/1024,8x2x8192/8192
    python benchmarks/pallas_ops.py --tunings 'stages=2;stages=3;splits=4,stages=3' --profile --json OUT.jsonl

A load is batch x query tokens a row x live positions / table positions, or `all`. Every case
draws fresh random inputs; pages that no row owns, and what the results are written over, hold NaN. Errors are
‖out - ref‖ / ‖ref‖ against the fp32 reference, over rows of ragged lengths up to `live`; repeats must agree
bit by bit.

Time is that of one attention in a device loop of a static count, over as many different caches as exceed the
L2 cache (up to --layers), each call fed with the last one's result, as in a decode step, launches included.
All rows then have `live` positions. `floor us` is keys and values of the live positions, read once at
--bandwidth. With --profile follow the three longest kernels of one attention, in us.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.device_profile import profile
from mtp_jax.bench.circumstances import circumstances
from mtp_jax.engine.paged import Segment, _attend
from pallas_kernels.paged_attention import mosaic_gpu, reference
from pallas_kernels.paged_attention.shapes import MODELS, PAGE_SIZE, Heads, Load, loads

L2_BYTES = 60e6
REPEATS = 10  # calls that must agree, and calls timed
Attention = Callable[..., jax.Array]
Inputs = tuple[jax.Array, list[tuple[jax.Array, jax.Array]], jax.Array, jax.Array]


@dataclasses.dataclass
class Case:
    """One model, load and implementation, with what was found."""

    model: str
    load: Load
    name: str
    error: float = float("nan")
    us: float = float("nan")
    kernels: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # us of each that ran, by the profiler
    floor_us: float = float("nan")
    note: str = ""

    def line(self) -> str:
        load = self.load
        shape = f"{load.batch:>3}x{load.queries}x{load.live}/{load.table}"
        return (
            f"{self.model:16} {shape:>16} {self.name:24} {self.error:9.1e} {self.us:9.2f}"
            f" {self.floor_us:9.2f} {self.floor_us / self.us * 100:5.0f}%  {self.note}"
        )


HEADER = f"{'model':16} {'load':>16} {'implementation':24} {'error':>9} {'us':>9} {'floor us':>9} {'':>6}"


def xla(
    q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array
) -> jax.Array:
    """The engine's own attention."""
    segment = Segment(table, positions, jnp.zeros(table.shape[:1], jnp.int32))
    return _attend(q.reshape(-1, *q.shape[2:]), keys, values, segment).reshape(q.shape)


def draw(heads: Heads, load: Load, seed: int, layers: int, ragged: bool) -> Inputs:
    """Random queries and caches, shuffled pages, NaN in pages of nobody; rows are ragged or `live` long."""
    key = iter(jax.random.split(jax.random.key(seed), 4 + 2 * layers))
    width = load.table // PAGE_SIZE
    own, pages = load.batch * -(-load.live // PAGE_SIZE), load.batch * -(-load.live // PAGE_SIZE) + 8
    shape = (pages, PAGE_SIZE, heads.kv_heads, heads.width)
    q = jax.random.normal(
        next(key), (load.batch, load.queries, heads.kv_heads, heads.per_kv, heads.width), jnp.bfloat16
    )
    order = jax.random.permutation(next(key), pages)
    owned = order[:own].reshape(load.batch, -1)
    table = jnp.broadcast_to(order[-1], (load.batch, width)).at[:, : owned.shape[1]].set(owned)
    last = jnp.full((load.batch,), load.live - 1, jnp.int32)
    if ragged:
        last = jax.random.randint(next(key), last.shape, load.queries - 1, load.live).at[0].set(last[0])
    positions = last[:, None] - load.queries + 1 + jnp.arange(load.queries, dtype=jnp.int32)
    caches = [
        tuple(
            jax.random.normal(next(key), shape, jnp.bfloat16).at[order[own:]].set(jnp.bfloat16(jnp.nan))
            for _ in range(2)
        )
        for _ in range(layers)
    ]
    return q, caches, table.astype(jnp.int32), positions


def loop(attend: Attention, turns: int) -> Attention:
    """`turns` times through all caches on the device, each attention fed with the last one's result."""
    one = jax.jit(attend)

    def run(q, caches, table, positions):
        def turn(_, q):
            for keys, values in caches:
                q = one(q, keys, values, table, positions)
            return q

        return jax.lax.fori_loop(0, turns, turn, q)

    return jax.jit(run)


exact = jax.jit(reference.paged_attention)


def check(attend: Attention, heads: Heads, load: Load, seed: int) -> tuple[float, str]:
    """(relative error, complaint) on ragged lengths with poisoned pages and results."""
    q, [(keys, values)], table, positions = draw(heads, load, seed, 1, ragged=True)
    want = exact(q, keys, values, table, positions).astype(jnp.float32)
    if attend is xla:  # it multiplies the weight 0 with every page of the table
        keys, values = (jnp.nan_to_num(x) for x in (keys, values))
    run, results = jax.jit(attend), []
    for _ in range(REPEATS):
        poison = [jnp.full(q.shape, jnp.nan, q.dtype).block_until_ready() for _ in range(8)]
        del poison
        results.append(run(q, keys, values, table, positions))
    same = all(bool((one == results[0]).all()) for one in results)
    error = jnp.linalg.norm((results[0].astype(jnp.float32) - want).ravel()) / jnp.linalg.norm(want.ravel())
    return float(error), "" if same else "REPEATS DIFFER"


def measure(run: Attention, inputs: Inputs, turns: int) -> float:
    """Median us of one attention."""
    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6 / (turns * len(inputs[1]))


def kernel_times(run: Attention, inputs: Inputs, turns: int) -> dict[str, float]:
    """us of every kernel, for one attention, by the profiler: launches and gaps left out."""
    total = collections.Counter[str]()
    for kernel in profile(lambda: jax.block_until_ready(run(*inputs))):
        total[kernel.name] += kernel.us
    return {name: us / (turns * len(inputs[1])) for name, us in total.most_common()}


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Runs everything asked for, as long as there is time."""
    end = time.monotonic() + arguments.seconds
    tunings = [read_tuning(text) for text in arguments.tunings.split(";")]
    wanted = loads() if arguments.loads == "all" else [read_load(one) for one in arguments.loads.split(",")]
    pairs = itertools.product(wanted, arguments.models.split(","))
    for seed, (load, model) in enumerate(pairs):
        heads = MODELS[model]
        live_bytes = 4 * load.batch * load.live * heads.kv_heads * heads.width
        layers = int(min(max(2, L2_BYTES // live_bytes + 1), arguments.layers))
        inputs = jax.tree.map(
            lambda x: jnp.nan_to_num(x) if x.dtype == jnp.bfloat16 else x,
            draw(heads, load, 1000 + seed, layers, ragged=False),
        )
        variants: list[tuple[str, Attention]] = [("xla", xla)] if arguments.xla else []
        variants += [
            (name, functools.partial(mosaic_gpu.paged_attention, tuning=one)) for name, one in tunings
        ]
        for name, attend in variants:
            if time.monotonic() > end:
                return
            case = Case(model, load, name, floor_us=live_bytes / arguments.bandwidth / 1e6)
            try:
                case.error, case.note = check(attend, heads, load, seed)
                turns = max(2, round(3000 / (layers * max(5.0, 2 * case.floor_us))))
                run = loop(attend, turns)
                case.us = measure(run, inputs, turns)
                if arguments.profile:
                    case.kernels = kernel_times(run, inputs, turns)
            except Exception as error:  # one variant that does not compile must not hide the others
                case.note = f"{type(error).__name__}: {str(error)[:150]}"
            yield case


def read_load(text: str) -> Load:
    """`64x2x160/1024`."""
    rows, _, table = text.partition("/")
    batch, queries, live = (int(part) for part in rows.split("x"))
    return Load(batch, queries, live, int(table))


def read_tuning(text: str) -> tuple[str, mosaic_gpu.Tuning]:
    """`stages=3,splits=4`, or `default`."""
    if text == "default":
        return text, mosaic_gpu.Tuning()
    values = {key: int(value) for key, _, value in (part.partition("=") for part in text.split(","))}
    return text, mosaic_gpu.Tuning(**values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="smollm2_135m,mimo_1.4b_bench")
    parser.add_argument("--loads", default="1x1x160/1024,8x1x160/1024,64x1x160/1024,64x2x1024/1024")
    parser.add_argument("--tunings", default="default", help="variants, separated by `;`")
    parser.add_argument("--layers", type=int, default=12, help="most caches a loop goes through")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after that")
    parser.add_argument("--xla", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true", help="the time of the kernels alone, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("\n".join(circumstances(jax.devices()[0].device_kind)), HEADER, sep="\n", flush=True)
    for case in cases(arguments):
        print(
            case.line(), *(f"{us:.2f} {name[:16]}" for name, us in list(case.kernels.items())[:3]), flush=True
        )
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(case)) + "\n")


if __name__ == "__main__":
    main()
