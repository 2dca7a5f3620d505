"""The scheduler's plan as device arrays, and the device's results as the scheduler's rows."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.config import EngineConfig
from mtp_jax.engine.buckets import Bucket, Report, Sampling
from mtp_jax.engine.logprobs import PROMPT_ROW, unpack, unpack_all
from mtp_jax.engine.sampling import RowSampling
from mtp_jax.request import TokenLogprobs
from mtp_jax.scheduler.plan import DEVICE_STOP_TOKENS, DispatchPlan, RowResult, SlotView
from sharding.hosts import place
from sharding.mesh import DATA
from sharding.placement import Placement

PLAN_SPEC = P(DATA)  # of every array of a plan: along its first axis, replica by replica
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
    """A `DispatchPlan` on the device. U slots, W pages, B rows a group.

    Shapes and slots are those of one replica, whose devices all have its part; see `PLAN_SPEC`.
    """

    rows: jax.Array  # Z B int32 slot of each row, -1: none
    generation: jax.Array  # U
    capacity: jax.Array  # U positions that the slot's pages cover
    max_total: jax.Array  # U
    stop_ids: jax.Array  # U DEVICE_STOP_TOKENS, -1: none
    table: jax.Array  # U W
    # What the bucket does not read is None: an unused input crashes Shardy's compiler (jax 0.11.2).
    num_drafts: jax.Array | None  # U; None without drafts
    temperature: jax.Array | None  # U float32; None in greedy buckets
    seed: jax.Array | None  # U 2 uint32; likewise
    top_k: jax.Array | None  # U; None where whole rows are not needed
    top_p: jax.Array | None  # U float32; likewise
    chunks: ChunkArrays | None  # None: no prefill lane in this dispatch
    masks: jax.Array | None = None  # U T words uint32, of grammars; there in steps that shape logits

    def sampling(self, slot: jax.Array, position: jax.Array) -> RowSampling:
        """Parameters of rows with these slots, for tokens at these positions (of one shape)."""
        assert self.temperature is not None and self.seed is not None
        top_k = jnp.zeros_like(slot) if self.top_k is None else self.top_k[slot]
        top_p = jnp.ones(slot.shape, jnp.float32) if self.top_p is None else self.top_p[slot]
        return RowSampling(self.temperature[slot], top_k, top_p, self.seed[slot], position)


def unread_fields(bucket: Bucket) -> frozenset[str]:
    """Fields of `PlanArrays` that a bucket's step does not read."""
    unread = {Sampling.GREEDY: ("temperature", "seed", "top_k", "top_p"), Sampling.NOISE: ("top_k", "top_p")}
    return frozenset(unread.get(bucket.sampling, ())) | (frozenset() if bucket.drafts else {"num_drafts"})


@dataclasses.dataclass(frozen=True)
class GuidedRows:
    """Masks of the requests of a dispatch that have a grammar, on the host."""

    slots: np.ndarray  # int32 [n]
    masks: np.ndarray  # uint32 [n, K + 1, words]; token t is bit t % 32 of word t // 32


@dataclasses.dataclass(frozen=True)
class PlanChanges:
    """What the devices have to be told for one dispatch, on the host: the same in every process."""

    fields: dict[str, np.ndarray]  # of PlanArrays, those that changed
    chunks: dict[str, np.ndarray] | None  # of ChunkArrays; None without a lane
    guided: GuidedRows | None = None  # None where no request has a grammar


