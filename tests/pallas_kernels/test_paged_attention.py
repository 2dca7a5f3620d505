"""Every implementation of paged attention against a plain loop; the kernel in Pallas' GPU interpreter."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.paged_attention import NotHereError, mosaic_gpu, paged_attention, reference
from pallas_kernels.paged_attention.mosaic_gpu import Tuning

Attention = Callable[..., jax.Array]
ERROR = 4e-3  # ‖out - ref‖ / ‖ref‖: weights and results are rounded to bfloat16

TWO_STAGES = Tuning(splits=1, stages=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of the given lengths (tokens of a step included) in a table of `width` pages."""

    lengths: tuple[int, ...]
    width: int
    tokens: int = 1
    heads: tuple[int, int, int] = (1, 3, 64)  # KV heads, query heads each, head width
    page: int = 16
    tuning: Tuning = TWO_STAGES


CASES = {
    "edges of pages and blocks": Case((1, 17, 64, 65), width=6),
    "a ring of one stage, blocks not divided by the table": Case((130, 7), width=9, tuning=Tuning(1, 1)),
    "more stages than blocks": Case((70,), width=5, tuning=Tuning(stages=4, splits=1)),
    "tokens see different keys": Case((3, 66, 129), width=9, tokens=3, heads=(2, 3, 64)),
    "wide heads, pages of 32": Case((90, 2), width=3, tokens=2, heads=(1, 4, 128), page=32),
    "pages of 8": Case((61, 9), width=9, page=8, heads=(1, 1, 64)),
    "many queries": Case((100,), width=8, tokens=3, heads=(1, 16, 64)),
    "shares, some without keys": Case((300, 5), width=20, heads=(1, 2, 64), tuning=Tuning(splits=4)),
    "shares that a token sees nothing of": Case((66,), width=8, tokens=3, tuning=Tuning(splits=2)),
}


def _kernel(case: Case) -> Attention:
    def run(*operands: jax.Array) -> jax.Array:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            out = mosaic_gpu.paged_attention(*operands, tuning=case.tuning).block_until_ready()
        assert not interpreter.get_races().races_found
        return out

    return run


IMPLEMENTATIONS: dict[str, Callable[[Case], Attention]] = {
    "reference": lambda case: reference.paged_attention,
    "mosaic_gpu": _kernel,
}


def _draw(case: Case) -> tuple[jax.Array, ...]:
    """Random inputs; pages of nobody hold NaN, and table columns that no row needs name them, or no page."""
    random = np.random.default_rng(3)
    g, per_kv, h = case.heads
    needed = [-(-length // case.page) for length in case.lengths]
    pages = sum(needed) + 3
    order = random.permutation(pages)
    keys, values = random.normal(size=(2, pages, case.page, g, h))
    poison = order[sum(needed) :]
    keys[poison], values[poison] = np.nan, np.nan
    table = random.choice([*poison, -5, 10**6], size=(len(case.lengths), case.width))
    first = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[first : first + count]
        first += count
    positions = np.array(case.lengths)[:, None] - case.tokens + np.arange(case.tokens)
    q = random.normal(size=(len(case.lengths), case.tokens, g, per_kv, h)) * 2
    rounded = (jnp.asarray(x, jnp.bfloat16) for x in (q, keys, values))
    return *rounded, jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32)


def _loop(q, keys, values, table, positions) -> np.ndarray:
    """One query at a time in float64."""
    q, keys, values = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, keys, values))
    out = np.zeros(q.shape)
    for b, t, g, n in np.ndindex(q.shape[:4]):
        seen = np.arange(int(positions[b, t]) + 1)
        page, offset = np.asarray(table)[b, seen // keys.shape[1]], seen % keys.shape[1]
        scores = keys[page, offset, g] @ q[b, t, g, n] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, g, n] = weights @ values[page, offset, g] / weights.sum()
    return out


