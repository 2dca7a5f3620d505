"""Attention that writes its own tokens, against plain code; the kernel in Pallas' GPU interpreter."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas import mpmd
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import in_place
from pallas_kernels.decode_attention import NotHereError, decode_attention, mosaic_gpu, reference
from pallas_kernels.decode_attention.mosaic_gpu import Tuning

Operands = tuple[jax.Array, ...]
Results = tuple[jax.Array, jax.Array, jax.Array]
ERROR = 4e-3  # ‖out - ref‖ / ‖ref‖: weights and results are rounded to bfloat16
PAGE = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of the given lengths, the `tokens` new ones included, in a table of `width` pages.

    `limits` defaults to the lengths: all new tokens are written.
    """

    lengths: tuple[int, ...]
    width: int
    tokens: int = 1
    heads: tuple[int, int, int] = (1, 3, 64)  # KV heads, query heads each, head width
    limits: tuple[int, ...] | None = None
    splits: int = 1


CASES = {
    "one token, first of a page": Case((17,), width=2),
    "tokens on both sides of a block, in two shares": Case((66,), width=8, tokens=3, splits=2),
    "a row that writes nothing, one that writes the first of two": Case(
        (9, 20), width=2, tokens=2, limits=(0, 19)
    ),
    "wide heads": Case((40,), width=3, tokens=2, heads=(1, 2, 128)),
}
# The interpreter takes seconds a case; one token is also in the test of what is written.
IN_CI = (
    "tokens on both sides of a block, in two shares",
    "a row that writes nothing, one that writes the first of two",
)


def _draw(case: Case) -> Operands:
    """Random inputs; where the new tokens go, and pages of nobody, hold NaN."""
    random = np.random.default_rng(3)
    g, per_kv, h = case.heads
    b, pages = len(case.lengths), len(case.lengths) * case.width + 2
    table = random.permutation(pages)[: b * case.width].reshape(b, case.width)
    positions = np.array(case.lengths)[:, None] - case.tokens + np.arange(case.tokens)
    keys, values = random.normal(size=(2, pages, PAGE, g, h))
    limits = np.array(case.limits or case.lengths)
    for row, position in np.ndindex(b, case.width * PAGE):
        place = table[row, position // PAGE], position % PAGE
        if position in positions[row] and position < limits[row]:
            keys[place], values[place] = np.nan, np.nan
    qkv = random.normal(size=(b * case.tokens, g, per_kv + 2, h)) * 2
    rounded = (jnp.asarray(x, jnp.bfloat16) for x in (qkv, keys, values))
    whole = (jnp.asarray(x, jnp.int32) for x in (table, positions, limits))
    return *rounded, *whole


def _plain(operands: Operands) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One token at a time in float64."""
    qkv, keys, values = (np.asarray(x.astype(jnp.float32), np.float64) for x in operands[:3])
    table, positions, limit = (np.asarray(x) for x in operands[3:])
    t, h = positions.shape[1], qkv.shape[-1]
    for b, i in np.ndindex(positions.shape):
        p = positions[b, i]
        if p < limit[b]:
            place = table[b, p // PAGE], p % PAGE
            keys[place], values[place] = qkv[b * t + i, :, -2], qkv[b * t + i, :, -1]
    out = np.zeros((*qkv.shape[:2], qkv.shape[2] - 2, h))
    for b, i, g, q in np.ndindex(*positions.shape, *out.shape[1:3]):
        seen = np.arange(int(positions[b, i]) + 1)
        page, offset = table[b, seen // PAGE], seen % PAGE
        scores = keys[page, offset, g] @ qkv[b * t + i, g, q] / np.sqrt(h)
        weights = np.exp(scores - scores.max())
        out[b * t + i, g, q] = weights @ values[page, offset, g] / weights.sum()
    return out, keys, values


def _kernel(case: Case, operands: Operands) -> Results:
    tuning = Tuning(splits=case.splits, stages=1)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.block_until_ready(mosaic_gpu.decode_attention(*operands, tuning=tuning))
    assert not interpreter.get_races().races_found
    return out


IMPLEMENTATIONS: dict[str, Callable[[Case, Operands], Results]] = {
    "reference": lambda case, operands: jax.jit(reference.decode_attention)(*operands),
    "mosaic_gpu": _kernel,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[name], id=name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES],
)
def test_equals_plain_code(case: Case, implementation: str) -> None:
    operands = _draw(case)
    out, *caches = IMPLEMENTATIONS[implementation](case, operands)
    want, *new_caches = _plain(operands)
    assert out.shape == want.shape and out.dtype == operands[0].dtype
    gap = np.linalg.norm(np.asarray(out.astype(jnp.float32)) - want) / np.linalg.norm(want)
    assert gap < ERROR
    for cache, new in zip(caches, new_caches, strict=True):
        np.testing.assert_array_equal(np.asarray(cache.astype(jnp.float32)), new.astype(np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_written_is_finite(implementation: str) -> None:
    case = Case((17,), width=2)
    qkv, *others = _draw(case)
    qkv = qkv.at[0, 0, -2, 5].set(jnp.nan)  # infinite scores would be another matter
    qkv = qkv.at[0, 0, -1, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf], jnp.bfloat16))
    _, keys, values = IMPLEMENTATIONS[implementation](case, (qkv, *others))
    table, positions, _ = others[2:]
    place = table[0, positions[0, 0] // PAGE], positions[0, 0] % PAGE
    assert bool((keys[place][0] == jnp.nan_to_num(qkv[0, 0, -2])).all())
    assert bool((values[place][0] == jnp.nan_to_num(qkv[0, 0, -1])).all())


def test_needs_a_jax_that_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The primitive is private: another version may lack it, or call its arguments otherwise."""
    assert in_place.AVAILABLE, f"seen with JAX {in_place.SEEN_WITH}, not with {jax.__version__}"
    monkeypatch.setattr(mpmd, "_mpmd_map", lambda functions, *, aliases, name: None)
    assert in_place._find() is None
    monkeypatch.delattr(mpmd, "_mpmd_map")
    assert in_place._find() is None
    monkeypatch.setattr(in_place, "AVAILABLE", False)
    with pytest.raises(NotHereError, match="in place"):
        decode_attention(*_draw(Case((5,), width=1)), implementation="mosaic_gpu")


def test_results_vary_over_the_mesh_axes_of_the_inputs() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads, caches = PartitionSpec("data", "tensor"), PartitionSpec("data", None, "tensor")
    rows = PartitionSpec("data")

    def run(*operands: jax.Array) -> Results:
        return mosaic_gpu.decode_attention(*operands)

    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(heads, caches, caches, rows, rows, rows),
        out_specs=(heads, caches, caches),
        check_vma=True,
    )
    operands = _draw(Case((20, 20), width=2, heads=(2, 3, 64)))
    shapes = jax.eval_shape(sharded, *operands)
    assert [shape.shape for shape in shapes] == [(2, 2, 3, 64), operands[1].shape, operands[2].shape]


