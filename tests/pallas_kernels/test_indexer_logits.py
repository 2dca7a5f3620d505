"""Every implementation of an indexer's scores against plain code; the kernel in Pallas' GPU interpreter."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.indexer_logits import NotHereError, indexer_logits, mosaic_gpu
from pallas_kernels.indexer_logits.mosaic_gpu import Tuning

Operands = tuple[jax.Array, ...]
ERROR = 1e-5  # ‖out - ref‖ / ‖ref‖: products of rounded numbers are exact in fp32, sums of them nearly
FLOAT8 = jnp.float8_e4m3fn


TWO_STAGES = Tuning(stages=2, consumers=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of the given lengths (the tokens included) in a table of `width` pages."""

    lengths: tuple[int, ...]
    width: int
    tokens: int = 1
    heads: int = 32
    page: int = 64
    dtype: type = jnp.bfloat16
    blocks: int = 2
    tuning: Tuning = TWO_STAGES


CASES = {
    "edges of pages and tiles": Case((64, 128, 129), width=4),
    "shares across rows, one that sees nothing": Case((100, 0, 300), width=5, blocks=3),
    "tokens of a row, float8": Case((130, 2), width=5, tokens=2, dtype=FLOAT8, page=32),
    "more blocks than tiles, three consumers": Case(
        (200,), width=4, blocks=4, tuning=Tuning(consumers=3, stages=3)
    ),
    "small pages, float8": Case((40, 150), width=10, page=16, dtype=FLOAT8),
    "four tokens": Case((300,), width=10, tokens=4, page=32, dtype=FLOAT8, tuning=Tuning()),
    "small pages, a table that is no whole tiles": Case((40,), width=3, page=16, heads=64),
    "a long dead end": Case((5, 70), width=20, blocks=2),
}
IN_CI = ("shares across rows, one that sees nothing", "tokens of a row, float8")


def _draw(case: Case) -> Operands:
    """Random inputs; pages of nobody hold NaN, and table columns that no row needs name them, or no page."""
    random = np.random.default_rng(3)
    needed = [-(-length // case.page) for length in case.lengths]
    pages, rows = sum(needed) + 2, len(case.lengths)
    order = random.permutation(pages)
    keys = random.normal(size=(pages, case.page, mosaic_gpu.WIDTH))
    scales = random.uniform(0.5, 2.0, size=(pages, case.page))
    poison = order[sum(needed) :]
    keys[poison], scales[poison] = np.nan, np.nan
    table = random.choice([*poison, -5, 10**6], size=(rows, case.width))
    first = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[first : first + count]
        first += count
    positions = np.array(case.lengths)[:, None] - case.tokens + np.arange(case.tokens)
    q = random.normal(size=(rows * case.tokens, case.heads, mosaic_gpu.WIDTH))
    weights = random.normal(size=q.shape[:2])
    operands = (
        jnp.asarray(q, case.dtype),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(keys, case.dtype),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(positions, jnp.int32),
    )
    return (*operands, jnp.asarray(scales, jnp.float32)) if case.dtype == FLOAT8 else operands


def _plain(q, weights, keys, table, positions, scales=None) -> np.ndarray:
    """One key at a time in float64."""
    q, weights, keys = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, weights, keys))
    page, t = keys.shape[1], positions.shape[1]
    out = np.full((len(q), table.shape[1] * page), -np.inf)
    for b, i in np.ndindex(positions.shape):
        for s in range(int(positions[b, i]) + 1):
            place = int(table[b, s // page]), s % page
            score = np.maximum(q[b * t + i] @ keys[place], 0.0) @ weights[b * t + i]
            out[b * t + i, s] = score if scales is None else score * float(scales[place])
    return out


def _reference(case: Case, operands: Operands) -> jax.Array:
    return indexer_logits(
        *operands[:5], scales=operands[5] if len(operands) > 5 else None, implementation="reference"
    )


def _kernel(case: Case, operands: Operands) -> jax.Array:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.block_until_ready(
            mosaic_gpu.indexer_logits(*operands, tuning=dataclasses.replace(case.tuning, blocks=case.blocks))
        )
    assert not interpreter.get_races().races_found
    return out


IMPLEMENTATIONS: dict[str, Callable[[Case, Operands], jax.Array]] = {
    "reference": _reference,
    "mosaic_gpu": _kernel,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[name], id=name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES],
)
def test_equals_plain_code(case: Case, implementation: str) -> None:
    operands = _draw(case)
    out = np.asarray(IMPLEMENTATIONS[implementation](case, operands))
    want = _plain(*operands)
    assert out.shape == want.shape and out.dtype == np.float32
    seen = want > -np.inf
    np.testing.assert_array_equal(out == -np.inf, ~seen)
    assert np.linalg.norm(out[seen] - want[seen]) / np.linalg.norm(want[seen]) < ERROR


def test_results_vary_over_the_mesh_axes_of_the_inputs() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, found = PartitionSpec("data"), []

    def score(*operands: jax.Array) -> jax.Array:
        out = mosaic_gpu.indexer_logits(*operands)
        found.append(jax.typeof(out).manual_axis_type.varying)
        return out

    sharded = jax.shard_map(score, mesh=mesh, in_specs=(rows,) * 5, out_specs=rows, check_vma=True)
    operands = _draw(Case((20, 20), width=2))
    assert jax.eval_shape(sharded, *operands).shape == (2, 128)
    assert found == [{"data"}]


def test_says_where_it_does_not_run() -> None:
    q, weights, keys, table, positions = _draw(Case((5,), width=1))
    with pytest.raises(NotHereError, match="Hopper"):
        indexer_logits(q, weights, keys, table, positions)
    wide = (q.astype(jnp.float32), weights, keys.astype(jnp.float32))
    with pytest.raises(NotHereError, match="bfloat16 or float8"):
        indexer_logits(*wide, table, positions, implementation="mosaic_gpu")
    with pytest.raises(NotHereError, match="heads of"):
        indexer_logits(q[:, :8], weights[:, :8], keys, table, positions, implementation="mosaic_gpu")
    with pytest.raises(NotHereError, match="pages of"):
        indexer_logits(q, weights, keys[:, :24], table, positions, implementation="mosaic_gpu")


def test_refuses_shapes_that_do_not_belong_together() -> None:
    q, weights, keys, table, positions = _draw(Case((5,), width=1))
    with pytest.raises(ValueError, match="same dtype"):
        indexer_logits(q.astype(jnp.float32), weights, keys, table, positions)
    with pytest.raises(ValueError, match="weights must be"):
        indexer_logits(q, weights[:, 1:], keys, table, positions)
    with pytest.raises(ValueError, match="table must be"):
        indexer_logits(q, weights, keys, table[0], positions)
    with pytest.raises(ValueError, match="positions must be"):
        indexer_logits(q, weights, keys, table, jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="integers"):
        indexer_logits(q, weights, keys, table, positions.astype(jnp.float32))
    with pytest.raises(ValueError, match="scales must be"):
        indexer_logits(q, weights, keys, table, positions, scales=jnp.zeros((1, 64)))