class PlanWriter:
    """Turns plans into device arrays, sending only what changed since the last dispatch.

    On several hosts process 0 finds the changes, and every process applies them in the same order.

    In steady decode nothing changes but, now and then, a page table: a dispatch then moves no bytes, and
    the host looks at no more than (generation, number of pages) of each slot: under one generation
    parameters are fixed and page lists only grow.
    """

    def __init__(self, config: EngineConfig, placement: Placement):
        u = config.max_num_seqs
        self.placement = placement
        self._config = config
        self._sharding = NamedSharding(placement.mesh, PLAN_SPEC)
        self._seen = [(0, 0)] * u  # (generation, pages) of each slot, as written below
        self._table = np.zeros((u, config.pages_per_slot), np.int32)
        self._columns = {
            "generation": np.zeros(u, np.int32),
            "capacity": np.zeros(u, np.int32),
            "max_total": np.zeros(u, np.int32),
            "num_drafts": np.zeros(u, np.int32),
            "stop_ids": np.full((u, DEVICE_STOP_TOKENS), -1, np.int32),
            "temperature": np.zeros(u, np.float32),
            "top_k": np.zeros(u, np.int32),
            "top_p": np.ones(u, np.float32),
            "seed": np.zeros((u, 2), np.uint32),
        }
        self._sent: dict[str, jax.Array] = {}
        self._sent_rows: tuple[tuple[int, ...], ...] = ()
        self._sent_sizes = (0, 0)  # pages of the table and rows a group; (0, 0) before the first plan

    def write(self, plan: DispatchPlan, bucket: Bucket) -> PlanArrays:
        """The plan padded to a bucket that is at least as large as the plan's own."""
        return self.apply(self.changes(plan, bucket), bucket)

    def changes(self, plan: DispatchPlan, bucket: Bucket) -> PlanChanges:
        """What `write` has to send."""
        fields = self._changed_slots(plan.slots)
        width, rows = self._sent_sizes
        if width != bucket.width or "capacity" in fields:
            fields["table"] = self._table[:, : bucket.width]
        if rows != bucket.rows or plan.rows != self._sent_rows:
            fields["rows"] = self._rows(plan, bucket)
            self._sent_rows = plan.rows
        self._sent_sizes = bucket.width, bucket.rows
        # Copies: the CPU back end may keep using a host array's memory, and these are written to again.
        fields = {name: array.copy() for name, array in fields.items()}
        return PlanChanges(fields, self._chunks(plan, bucket) if bucket.chunk else None)

    def apply(self, changes: PlanChanges, bucket: Bucket) -> PlanArrays:
        """Sends the changes of a dispatch; the arrays of its step."""
        self._sent |= place(changes.fields, self._sharding)
        chunks = None if changes.chunks is None else ChunkArrays(**place(changes.chunks, self._sharding))
        unread = unread_fields(bucket)
        read = {name: None if name in unread else array for name, array in self._sent.items()}
        return PlanArrays(**read, chunks=chunks)  # pyright: ignore[reportArgumentType]

    def _changed_slots(self, slots: Sequence[SlotView]) -> dict[str, np.ndarray]:
        """Brings the host arrays up to date; returns those that the device has to get."""
        new_request = grown = self._sent_sizes == (0, 0)
        for index, slot in enumerate(slots):
            now = (slot.generation, len(slot.pages))
            if now == self._seen[index]:
                continue
            if slot.generation != self._seen[index][0]:
                self._put_request(index, slot)
                new_request = True
            self._columns["capacity"][index] = len(slot.pages) * self._config.page_size
            self._table[index, : len(slot.pages)] = slot.pages
            self._seen[index] = now
            grown = True
        if new_request:
            return dict(self._columns)
        return {"capacity": self._columns["capacity"]} if grown else {}

    def _put_request(self, index: int, slot: SlotView) -> None:
        stop_ids = np.full(DEVICE_STOP_TOKENS, -1, np.int32)
        stop_ids[: len(slot.stop_token_ids)] = slot.stop_token_ids[:DEVICE_STOP_TOKENS]
        values = {
            "generation": slot.generation,
            "max_total": slot.max_total,
            "num_drafts": slot.num_drafts,
            "stop_ids": stop_ids,
            "temperature": slot.temperature,
            "top_k": slot.top_k,
            "top_p": slot.top_p,
            "seed": (slot.seed & 0xFFFFFFFF, (slot.seed >> 32) & 0xFFFFFFFF),
        }
        for name, value in values.items():
            self._columns[name][index] = value

    def _rows(self, plan: DispatchPlan, bucket: Bucket) -> np.ndarray:
        config = self._config
        rows = np.full((config.data * config.stages, bucket.rows), -1, np.int32)
        for group, slots in enumerate(plan.rows):
            rows[group, : len(slots)] = slots
        return np.where(rows < 0, rows, rows % config.slots_per_replica)

    def _chunks(self, plan: DispatchPlan, bucket: Bucket) -> dict[str, np.ndarray]:
        ticks = self._config.data * bucket.rounds * self._config.stages
        ints = np.zeros((5, ticks), np.int32)
        tokens = np.zeros((ticks, bucket.chunk), np.int32)
        for tick, chunk in enumerate(plan.chunks):
            if chunk is not None:
                count = len(chunk.token_ids)
                slot = chunk.slot % self._config.slots_per_replica
                ints[:, tick] = (slot, chunk.generation, chunk.start, count, chunk.next_token)
                tokens[tick, :count] = chunk.token_ids
        names = ("slot", "generation", "start", "count", "next_token")
        return {name: ints[i] for i, name in enumerate(names)} | {"tokens": tokens}


