"""A decoder layer on few rows beside XLA on this machine's GPU: errors against fp32, then device time.

    python benchmarks/few_rows.py --models smollm2_135m,mimo_1.4b_bench --rows 1,2,8,64
    python benchmarks/few_rows.py --ops norm_swiglu --tunings 'columns=8;columns=16'

Ops are those of pallas_kernels/few_rows; `layer`: all of them around pallas_kernels/decode_attention (`xla`:
around scatters and pallas_kernels/paged_attention) over `--live` positions in tables of 1024, a sequence a
row.

`us` is the wall time of one op in a device loop of a static count, over as many layers' weights as exceed the
L2 cache, each fed with the last one's result; `kernels us` and `launches` are the profiler's, gaps left out.
`floor us` is one read of the weights at --bandwidth. Errors are ‖out - ref‖ / ‖ref‖, the worst of a
layer's products; NaN says that repeats differ.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.device_profile import profile
from mtp_jax.bench.circumstances import circumstances
from mtp_jax.engine import paged
from mtp_jax.engine.paged import PagedAttention, Segment
from mtp_jax.models import layers
from mtp_jax.models.layers import Cache, Rope
from pallas_kernels.device import NotHereError
from pallas_kernels.few_rows import mosaic_gpu, reference
from pallas_kernels.few_rows.shapes import MODELS, Layer

L2_BYTES = 60e6
REPEATS = 10  # calls that must agree, and calls timed
EPS = 1e-5
PAGE_SIZE = 16
OPS = ("norm_qkv_rope", "o", "norm_swiglu", "down")
LAYER = "layer"
HEADER = (
    f"{'model':16} {'rows':>4} {'op':14} {'implementation':28} {'error':>8} {'us':>8} {'kernels us':>10}"
    f" {'launches':>8} {'floor us':>8}"
)

Weights = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to compute a layer."""

    name: str
    norm_qkv_rope: Callable[..., jax.Array]
    norm_swiglu: Callable[..., jax.Array]
    project_add: Callable[..., jax.Array]
    attend: Callable[[PagedAttention, jax.Array, Cache], tuple[jax.Array, Cache]]


def refuse(*operands: jax.Array) -> None:
    raise NotHereError


def xla_attend(attend: PagedAttention, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """The engine's attention without decode_attention: scatters, then paged_attention."""
    with mock.patch.object(paged, "decode_attention", refuse):
        return attend.grouped(qkv, cache)


XLA = Form(
    "xla",
    functools.partial(layers.norm_qkv_rope, kernels=False),
    functools.partial(layers.norm_swiglu, kernels=False),
    functools.partial(layers.project_add, reduce=layers.UNSPLIT, kernels=False),
    xla_attend,
)
REFERENCE = Form(
    "reference", reference.norm_qkv_rope, reference.norm_swiglu, reference.project_add, xla_attend
)


def form_of(text: str) -> Form:
    """`columns=16,warpgroups=2`, or `default`."""
    pairs = [] if text == "default" else [part.partition("=") for part in text.split(",")]
    tuning = mosaic_gpu.Tuning(**{key: int(value) for key, _, value in pairs})
    return Form(
        text,
        functools.partial(mosaic_gpu.norm_qkv_rope, tuning=tuning),
        functools.partial(mosaic_gpu.norm_swiglu, tuning=tuning),
        functools.partial(mosaic_gpu.project_add, tuning=tuning),
        PagedAttention.grouped,
    )


def draw(layer: Layer, seed: int) -> Weights:
    """One layer's weights, of a size that keeps rows near 1 through many layers."""
    shapes = layer.weights()
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    out = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        scale = 1.0 if "norm" in name else 0.3 * shape[-1] ** -0.5
        drawn = jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)
        out[name] = drawn + jnp.bfloat16(1) if "norm" in name else drawn
    return out


