"""Sparse latent attention: every implementation against a plain loop, the kernel in Pallas' interpreter."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.sparse_mla import (
    NotHereError,
    mosaic_gpu,
    mosaic_tpu,
    pack_rows,
    packed,
    rows,
    rows_of,
    sparse_mla,
)
from pallas_kernels.sparse_mla.mosaic_gpu import Tuning
from pallas_kernels.sparse_mla.shapes import ROW, SCALE, VALUE

Attention = Callable[..., tuple[jax.Array, jax.Array]]
# ‖out - ref‖ / ‖ref‖: weights, shares and results are each rounded to bfloat16, which is 1.7e-3 of a number.
ERROR = 3e-3
LSE_ERROR = 1e-5  # fp32, of values near 10

PAGE = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """`chosen` indices for each of `tokens`; the tokens `empty` name no row."""

    tokens: int
    heads: int
    chosen: int
    splits: int = 1
    empty: tuple[int, ...] = ()


CASES = {
    "one block, not whole; two groups of heads": Case(tokens=1, heads=128, chosen=50),
    "three blocks, a token without rows": Case(tokens=2, heads=8, chosen=192, empty=(1,)),
    "heads that no warpgroup has": Case(tokens=2, heads=4, chosen=70),
    "shares of two blocks": Case(tokens=1, heads=16, chosen=200, splits=2),
}


def _kernel(case: Case) -> Attention:
    def run(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            results = mosaic_gpu.sparse_mla(
                *operands, SCALE, tuning=Tuning(splits=case.splits), gather=rows.PLAIN
            )
            jax.block_until_ready(results)
        assert not interpreter.get_races().races_found
        return results

    return run


def _tpu_kernel(case: Case) -> Attention:
    def run(q: jax.Array, cache: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
            results = sparse_mla(q, pack_rows(cache), indices, SCALE, implementation="mosaic_tpu")
            jax.block_until_ready(results)
        assert not tpu_interpreter.races.races_found
        return results

    return run


def _of_words(case: Case) -> Attention:
    return lambda q, cache, indices: sparse_mla(
        q, pack_rows(cache), indices, SCALE, implementation="reference"
    )


IMPLEMENTATIONS: dict[str, Callable[[Case], Attention]] = {
    "reference": lambda case: functools.partial(sparse_mla, scale=SCALE, implementation="reference"),
    "reference, rows in words": _of_words,
    "mosaic_gpu": _kernel,
    "mosaic_tpu": _tpu_kernel,
}


def _draw(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random inputs; a fifth of the indices is -1, and rows that none names are NaN, row 0 too."""
    random = np.random.default_rng(5)
    named = 1 + np.arange(case.chosen + 10)
    indices = np.stack([random.permutation(named)[: case.chosen] for _ in range(case.tokens)])
    indices[random.random(indices.shape) < 0.2] = -1
    indices[list(case.empty)] = -1
    cache = random.normal(size=(-(-(named[-1] + 2) // PAGE) * PAGE, ROW))
    cache[np.setdiff1d(np.arange(len(cache)), indices)] = np.nan
    q = random.normal(size=(case.tokens, case.heads, ROW))
    rounded = (jnp.asarray(x, jnp.bfloat16) for x in (q, cache.reshape(-1, PAGE, ROW)))
    return *rounded, jnp.asarray(indices, jnp.int32)


def _loop(q, cache, indices) -> tuple[np.ndarray, np.ndarray]:
    """One query at a time in float64."""
    q, cache = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, cache))
    out, lse = np.zeros((*q.shape[:2], VALUE)), np.full(q.shape[:2], -np.inf)
    for t, n in np.ndindex(q.shape[:2]):
        own = np.asarray(indices[t])
        keys = cache.reshape(-1, ROW)[own[own >= 0]]
        if len(keys):
            scores = keys @ q[t, n] * SCALE
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ keys[:, :VALUE] / weights.sum()
            lse[t, n] = np.log(weights.sum()) + scores.max()
    return out, lse


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_plain_loop(case: Case, implementation: str) -> None:
    operands = _draw(case)
    out, lse = IMPLEMENTATIONS[implementation](case)(*operands)
    want, want_lse = _loop(*operands)
    assert out.shape == want.shape and out.dtype == operands[0].dtype and lse.dtype == jnp.float32
    gap = np.linalg.norm(np.asarray(out.astype(jnp.float32)) - want)
    assert gap / np.linalg.norm(want) < ERROR
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=LSE_ERROR, rtol=0)
    for token in case.empty:
        assert not np.asarray(out[token].astype(jnp.float32)).any() and np.isneginf(lse[token]).all()