def number_slots(packed: np.ndarray, config: EngineConfig) -> np.ndarray:
    """Results of a dispatch with the engine's numbers of slots instead of each replica's own."""
    if config.data == 1:
        return packed
    ticks, rows, fields = packed.shape
    by_replica = packed.reshape(ticks, config.data, rows // config.data, fields).copy()
    by_replica[..., 0] += config.slots_per_replica * np.arange(config.data, dtype=packed.dtype)[:, None]
    return by_replica.reshape(packed.shape)


def read_results(packed: np.ndarray, bucket: Bucket, slots: Sequence[SlotView] = ()) -> list[RowResult]:
    """Results of a dispatch, [ticks, rows, fields], as rows in tick order; empty ones left out.

    Args:
      packed: with the engine's numbers of slots; a row is RESULT_FIELDS, then the bucket's k + 1 tokens, then
        the next k drafts where it shapes logits, then the tokens' reports where it has them.
      slots: those of the plan, which say who wants log-probabilities.
    """
    first, results = RESULT_FIELDS + bucket.drafts + 1, []
    told = bucket.drafts if bucket.sampling is Sampling.SHAPED else 0
    for row in packed[packed[:, :, 2] > 0]:
        slot, generation, count, num_drafts, accepted, *tokens = row[: first + told].tolist()
        emitted, wanted, logprobs = tuple(tokens[:count]), None, ()
        proposals = tuple(tokens[bucket.drafts + 1 :])
        if bucket.report and slots[slot].generation == generation:
            wanted = slots[slot].logprobs
        if wanted is not None:
            logprobs = unpack_all(emitted, row[first + told :], wanted)
        results.append(RowResult(slot, generation, emitted, num_drafts, accepted, logprobs, proposals))
    return results


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """The log-probability of one token of a prompt, the `position`-th from 0."""

    slot: int
    generation: int
    position: int
    logprobs: TokenLogprobs


def read_prompt_results(packed: np.ndarray, bucket: Bucket, slots: Sequence[SlotView]) -> list[PromptResult]:
    """Those of a dispatch that somebody wants, in tick order; arguments as for `read_results`."""
    if bucket.report is not Report.PROMPTS:
        return []
    results = []
    for row in packed[packed[:, :, 2] == PROMPT_ROW]:
        slot, generation, _, position, token = row[:RESULT_FIELDS].tolist()
        view = slots[slot]
        if view.generation == generation and view.prompt_logprobs is not None:
            entry = unpack(token, row[RESULT_FIELDS:], view.prompt_logprobs)
            results.append(PromptResult(slot, generation, position, entry))
    return results