def test_says_where_it_does_not_run() -> None:
    qkv, keys, values, table, positions, limit = _draw(Case((5,), width=1))
    with pytest.raises(NotHereError, match="Hopper"):
        decode_attention(qkv, keys, values, table, positions, limit)
    wide = qkv.astype(jnp.float32)
    with pytest.raises(NotHereError, match="bfloat16"):
        decode_attention(wide, keys, values, table, positions, limit, implementation="mosaic_gpu")
    many = jnp.concatenate([qkv] * 9)
    new = jnp.arange(9, dtype=jnp.int32)[None]
    with pytest.raises(NotHereError, match="in eights"):
        decode_attention(many, keys, values, table, new, limit, implementation="mosaic_gpu")
    odd = _draw(Case((5,), width=1, heads=(1, 7, 64)))
    with pytest.raises(NotHereError, match="Q \\+ 2 in eights"):
        decode_attention(*odd, implementation="mosaic_gpu")


def test_refuses_shapes_that_do_not_belong_together() -> None:
    qkv, keys, values, table, positions, limit = _draw(Case((5,), width=1, heads=(2, 3, 64)))
    with pytest.raises(ValueError, match="alike"):
        decode_attention(qkv, keys, values[:-1], table, positions, limit)
    with pytest.raises(ValueError, match="KV heads"):
        decode_attention(qkv[:, :1], keys, values, table, positions, limit)
    with pytest.raises(ValueError, match="tokens"):
        decode_attention(qkv, keys, values, table, jnp.zeros((1, 2), jnp.int32), limit)
    with pytest.raises(ValueError, match="limit must be"):
        decode_attention(qkv, keys, values, table, positions, limit[None])
    with pytest.raises(ValueError, match="integers"):
        decode_attention(qkv, keys, values, table, positions.astype(jnp.float32), limit)
