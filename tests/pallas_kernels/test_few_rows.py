"""The products on few rows against their reference; the kernels in Pallas' GPU interpreter, one at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.few_rows import (
    NotHereError,
    mosaic_gpu,
    norm_qkv_rope,
    norm_swiglu,
    project_add,
    reference,
)
from pallas_kernels.few_rows.mosaic_gpu import Tuning
from pallas_kernels.few_rows.shapes import MODELS, Layer

# ‖out - ref‖ / ‖ref‖: rows times the norm's weight and the result are rounded to bfloat16, 1e-3 each on
# average, and SiLU of a negative gate enlarges what the gate brings. XLA's form of the same has 6e-3.
ERROR = 8e-3
EPS = 1e-5
SMALL = Layer(hidden=128, kv_heads=1, per_kv=1, width=16, ffn=48, bias=True)
OPS = ("norm_qkv_rope", "norm_swiglu", "project_add")

Operands = tuple[Any, ...]  # of an op: arrays, the tables of rope, eps


def _draw(op: str, layer: Layer, rows: int, seed: int = 5) -> Operands:
    random = np.random.default_rng(seed)

    def array(*shape: int, size: float = 1.0) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) * size, jnp.bfloat16)

    d, f, h = layer.hidden, layer.ffn, layer.width
    shapes = layer.weights()
    x, norm = array(rows, d, size=3.0), array(d) + jnp.bfloat16(1)
    if op == "norm_swiglu":
        return x, norm, array(*shapes["gate_up"], size=d**-0.5), EPS
    if op == "project_add":
        return array(rows, f), array(*shapes["down"], size=f**-0.5), x
    angles = random.uniform(0, 6, size=(rows, h // 2))
    rope = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    bias = array(*shapes["qkv_bias"]) if layer.bias else None
    return x, norm, array(*shapes["qkv"], size=d**-0.5), bias, rope, EPS


def _interpret(op: str, tuning: Tuning, operands: Operands, races: bool = False) -> jax.Array:
    run: Callable[..., jax.Array] = getattr(mosaic_gpu, op)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        out = run(*operands, tuning=tuning).block_until_ready()
    assert not races or not interpreter.get_races().races_found
    return out


def _error(out: jax.Array, want: jax.Array) -> float:
    got, exact = (np.asarray(x.astype(jnp.float32)) for x in (out, want))
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


CASES = {
    "one row": (SMALL, 1, Tuning()),
    "few rows, one column tile a head": (SMALL, 3, Tuning(columns=8, warpgroups=1)),
    "a whole tile of rows": (SMALL, 8, Tuning(warpgroups=2)),
    "rows that do not divide": (SMALL, 33, Tuning(warpgroups=1)),
    "all rows of a wgmma": (SMALL, 64, Tuning()),
    "rings that go round, rows that are padded": (
        dataclasses.replace(SMALL, hidden=320),
        9,
        Tuning(columns=8, warpgroups=1, chunk=64, row_stages=2, weight_stages=3),
    ),
}
IN_CI = ("a whole tile of rows", "rings that go round, rows that are padded")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[name], id=name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES],
)
def test_kernel_equals_reference(case: tuple[Layer, int, Tuning], op: str) -> None:
    layer, rows, tuning = case
    # The interpreter takes 0.1 s for a warpgroup: two blocks are enough.
    if op == "project_add":
        layer = dataclasses.replace(layer, ffn=layer.hidden, hidden=16)
    if op == "norm_swiglu":
        layer = dataclasses.replace(layer, ffn=16)
    operands = _draw(op, layer, rows)
    out = _interpret(op, tuning, operands, races=rows == 8)
    want = jax.jit(getattr(reference, op))(*operands)
    assert out.shape == want.shape and out.dtype == want.dtype
    assert _error(out, want) < ERROR


@pytest.mark.slow  # a minute a model: the interpreter takes 0.2 s for a warpgroup
@pytest.mark.parametrize("rows", [2, 33])
@pytest.mark.parametrize("model", ["smollm2_135m", "mimo_1.4b_bench"])
@pytest.mark.parametrize("op", OPS)
def test_kernel_equals_reference_at_the_sizes_of_models(model: str, op: str, rows: int) -> None:
    layer = MODELS[model]
    # Few outputs, the whole contraction.
    layer = dataclasses.replace(layer, kv_heads=1, ffn=layer.ffn if op == "project_add" else 96)
    operands = _draw(op, layer, rows)
    if op == "project_add":
        x, weight, residual = operands
        operands = (x, weight[:48], residual[:, :48])
    assert _error(_interpret(op, Tuning(), operands), getattr(reference, op)(*operands)) < ERROR


def test_reference_is_the_models_own_layer() -> None:
    from mtp_jax.models import layers

    for op in OPS:
        operands = _draw(op, SMALL, 4)
        reduce = {"reduce": layers.UNSPLIT} if op == "project_add" else {}
        plain = jax.jit(functools.partial(getattr(layers, op), kernels=False, **reduce))(*operands)
        assert _error(jax.jit(getattr(reference, op))(*operands), plain) < ERROR


def test_results_vary_over_the_mesh_axes_of_the_inputs() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    found = []

    def run(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
        out = mosaic_gpu.project_add(x, weight, residual)
        found.append(jax.typeof(out).manual_axis_type.varying)
        return out

    rows, columns = PartitionSpec("data"), PartitionSpec("tensor")
    both = PartitionSpec("data", "tensor")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(rows, columns, both), out_specs=both, check_vma=True)
    x, weight, residual = _draw("project_add", dataclasses.replace(SMALL, ffn=64), 4)
    jax.eval_shape(sharded, x, weight, residual)
    assert found == [{"data", "tensor"}]


def test_says_where_it_does_not_run() -> None:
    x, weight, residual = _draw("project_add", dataclasses.replace(SMALL, ffn=64), 4)
    with pytest.raises(NotHereError, match="Hopper"):
        project_add(x, weight, residual)
    wide = [array.astype(jnp.float32) for array in (x, weight, residual)]
    with pytest.raises(NotHereError, match="bfloat16"):
        project_add(*wide, implementation="mosaic_gpu")
    many = _draw("norm_swiglu", SMALL, 65)
    with pytest.raises(NotHereError, match="at most 64 rows"):
        norm_swiglu(*many, implementation="mosaic_gpu")
    odd = _draw("norm_qkv_rope", dataclasses.replace(SMALL, width=8), 2)
    with pytest.raises(NotHereError, match="outputs in eights"):
        norm_qkv_rope(*odd, implementation="mosaic_gpu")
    with pytest.raises(NotHereError, match="multiples of 64"):
        project_add(x[:, :32], weight[:, :32], residual, implementation="mosaic_gpu")


def test_refuses_shapes_that_do_not_belong_together() -> None:
    x, norm, qkv, bias, rope, eps = _draw("norm_qkv_rope", SMALL, 4)
    with pytest.raises(ValueError, match="norm must be"):
        norm_qkv_rope(x, norm[:-1], qkv, bias, rope, eps)
    with pytest.raises(ValueError, match="qkv must be"):
        norm_qkv_rope(x, norm, qkv[..., :-1], bias, rope, eps)
    with pytest.raises(ValueError, match="table of rope"):
        norm_qkv_rope(x, norm, qkv, bias, (rope[0][:1], rope[1]), eps)
    with pytest.raises(ValueError, match="residual must be"):
        project_add(x, jnp.zeros((16, 128), jnp.bfloat16), x)