def test_rows_of_positions_follow_the_table() -> None:
    table = jnp.asarray([[7, 2], [1, 9]], jnp.int32)
    positions = jnp.asarray([[[0, 5, -1]], [[3, 4, 7]]], jnp.int32)
    want = [[[28, 9, -1]], [[7, 36, 39]]]
    assert rows_of(positions, table, PAGE).tolist() == want


def _tpu_traced(q: jax.Array, cache: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    return mosaic_tpu.sparse_mla(q, pack_rows(cache), indices, SCALE, VALUE)


_gpu_traced = functools.partial(mosaic_gpu.sparse_mla, scale=SCALE, tuning=Tuning(splits=1))


@pytest.mark.parametrize("attend", [_gpu_traced, _tpu_traced], ids=["mosaic_gpu", "mosaic_tpu"])
def test_results_vary_over_the_mesh_axes_of_the_inputs(attend: Attention) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    q, cache, indices = _draw(Case(tokens=2, heads=16, chosen=64))
    rows_of_q, heads = PartitionSpec("data"), PartitionSpec("data", "tensor")
    traced = jax.eval_shape(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, PartitionSpec(), rows_of_q),
            out_specs=(heads, heads),
        ),
        *(q, cache, indices),
    )
    assert [x.shape for x in traced] == [(2, 16, VALUE), (2, 16)]


def test_words_hold_the_rows_in_whole_lanes() -> None:
    rows_ = jnp.asarray(np.random.default_rng(0).normal(size=(3, ROW)), jnp.bfloat16)
    words = pack_rows(rows_)
    assert words.shape == (3, 384) and words.dtype == jnp.int32
    assert (packed.unpack_rows(words, ROW, VALUE) == rows_).all() and not words[:, ROW // 2 :].any()


def test_says_why_no_kernel_takes_it() -> None:
    q, cache, indices = _draw(Case(tokens=1, heads=8, chosen=4))
    with pytest.raises(NotHereError, match="Hopper"):
        sparse_mla(q, cache, indices, SCALE)
    refused = functools.partial(sparse_mla, scale=SCALE, implementation="mosaic_gpu")
    with pytest.raises(NotHereError, match="bfloat16"):
        refused(q.astype(jnp.float32), cache, indices)
    with pytest.raises(NotHereError, match="at most 128 heads, got 136"):
        refused(jnp.tile(q, (1, 17, 1)), cache, indices)
    with pytest.raises(NotHereError, match="values of 512"):
        refused(q, cache, indices, value_width=256)
    refused = functools.partial(sparse_mla, scale=SCALE, implementation="mosaic_tpu")
    with pytest.raises(NotHereError, match="pack_rows"):
        refused(q, cache, indices)
    with pytest.raises(NotHereError, match="values of whole 256, got 300"):
        refused(q, pack_rows(cache), indices, value_width=300)


def test_refuses_shapes_that_do_not_belong_together() -> None:
    q, cache, indices = _draw(Case(tokens=1, heads=8, chosen=4))
    attend = functools.partial(sparse_mla, scale=SCALE, implementation="reference")
    with pytest.raises(ValueError, match="cache"):
        attend(q, cache[..., :-1], indices)
    with pytest.raises(ValueError, match="indices must be"):
        attend(q, cache, indices[:0])
    with pytest.raises(ValueError, match="signed integers"):
        attend(q, cache, indices.astype(jnp.uint32))
    with pytest.raises(ValueError, match="value_width"):
        attend(q, cache, indices, value_width=600)
