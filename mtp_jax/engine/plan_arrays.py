"""The scheduler's plan as device arrays, and the device's results as the scheduler's rows."""

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.config import EngineConfig
from mtp_jax.engine.buckets import Bucket
from mtp_jax.scheduler.plan import DispatchPlan, RowResult
from sharding.placement import Placement

MAX_STOP_IDS = 8  # stop tokens that the device itself watches for, a slot
RESULT_FIELDS = 5  # columns of a result row before its tokens: slot, generation, count, drafts, accepted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkArrays:
    """Chunks that enter at each tick of the dispatch; n = R * Z ticks. generation 0: none enters."""

    slot: jax.Array  # n
    generation: jax.Array  # n
    start: jax.Array  # n
    count: jax.Array  # n
    next_token: jax.Array  # n
    tokens: jax.Array  # n C


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanArrays:
    """A `DispatchPlan` on the device, replicated. U slots, W pages, B rows a group."""

    rows: jax.Array  # Z B int32 slot of each row, -1: none
    generation: jax.Array  # U
    capacity: jax.Array  # U positions that the slot's pages cover
    max_total: jax.Array  # U
    num_drafts: (
        jax.Array | None
    )  # U; None where K = 0 (an unused input crashes Shardy's compiler, jax 0.11.2)
    stop_ids: jax.Array  # U MAX_STOP_IDS, -1: none
    table: jax.Array  # U W
    temperature: jax.Array  # U float32
    top_k: jax.Array  # U
    top_p: jax.Array  # U float32
    seed: jax.Array  # U 2 uint32
    chunks: ChunkArrays | None  # None: no prefill lane in this dispatch


class PlanWriter:
    """Turns plans into device arrays, sending only the fields that changed since the last dispatch.

    In steady decode nothing changes but, now and then, a page table: a dispatch then moves no bytes.
    """

    def __init__(self, config: EngineConfig, placement: Placement):
        self._config = config
        self.placement = placement
        self._sharding = NamedSharding(placement.mesh, P())
        self._sent: dict[str, tuple[np.ndarray, jax.Array]] = {}

    def write(self, plan: DispatchPlan, bucket: Bucket) -> PlanArrays:
        """The plan padded to a bucket that is at least as large as the plan's own."""
        fields = self._slot_fields(plan, bucket)
        if bucket.chunk:
            fields |= {f"chunks.{name}": value for name, value in self._chunk_fields(plan, bucket).items()}
        arrays = self._send(fields)
        chunk_arrays = {name[7:]: value for name, value in arrays.items() if name.startswith("chunks.")}
        plain = {name: value for name, value in arrays.items() if not name.startswith("chunks.")}
        num_drafts = plain.pop("num_drafts", None)
        return PlanArrays(
            **plain, num_drafts=num_drafts, chunks=ChunkArrays(**chunk_arrays) if bucket.chunk else None
        )

    def _send(self, fields: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        stale = []
        for name, value in fields.items():
            sent = self._sent.get(name)
            if sent is None or sent[0].shape != value.shape or not np.array_equal(sent[0], value):
                stale.append(name)
        placed = jax.device_put([fields[name] for name in stale], self._sharding)
        for name, array in zip(stale, placed, strict=True):
            self._sent[name] = (fields[name], array)
        return {name: self._sent[name][1] for name in fields}

    def _slot_fields(self, plan: DispatchPlan, bucket: Bucket) -> dict[str, np.ndarray]:
        u = self._config.max_num_seqs
        rows = np.full((self._config.stages, bucket.rows), -1, np.int32)
        for group, slots in enumerate(plan.rows):
            rows[group, : len(slots)] = slots
        ints = np.zeros((u, 5), np.int32)
        floats = np.zeros((u, 2), np.float32)
        seeds = np.zeros((u, 2), np.uint32)
        stop_ids = np.full((u, MAX_STOP_IDS), -1, np.int32)
        table = np.zeros((u, bucket.width), np.int32)
        for index, slot in enumerate(plan.slots):
            if slot.generation == 0:
                continue
            capacity = len(slot.pages) * self._config.page_size
            ints[index] = (slot.generation, capacity, slot.max_total, slot.num_drafts, slot.top_k)
            floats[index] = (slot.temperature, slot.top_p)
            seeds[index] = (slot.seed & 0xFFFFFFFF, (slot.seed >> 32) & 0xFFFFFFFF)
            stop_ids[index, : len(slot.stop_token_ids)] = slot.stop_token_ids[:MAX_STOP_IDS]
            pages = slot.pages[: bucket.width]
            table[index, : len(pages)] = pages
        names = ("generation", "capacity", "max_total", "num_drafts", "top_k")
        columns = {name: np.ascontiguousarray(ints[:, i]) for i, name in enumerate(names)}
        if not self._config.num_speculative_tokens:
            del columns["num_drafts"]
        temperature, top_p = (np.ascontiguousarray(floats[:, i]) for i in range(2))
        return columns | {
            "rows": rows,
            "stop_ids": stop_ids,
            "table": table,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seeds,
        }

    def _chunk_fields(self, plan: DispatchPlan, bucket: Bucket) -> dict[str, np.ndarray]:
        ticks = bucket.rounds * self._config.stages
        ints = np.zeros((5, ticks), np.int32)
        tokens = np.zeros((ticks, bucket.chunk), np.int32)
        for tick, chunk in enumerate(plan.chunks):
            if chunk is not None:
                count = len(chunk.token_ids)
                ints[:, tick] = (chunk.slot, chunk.generation, chunk.start, count, chunk.next_token)
                tokens[tick, :count] = chunk.token_ids
        names = ("slot", "generation", "start", "count", "next_token")
        return {name: ints[i] for i, name in enumerate(names)} | {"tokens": tokens}


def read_results(packed: np.ndarray) -> list[RowResult]:
    """Results of a dispatch, [ticks, rows, RESULT_FIELDS + T], as rows in tick order; empty ones left out."""
    results = []
    for row in packed[packed[:, :, 2] > 0]:
        slot, generation, count, num_drafts, accepted = (int(x) for x in row[:RESULT_FIELDS])
        tokens = tuple(int(x) for x in row[RESULT_FIELDS : RESULT_FIELDS + count])
        results.append(RowResult(slot, generation, tokens, num_drafts, accepted))
    return results