def one_op(form: Form, op: str, x: jax.Array, w: Weights, rope: Rope, context: "Context") -> jax.Array:
    """The op's result on x [M, D]; `act` and `mixed` stand for what attention and swiglu would give."""
    if op == "norm_qkv_rope":
        return form.norm_qkv_rope(x, w["input_norm"], w["qkv"], w.get("qkv_bias"), rope, EPS)
    if op == "norm_swiglu":
        return form.norm_swiglu(x, w["post_norm"], w["gate_up"], EPS)
    if op == "o":
        return form.project_add(context.mixed, w["o"], x)
    return form.project_add(context.act, w["down"], x)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a layer's ops read besides x and weights."""

    mixed: jax.Array
    act: jax.Array
    attend: PagedAttention


jax.tree_util.register_dataclass(Context)


def whole_layer(form: Form, x, w: Weights, cache, rope: Rope, context: Context):
    """One decoder layer. Returns (x, cache)."""
    qkv = form.norm_qkv_rope(x, w["input_norm"], w["qkv"], w.get("qkv_bias"), rope, EPS)
    mixed, cache = form.attend(context.attend, qkv, cache)
    x = form.project_add(mixed.reshape(x.shape[0], -1), w["o"], x)
    act = form.norm_swiglu(x, w["post_norm"], w["gate_up"], EPS)
    return form.project_add(act, w["down"], x), cache


def loop(form: Form, op: str, turns: int):
    """`turns` times through all layers; each op is fed with the last one's result, as far as it fits."""

    one_layer = jax.jit(functools.partial(whole_layer, form))
    one = jax.jit(functools.partial(one_op, form, op))

    def run(x, layers, caches, rope, context):
        def turn(_, carry):
            x, caches = carry
            new = []
            for w, cache in zip(layers, caches, strict=True):
                if op == LAYER:
                    x, cache = one_layer(x, w, cache, rope, context)
                else:
                    out = one(x, w, rope, context).reshape(x.shape[0], -1)
                    x = out[:, : x.shape[1]]
                new.append(cache)
            return x, new

        return jax.lax.fori_loop(0, turns, turn, (x, caches))

    return jax.jit(run, donate_argnums=2)


