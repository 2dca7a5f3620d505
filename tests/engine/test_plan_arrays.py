"""Plans as device arrays, and results as rows."""

import numpy as np

from mtp_jax.config import EngineConfig
from mtp_jax.engine.buckets import Bucket, Sampling
from mtp_jax.engine.plan_arrays import RESULT_FIELDS, PlanWriter, read_results
from mtp_jax.scheduler.plan import DEVICE_STOP_TOKENS, Chunk, DispatchPlan, RowResult, SlotView
from sharding.mesh import make_mesh
from sharding.placement import make_placement

CONFIG = EngineConfig(stages=2, max_num_seqs=3, page_size=4, num_speculative_tokens=2)
BUCKET = Bucket(1, 4, 8, 16, drafts=2)


def plan(*, chunks: tuple[Chunk | None, ...] = ()) -> DispatchPlan:
    slots = (
        SlotView(7, [5, 6], max_total=40, num_drafts=1, temperature=0.5, top_k=3, top_p=0.9, seed=-2),
        SlotView(),
        SlotView(9, [2], max_total=4, stop_token_ids=tuple(range(12))),
    )
    rows = ((0, -1), (2, -1))
    size = 16 if chunks else 0
    return DispatchPlan(
        0, 1, rows, slots, chunks, num_rows=2, width=2, chunk_size=size, has_lane=bool(chunks)
    )


def writer() -> PlanWriter:
    return PlanWriter(CONFIG, make_placement(make_mesh(2), {}))


def test_fields() -> None:
    """Padded to a bucket larger than the plan's own."""
    chunk = Chunk(slot=2, generation=9, start=4, token_ids=(8, 9, 10), next_token=-1)
    arrays = writer().write(plan(chunks=(None, chunk)), BUCKET)
    assert arrays.rows.tolist() == [[0, -1, -1, -1], [2, -1, -1, -1]]
    assert arrays.generation.tolist() == [7, 0, 9]
    assert arrays.capacity.tolist() == [8, 0, 4]
    assert arrays.max_total.tolist() == [40, 0, 4]
    assert arrays.num_drafts is not None and arrays.num_drafts.tolist() == [1, 0, 0]
    assert arrays.table.tolist() == [[5, 6, *[0] * 6], [0] * 8, [2, *[0] * 7]]
    np.testing.assert_allclose(arrays.temperature, [0.5, 0, 0])
    np.testing.assert_allclose(arrays.top_p, [0.9, 1, 1])
    assert arrays.top_k.tolist() == [3, 0, 0]
    assert arrays.seed.tolist() == [[2**32 - 2, 2**32 - 1], [0, 0], [0, 0]]
    assert arrays.stop_ids[0].tolist() == [-1] * DEVICE_STOP_TOKENS
    assert arrays.stop_ids[2].tolist() == list(range(DEVICE_STOP_TOKENS))
    chunks = arrays.chunks
    assert chunks is not None
    assert (chunks.slot.tolist(), chunks.generation.tolist()) == ([0, 2], [0, 9])
    assert (chunks.start.tolist(), chunks.count.tolist(), chunks.next_token.tolist()) == (
        [0, 4],
        [0, 3],
        [0, -1],
    )
    assert chunks.tokens[1].tolist() == [8, 9, 10, *[0] * 13]


def test_without_a_lane() -> None:
    assert writer().write(plan(), Bucket(1, 2, 2, 0)).chunks is None


def test_what_a_bucket_does_not_read_is_left_out() -> None:
    """An input that a program does not use crashes the compiler, and greedy programs use no noise."""
    names = ("num_drafts", "temperature", "seed", "top_k", "top_p")
    sender = writer()
    for bucket, read in (
        (Bucket(1, 2, 2, 0, 2, Sampling.ANY), names),
        (Bucket(1, 2, 2, 0, 1, Sampling.WHOLE), names),
        (Bucket(1, 2, 2, 0, 2, Sampling.NOISE), names[:3]),
        (Bucket(1, 2, 2, 0, 0, Sampling.NOISE), names[1:3]),
        (Bucket(1, 2, 2, 0, 0, Sampling.GREEDY), ()),
    ):
        arrays = sender.write(plan(), bucket)
        assert tuple(name for name in names if getattr(arrays, name) is not None) == read


def test_only_what_changed_is_sent() -> None:
    sender = writer()
    first = sender.write(plan(), Bucket(1, 2, 2, 0))
    grown = plan()
    grown.slots[0].pages.append(7)
    second = sender.write(grown, Bucket(1, 2, 4, 0))
    assert second.table is not first.table and second.capacity is not first.capacity
    assert second.table.tolist()[0] == [5, 6, 7, 0]
    for name in ("rows", "generation", "max_total", "stop_ids", "temperature", "top_k", "top_p", "seed"):
        assert getattr(second, name) is getattr(first, name), name
    third = sender.write(grown, Bucket(1, 2, 4, 0))
    assert third.table is second.table


def test_results() -> None:
    """In tick order; rows that produced nothing are left out, tokens past the count are not tokens."""
    packed = np.zeros((2, 2, RESULT_FIELDS + 3), np.int32)
    packed[0, 1] = (2, 9, 1, 0, 0, 50, 51, 52)
    packed[1, 0] = (0, 7, 3, 2, 2, 60, 61, 62)
    packed[1, 1] = (1, 8, 0, 2, 1, 70, 71, 72)
    assert read_results(packed, BUCKET) == [RowResult(2, 9, (50,), 0, 0), RowResult(0, 7, (60, 61, 62), 2, 2)]