def _error(out: jax.Array, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out.astype(jnp.float32)) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_plain_loop(case: Case, implementation: str) -> None:
    operands = _draw(case)
    out = IMPLEMENTATIONS[implementation](case)(*operands)
    assert out.shape == operands[0].shape and out.dtype == operands[0].dtype
    assert _error(out, _loop(*operands)) < ERROR


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dead_rows_leave_the_others_alone(implementation: str) -> None:
    case = Case((20, 20, 20), width=3)
    q, keys, values, table, positions = _draw(case)
    want = _loop(q, keys, values, table, positions)[1]
    positions = positions.at[0].set(-7).at[2].set(10**9)
    table = table.at[0].set(-3).at[2].set(10**6)
    out = IMPLEMENTATIONS[implementation](case)(q, keys, values, table, positions)
    assert _error(out[1], want) < ERROR


@pytest.mark.parametrize("splits", [1, 2])
def test_results_vary_over_the_mesh_axes_of_the_inputs(splits: int) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    found = []

    def attend(*operands: jax.Array) -> jax.Array:
        out = mosaic_gpu.paged_attention(*operands, tuning=Tuning(splits=splits))
        found.append(jax.typeof(out).manual_axis_type.varying)
        return out

    specs = (heads, heads, heads, rows, rows)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=True)
    operands = _draw(Case((20, 20), width=2, heads=(2, 3, 64)))
    pages = operands[1].shape[0] // 2 * 2
    jax.eval_shape(sharded, operands[0], operands[1][:pages], operands[2][:pages], *operands[3:])
    assert found == [{"data", "tensor"}]


def test_tuning_by_shape() -> None:
    assert mosaic_gpu._choose_splits(sequences=3, most_keys=8192, keys_a_split=256) == 32
    assert mosaic_gpu._choose_splits(sequences=24, most_keys=8192, keys_a_split=256) == 11
    assert mosaic_gpu._choose_splits(sequences=512, most_keys=8192, keys_a_split=256) == 1
    assert mosaic_gpu._choose_splits(sequences=3, most_keys=64, keys_a_split=256) == 1
    assert [mosaic_gpu._choose_stages(count, 128) for count in (8, 256, 512, 4096)] == [3, 2, 1, 1]
    assert [mosaic_gpu._choose_stages(count, 64) for count in (8, 192, 4096)] == [4, 2, 1]


def test_says_where_it_does_not_run() -> None:
    q, keys, values, table, positions = _draw(Case((5,), width=1, heads=(2, 3, 64)))
    with pytest.raises(NotHereError, match="Hopper"):
        paged_attention(q, keys, values, table, positions)
    with pytest.raises(NotHereError, match="bfloat16"):
        paged_attention(q.astype(jnp.float32), keys, values, table, positions, implementation="mosaic_gpu")
    many = jnp.zeros((1, 5, 2, 13, 64), jnp.bfloat16)
    with pytest.raises(NotHereError, match=r"T \* Q"):
        paged_attention(many, keys, values, table, jnp.zeros((1, 5), jnp.int32), implementation="mosaic_gpu")
    for tokens, width in ((1, 96), (1, 256)):
        odd = jnp.zeros((1, tokens, 2, 1, width), jnp.bfloat16)
        cache = jnp.zeros((2, 16, 2, width), jnp.bfloat16)
        with pytest.raises(NotHereError, match="heads of"):
            paged_attention(odd, cache, cache, table, positions, implementation="mosaic_gpu")


def test_refuses_shapes_that_do_not_belong_together() -> None:
    q, keys, values, table, positions = _draw(Case((5,), width=1, heads=(2, 3, 64)))
    with pytest.raises(ValueError, match="alike"):
        paged_attention(q, keys, values[:-1], table, positions, implementation="reference")
    with pytest.raises(ValueError, match="KV heads"):
        paged_attention(q[:, :, :1], keys, values, table, positions, implementation="reference")
    with pytest.raises(ValueError, match="table must be"):
        paged_attention(q, keys, values, table[0], positions, implementation="reference")
    with pytest.raises(ValueError, match="integers"):
        paged_attention(q, keys, values, table, positions.astype(jnp.float32), implementation="reference")