def make_context(layer: Layer, rows: int, live: int, seed: int) -> tuple[Rope, Context]:
    key = jax.random.split(jax.random.key(seed), 3)
    angles = jax.random.uniform(key[0], (rows, layer.width // 2), maxval=6.0)
    pages = -(-live // PAGE_SIZE)
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    table = jnp.pad(table, ((0, 0), (0, max(0, 64 - pages))))
    positions = jnp.full((rows, 1), live - 1, jnp.int32)
    attend = PagedAttention((Segment(table, positions, jnp.full(rows, live, jnp.int32)),), PAGE_SIZE)
    heads = layer.kv_heads * layer.per_kv * layer.width
    mixed = jax.random.normal(key[1], (rows, heads), jnp.bfloat16)
    act = jax.random.normal(key[2], (rows, layer.ffn), jnp.bfloat16)
    return (jnp.cos(angles), jnp.sin(angles)), Context(mixed, act, attend)


def make_caches(layer: Layer, rows: int, live: int, count: int) -> list[tuple[jax.Array, jax.Array]]:
    pages = rows * -(-live // PAGE_SIZE) + -(-rows // PAGE_SIZE)
    shape = (pages, PAGE_SIZE, layer.kv_heads, layer.width)
    return [(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)) for _ in range(count)]


@functools.cache
def checked_op(op: str, layer: Layer, rows: int) -> tuple[tuple, jax.Array]:
    """Inputs of one op, and what it must give."""
    rope, context = make_context(layer, rows, PAGE_SIZE, 11)
    x = jax.random.normal(jax.random.key(12), (rows, layer.hidden), jnp.bfloat16)
    inputs = (x, draw(layer, 13), rope, context)
    return inputs, jax.jit(functools.partial(one_op, REFERENCE, op))(*inputs).astype(jnp.float32)


def error_of(form: Form, op: str, layer: Layer, rows: int) -> float:
    """Against the reference; NaN where repeats differ."""
    ops = OPS if op == LAYER else (op,)
    worst = 0.0
    for one in ops:
        inputs, want = checked_op(one, layer, rows)
        run = jax.jit(functools.partial(one_op, form, one))
        results = [run(*inputs) for _ in range(REPEATS)]
        if not all(bool((result == results[0]).all()) for result in results):
            return float("nan")
        gap = jnp.linalg.norm((results[0].astype(jnp.float32) - want).ravel())
        worst = max(worst, float(gap / jnp.linalg.norm(want.ravel())))
    return worst


def kernel_times(run: Callable[[], object]) -> tuple[float, int]:
    """(us, number) of all kernels of one call, by the profiler."""
    kernels = profile(run)
    return sum(kernel.us for kernel in kernels), len(kernels)


def measure(form: Form, op: str, layer: Layer, rows: int, arguments: argparse.Namespace) -> list[float]:
    """[wall us, kernel us, launches] of one op."""
    sizes = layer.weights()
    names = {"norm_qkv_rope": ["qkv"], "norm_swiglu": ["gate_up"]}.get(op, [op])
    names = list(sizes) if op == LAYER else names
    layer_bytes = 2 * sum(functools.reduce(int.__mul__, sizes[name]) for name in names)
    count = int(min(max(2, L2_BYTES // layer_bytes + 1), 60))
    layers = [draw(layer, seed) for seed in range(count)]
    rope, context = make_context(layer, rows, arguments.live, 7)
    turns = max(2, 600 // count)
    run = loop(form, op, turns)
    x = jax.random.normal(jax.random.key(3), (rows, layer.hidden), jnp.bfloat16)

    def call() -> float:
        caches = jax.block_until_ready(make_caches(layer, rows, arguments.live, count))
        start = time.perf_counter()
        jax.block_until_ready(run(x, layers, caches, rope, context))
        return time.perf_counter() - start

    call()
    wall = statistics.median(call() for _ in range(REPEATS)) * 1e6
    us, launches = kernel_times(call)
    one = turns * count
    # Fresh caches are no part of it; they are a few kernels in some hundreds.
    return [wall / one, us / one, launches / one, layer_bytes / arguments.bandwidth / 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="smollm2_135m,mimo_1.4b_bench")
    parser.add_argument("--rows", default="2,8,64")
    parser.add_argument("--ops", default=",".join((LAYER, *OPS)))
    parser.add_argument("--tunings", default="default", help="variants, separated by `;`")
    parser.add_argument("--live", type=int, default=160, help="positions of each row")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after that")
    parser.add_argument("--xla", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    print("\n".join(circumstances(jax.devices()[0].device_kind)), HEADER, sep="\n", flush=True)
    forms = [XLA] * arguments.xla + [form_of(text) for text in arguments.tunings.split(";")]
    models, ops = arguments.models.split(","), arguments.ops.split(",")
    for model, rows, op in itertools.product(models, map(int, arguments.rows.split(",")), ops):
        for form in forms:
            if time.monotonic() < end:
                print(line(form, op, model, rows, arguments), flush=True)


def line(form: Form, op: str, model: str, rows: int, arguments: argparse.Namespace) -> str:
    """One case, measured."""
    error, figures, note = float("nan"), [float("nan")] * 4, ""
    try:
        error = error_of(form, op, MODELS[model], rows)
        figures = measure(form, op, MODELS[model], rows, arguments)
    except Exception as problem:  # one variant that does not compile must not hide the others
        note = f"{type(problem).__name__}: {str(problem)[:150]}"
    us, kernel_us, launches, floor = figures
    return (
        f"{model:16} {rows:>4} {op:14} {form.name:28} {error:8.1e} {us:8.2f} {kernel_us:10.2f}"
        f" {launches:8.1f} {floor:8.2f}  {note}"
    )


if __name__ == "__main__":
    main()
