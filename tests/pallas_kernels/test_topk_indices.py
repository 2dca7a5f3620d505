"""Top-k against plain code. The kernel's program runs on NumPy, all threads in step; its PTX does not."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.topk_indices import NotHereError, mosaic_gpu, selection, topk_indices
from pallas_kernels.topk_indices.selection import LANES, Plan

Words = np.ndarray  # [blocks, threads] of uint32 or bool
TopK = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


class Lockstep:
    """selection.Code for one row: all threads of all blocks make each step at once.

    A read of what another thread writes without a meeting between them is an error.
    """

    def __init__(self, plan: Plan, scores: np.ndarray, length: int) -> None:
        shape = (plan.blocks, plan.threads)
        rank, thread = np.indices(shape).astype(np.uint32)
        self.rank, self.thread = rank, thread
        self._words, self._length = scores.view(np.uint32), np.full(shape, length, np.uint32)
        self.out = np.full(plan.k, 0xDEADBEEF, np.uint32)
        self._arrays = {
            name: np.full((plan.blocks, n), 0xDEADBEEF, np.uint32) for name, n in plan.arrays().items()
        }
        # Who wrote each word since the threads last met: nobody -1, several -2, or thread and block.
        self._writers = {name: np.full(array.shape, -1) for name, array in self._arrays.items()}

    def _me(self) -> Words:
        return self.rank.astype(np.int64) * self.thread.shape[1] + self.thread

    def select(self, condition: Words, yes: Words | int, no: Words | int) -> Words:
        return np.where(condition, np.uint32(yes), np.uint32(no))

    def key(self, bits: Words) -> Words:
        bits = (bits.view(np.float32) + np.float32(0.0)).view(np.uint32)
        return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))

    def popcount(self, word: Words) -> Words:
        return np.bitwise_count(word).astype(np.uint32)

    def ballot(self, condition: Words) -> Words:
        lanes = condition.reshape(-1, LANES).astype(np.uint32) << np.arange(LANES, dtype=np.uint32)
        words = lanes.sum(axis=1, dtype=np.uint32)
        return np.repeat(words, LANES).reshape(condition.shape)

    def from_lane(self, word: Words, lane: Words | int) -> Words:
        lanes = np.broadcast_to(lane, word.shape).reshape(-1, LANES).astype(np.int64)
        return np.take_along_axis(word.reshape(-1, LANES), lanes, axis=1).reshape(word.shape)

    def read(self, array: str, index: Words | int) -> Words:
        index = np.broadcast_to(index, self.thread.shape).astype(np.int64)
        writer = np.take_along_axis(self._writers[array], index, axis=1)
        # A warp's own writes it may read: its threads go together.
        same = (writer >= 0) & (writer // LANES == self._me() // LANES)
        assert np.all((writer == -1) | same), f"{array} is read before all have met"
        return np.take_along_axis(self._arrays[array], index, axis=1)

    def write(self, array: str, index: Words | int, value: Words | int, when: Words) -> None:
        index = np.broadcast_to(index, self.thread.shape).astype(np.int64)[when]
        value = np.broadcast_to(np.uint32(value), self.thread.shape)[when]
        place = self.rank[when], index
        assert len(set(zip(*place, strict=True))) == len(index), f"two threads write to one word of {array}"
        self._arrays[array][place], self._writers[array][place] = value, self._me()[when]

    def write_four(self, array: str, index: Words, values: list[Words], when: Words) -> None:
        assert not np.any(index[when] % 4)
        for i, value in enumerate(values):
            self.write(array, index + np.uint32(i), value, when)

    def increment(self, array: str, index: Words, when: Words) -> None:
        place = self.rank[when], index.astype(np.int64)[when]
        assert not np.any(self._writers[array][place] >= 0), f"{array} is counted in before all have met"
        np.add.at(self._arrays[array], place, np.uint32(1))
        self._writers[array][place] = -2

    def of_block(self, array: str, index: Words | int, rank: Words | int) -> Words:
        place = tuple(np.broadcast_to(x, self.thread.shape).astype(np.int64) for x in (rank, index))
        assert np.all(self._writers[array][place] == -1), f"{array} is read before all blocks have met"
        return self._arrays[array][place]

    def scores(self, index: Words) -> tuple[Words, ...]:
        assert not np.any(index % 4)
        return tuple(self._words[index.astype(np.int64) + j] for j in range(4))

    def length(self) -> Words:
        return self._length

    def emit(self, index: Words, value: Words | int, when: Words) -> None:
        places = index[when]
        assert np.all(self.out[places] == 0xDEADBEEF) and len(set(places)) == len(places)
        self.out[places] = np.broadcast_to(np.uint32(value), index.shape)[when]

    def meet(self) -> None:
        for writers in self._writers.values():
            writers[:] = -1

    meet_all = meet

    def repeat(self, count, body, carry):
        (count,) = set(np.asarray(count).ravel().tolist())
        for i in range(count):
            carry = body(np.full(self.thread.shape, i, np.uint32), carry)
        return carry


def _program(blocks: int, threads: int = 256, ahead: int = 2) -> TopK:
    def run(scores: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
        plan = Plan(scores.shape[1], k, blocks, threads, ahead)
        rows = []
        for row, length in zip(scores, np.clip(lengths, 0, scores.shape[1]), strict=True):
            code = Lockstep(plan, row, int(length))
            selection.select(code, plan)
            rows.append(code.out.view(np.int32))
        return np.stack(rows)

    return run


def _reference(scores: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    return np.asarray(topk_indices(jnp.asarray(scores), jnp.asarray(lengths), k, implementation="reference"))


IMPLEMENTATIONS: dict[str, TopK] = {
    "reference": _reference,
    "program": _program(1),
    "program, too long to be held": _program(1, threads=32),
    "program, 2 blocks": _program(2, threads=64, ahead=4),
    "program, 8 blocks": _program(8, threads=32, ahead=3),
}


def _draw(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    random = np.random.default_rng(5)
    scores = random.normal(size=(3, 3072)).astype(np.float32)
    lengths, k = np.array([3072, 1999, 700]), 256
    if name == "many ties":
        scores = np.round(scores)
    elif name == "all equal":
        scores[:] = 1.5
    elif name == "both zeros":
        scores = np.where(random.random(scores.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
    elif name == "few there":
        scores[random.random(scores.shape) < 0.95] = -np.inf
    elif name == "short":
        lengths = np.array([0, -3, 5])
    elif name == "just as many as are chosen":
        lengths = np.array([k, k + 1, k - 1])
    elif name == "close together":
        scores = (1.0 + random.integers(0, 900, scores.shape) * 2.0**-23).astype(np.float32)
    elif name == "extremes":
        scores = random.choice([np.inf, -np.inf, 3e38, -3e38, 1e-42, -1e-42], scores.shape).astype(np.float32)
    elif name == "more than there are positions":
        scores, lengths, k = scores[:, :64], np.array([64, 9, 100]), 96
    return scores, lengths, k


CASES = (
    "random",
    "many ties",
    "all equal",
    "both zeros",
    "few there",
    "short",
    "just as many as are chosen",
    "close together",
    "extremes",
    "more than there are positions",
)


def _plain(scores: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    out = np.full((len(scores), k), -1, np.int32)
    for row, (own, length) in enumerate(zip(scores, lengths, strict=True)):
        there = [i for i in range(min(max(length, 0), len(own))) if own[i] > -np.inf]
        best = sorted(sorted(there, key=lambda i, own=own: -own[i])[:k])
        out[row, : len(best)] = best
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_code(name: str, implementation: str) -> None:
    scores, lengths, k = _draw(name)
    for row, length in enumerate(lengths):
        scores[row, max(length, 0) :] = np.inf  # what lies behind may be anything
    found = IMPLEMENTATIONS[implementation](scores, lengths, k)
    np.testing.assert_array_equal(found, _plain(scores, lengths, k))


def test_results_vary_over_the_mesh_axes_of_the_inputs() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, found = PartitionSpec("data"), []

    def choose(scores: jax.Array, lengths: jax.Array) -> jax.Array:
        out = mosaic_gpu.topk_indices(scores, lengths, 16)
        found.append(jax.typeof(out).manual_axis_type.varying)
        return out

    sharded = jax.shard_map(choose, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=True)
    out = jax.eval_shape(sharded, jnp.zeros((4, 256)), jnp.zeros(4, jnp.int32))
    assert out.shape == (4, 16) and found == [{"data"}]


def test_blocks_by_shape() -> None:
    found = [
        mosaic_gpu._choose_blocks(*shape) for shape in ((1, 131072), (1, 8192), (64, 131072), (100, 131072))
    ]
    assert found == [4, 1, 2, 1]
    assert mosaic_gpu._choose_blocks(100, 1 << 20) == 2


def test_says_where_it_does_not_run() -> None:
    scores, lengths = jnp.zeros((2, 64)), jnp.zeros(2, jnp.int32)
    with pytest.raises(NotHereError, match="Hopper"):
        topk_indices(scores, lengths, 8)
    with pytest.raises(NotHereError, match="whole fours"):
        topk_indices(scores[:, :63], lengths, 8, implementation="mosaic_gpu")


def test_refuses_shapes_that_do_not_belong_together() -> None:
    scores, lengths = jnp.zeros((2, 64)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"float32 \[T, L\]"):
        topk_indices(scores.astype(jnp.bfloat16), lengths, 8)
    with pytest.raises(ValueError, match=r"lengths \[T\]"):
        topk_indices(scores, lengths[:1], 8)
    with pytest.raises(ValueError, match="integers"):
        topk_indices(scores, lengths.astype(jnp.float32), 8)
