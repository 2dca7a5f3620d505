"""The ring: what every device does at a tick, inside shard_map.

At tick t stage s works on group (t - s) mod Z and on the prompt chunk that entered at tick t - s.
Group (t + 1) mod Z leaves the last stage, is verified and drafted by the head (all devices together),
is rebuilt from its slots, and enters stage 0 at the next tick. So the pipeline never drains.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mtp_jax.engine.buckets import Bucket
from mtp_jax.engine.head import Head
from mtp_jax.engine.leaving import Chunk, VerifyRows
from mtp_jax.engine.ngrams import NgramTable, advance_context
from mtp_jax.engine.paged import PagedAttention, Segment
from mtp_jax.engine.plan_arrays import ChunkArrays, PlanArrays
from mtp_jax.engine.state import Carry, EngineState, Flight, Lane
from mtp_jax.models.layers import Cache, Rope, rope_tables
from mtp_jax.models.scaled import Weight
from mtp_jax.models.streams import repeat_streams
from sharding.mesh import DATA, STAGE
from sharding.stage_plan import StagePlan


@dataclasses.dataclass(frozen=True)
class Group:
    """One group's rows of the flight: fields as in `Flight`, without the leading Z."""

    slot: jax.Array
    generation: jax.Array
    start: jax.Array
    tokens: jax.Array
    valid: jax.Array  # B bool: live, and its slot still belongs to the same generation
    stood: jax.Array


Leaves = tuple[Weight, ...]  # weights of one layer
# One decoder layer: (leaves, carry of M rows, cache, rope tables, attention) -> (carry, cache). Jitted, so
# that many layers of a kind are traced and lowered once, though XLA still sees each layer by itself.
RunLayer = Callable[[Leaves, Carry, Cache, Rope, PagedAttention], tuple[Carry, Cache]]


@dataclasses.dataclass(frozen=True)
class Ring:
    """One device's part of one dispatch; every array it holds is this device's shard.

    Replicas go through the same ticks, each with its own slots: what is decided on the device, such as
    whether a group has work, differs between them, and nothing in here moves from one to another but the
    tokens of experts, where replicas share them.
    """

    bucket: Bucket
    stage_plan: StagePlan
    layers: Sequence[Leaves]
    run_layers: Sequence[Sequence[RunLayer | None]]  # by layer slot and stage; None: empty there
    head: Head
    plan: PlanArrays
    shares_experts: bool = False
    ngrams: NgramTable | None = None  # None: the model has no n-gram embeddings

    @property
    def num_stages(self) -> int:
        return self.stage_plan.num_stages

    def dispatch(self, state: EngineState) -> tuple[EngineState, jax.Array, jax.Array]:
        """All ticks. Returns (state, results [ticks, rows, fields], useful stage-ticks: a scalar)."""
        ticks = self.bucket.rounds * self.num_stages

        def body(carry: tuple[EngineState, jax.Array], x: tuple[jax.Array, ChunkArrays | None]):
            state, useful = carry
            state, results, busy = self.tick(state, *x)
            return (state, useful + busy), results

        numbers = jnp.arange(ticks, dtype=jnp.int32)
        none = jax.lax.pcast(jnp.int32(0), DATA, to="varying")
        (state, useful), results = jax.lax.scan(body, (state, none), (numbers, self.plan.chunks))
        return state, results, useful

    def tick(
        self, state: EngineState, tick: jax.Array, entering: ChunkArrays | None
    ) -> tuple[EngineState, jax.Array, jax.Array]:
        """One tick. Returns (state, results [rows, fields], number of stages that had work)."""
        z = self.num_stages
        here = (tick - jax.lax.axis_index(STAGE)) % z
        leaving = (tick + 1) % z
        if entering is not None:
            state = self._enter_chunk(state, tick % z, entering)
        busy = self._busy_stages(state)
        carry, caches = self._run_stage(state, here)
        state = dataclasses.replace(state, caches=caches)
        state, results = self._run_head(state, leaving, carry.x)
        flight, embedded = self._rebuild(state, leaving)
        state = dataclasses.replace(state, flight=flight)
        return self._pass_on(state, carry, embedded), results, busy

    # Reading flights

    def _group(self, flight: Flight, index: jax.Array) -> Group:
        rows = self.bucket.rows
        fields = (flight.slot, flight.generation, flight.start, flight.tokens, flight.live, flight.stood)
        slot, generation, start, tokens, live, stood = (
            jax.lax.dynamic_index_in_dim(field, index, keepdims=False)[:rows] for field in fields
        )
        tokens = tokens[:, : self.bucket.drafts + 1]
        valid = live & (self.plan.generation[slot] == generation)
        return Group(slot, generation, start, tokens, valid, stood)

    def _chunk(self, lane: Lane, index: jax.Array) -> tuple[Chunk, jax.Array]:
        """The chunk that entered at this tick (mod Z), and its generation."""
        fields = (lane.slot, lane.generation, lane.start, lane.count, lane.next_token, lane.tokens, lane.live)
        slot, generation, start, count, following, tokens, live = (
            jax.lax.dynamic_index_in_dim(field, index, keepdims=False) for field in fields
        )
        valid = live & (self.plan.generation[slot] == generation)
        return Chunk(slot, start, count, following, tokens[: self.bucket.chunk], valid), generation

    def _busy_stages(self, state: EngineState) -> jax.Array:
        """Stages that have something valid to do: each group, and each chunk, is in exactly one stage."""
        flight, lane, current = state.flight, state.lane, self.plan.generation
        rows = slice(0, self.bucket.rows)
        busy = flight.live[:, rows] & (current[flight.slot[:, rows]] == flight.generation[:, rows])
        busy = jnp.any(busy, axis=1)
        if self.bucket.chunk:
            busy |= lane.live & (current[lane.slot] == lane.generation)
        return jnp.sum(busy, dtype=jnp.int32)

    def _has_work(self, state: EngineState, index: jax.Array) -> jax.Array:
        work = jnp.any(self._group(state.flight, index).valid)
        if self.bucket.chunk:
            work |= self._chunk(state.lane, index)[0].valid
        return work

    # The steps of a tick

    def _enter_chunk(self, state: EngineState, index: jax.Array, new: ChunkArrays) -> EngineState:
        """Puts the tick's chunk into the lane and its embeddings before stage 0."""
        lane, size, slots = state.lane, self.bucket.chunk, state.slots
        lane = Lane(
            slot=lane.slot.at[index].set(new.slot),
            generation=lane.generation.at[index].set(new.generation),
            start=lane.start.at[index].set(new.start),
            count=lane.count.at[index].set(new.count),
            next_token=lane.next_token.at[index].set(new.next_token),
            tokens=lane.tokens.at[index, :size].set(new.tokens),
            live=lane.live.at[index].set(new.count > 0),
        )
        context = None
        if slots.context is not None and self.ngrams is not None:
            context = jnp.where(new.start == 0, self.ngrams.empty_context(), slots.context[new.slot])[None]
            # A prompt's tokens stand: the next chunk, or what is emitted, comes behind them.
            after = advance_context(context, new.tokens[None], new.count[None])[0]
            at = jnp.where(new.count > 0, new.slot, slots.context.shape[0])
            slots = dataclasses.replace(slots, context=slots.context.at[at].set(after, mode="drop"))
        first = jax.lax.axis_index(STAGE) == 0

        def put(rows: jax.Array, embedded: jax.Array) -> jax.Array:
            embedded = embedded[0].astype(rows.dtype)
            return rows.at[0, :size].set(jnp.where(first, embedded, rows[0, :size]))

        embedded = self._embed(new.tokens[None], context)
        rows = _where_embedded(state.lane_rows, embedded, put)
        return dataclasses.replace(state, slots=slots, lane=lane, lane_rows=rows)

    def _embed(self, tokens: jax.Array, context: jax.Array | None) -> Carry:
        """What tokens [B, T] enter stage 0 with, behind those of `context` [B, J] where that counts."""
        vocabulary = self.head.vocabulary
        x = vocabulary.embed(tokens.reshape(-1)).reshape(*tokens.shape, -1)
        ngram = None
        if self.ngrams is not None and context is not None:
            ngram = self.ngrams.embed(tokens, context)
        return Carry(repeat_streams(x, self.head.model), None, ngram)

    def _run_stage(self, state: EngineState, here: jax.Array) -> tuple[Carry, tuple[Cache, ...]]:
        """This stage's layers over its group and chunk: (carry [M, ...], caches)."""
        group = self._group(state.flight, here)
        b, t = group.tokens.shape
        columns = jnp.arange(t, dtype=jnp.int32)
        limit = jnp.where(group.valid, self.plan.capacity[group.slot], 0)
        positions = group.start[:, None] + columns
        segments = [Segment(self.plan.table[group.slot], positions, limit, group.slot, group.stood)]
        carry = jax.tree.map(lambda x: x[0, :b, :t].reshape(b * t, -1), state.rows)
        if self.bucket.chunk:
            chunk, _ = self._chunk(state.lane, here)
            positions = chunk.start + jnp.arange(self.bucket.chunk, dtype=jnp.int32)
            limit = jnp.where(chunk.valid, chunk.start + chunk.count, 0)
            table, slot = self.plan.table[chunk.slot][None], chunk.slot[None]
            segments.append(Segment(table, positions[None], limit[None], slot))
            carry = jax.tree.map(
                lambda x, lane: jnp.concatenate([x, lane[0, : self.bucket.chunk]]), carry, state.lane_rows
            )
        attend = PagedAttention(tuple(segments), self.head.config.page_size)
        caches = jax.tree.map(lambda cache: cache[0], state.caches)

        def run(carry: Carry, caches: tuple[Cache, ...]) -> tuple[Carry, tuple[Cache, ...]]:
            return self._run_layers(carry, caches, attend)

        if self.num_stages == 1:  # a dispatch without work is never launched
            carry, caches = run(carry, caches)
        else:
            work = self._has_work(state, here)
            if self.shares_experts:  # replicas meet inside, so they go in together
                work = jax.lax.pmax(work.astype(jnp.int32), DATA) > 0
            carry, caches = jax.lax.cond(work, run, lambda carry, caches: (carry, caches), carry, caches)
        return carry, jax.tree.map(lambda cache: cache[None], caches)

    def _split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Token rows [M, ...] as those of the group, [B, T, ...], and of the chunk, [C, ...]."""
        b, t = self.bucket.rows, self.bucket.drafts + 1
        return x[: b * t].reshape(b, t, -1), x[b * t :]

    def _run_layers(
        self, carry: Carry, caches: tuple[Cache, ...], attend: PagedAttention
    ) -> tuple[Carry, tuple[Cache, ...]]:
        """The stage's layers, unrolled, over M rows."""
        arrived = carry
        indexer = self.head.model.indexer
        if indexer is not None and carry.indices is None:  # the stage's first layer chooses them
            nothing = jnp.full((carry.x.shape[0], indexer.topk), -1, jnp.int32)
            carry = dataclasses.replace(carry, indices=jax.lax.pcast(nothing, (STAGE, DATA), to="varying"))
        rope = rope_tables(attend.positions, self.head.model)
        stage = jax.lax.axis_index(STAGE)
        new_caches = []
        for slot, (leaves, cache) in enumerate(zip(self.layers, caches, strict=True)):
            stages = self.run_layers[slot]
            ways = list(dict.fromkeys(stages))  # in which stages run this slot
            runs = [_skip_layer if way is None else functools.partial(way, leaves) for way in ways]
            if len(runs) == 1:
                carry, cache = runs[0](carry, cache, rope, attend)
            else:
                here = jnp.array([ways.index(way) for way in stages])[stage]
                carry, cache = jax.lax.switch(here, runs, carry, cache, rope, attend)
            new_caches.append(cache)
        if arrived.indices is None:
            carry = dataclasses.replace(carry, indices=None)
        return carry, tuple(new_caches)

    def _run_head(
        self, state: EngineState, leaving: jax.Array, x: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        """Verifies and drafts what leaves the last stage. Returns (state, results [rows, fields])."""
        rows, chunk = self._leaving(state, leaving)
        hidden, lane_hidden = self._split(self._from_last_stage(x))
        lane_hidden = lane_hidden if self.bucket.chunk else None

        def run(slots, mtp_cache, hidden, lane_hidden):
            return self.head(slots, mtp_cache, rows, chunk, hidden, lane_hidden)

        operands = (state.slots, state.mtp_cache, hidden, lane_hidden)
        if self.num_stages == 1:
            slots, mtp_cache, results = run(*operands)
        else:
            shape = jax.eval_shape(run, *operands)[2]

            def skip(slots, mtp_cache, hidden, lane_hidden):
                nothing = jax.lax.pcast(jnp.zeros(shape.shape, shape.dtype), DATA, to="varying")
                return slots, mtp_cache, nothing

            work = jnp.any(rows.valid) if chunk is None else jnp.any(rows.valid) | chunk.valid
            slots, mtp_cache, results = jax.lax.cond(work, run, skip, *operands)
        return dataclasses.replace(state, slots=slots, mtp_cache=mtp_cache), results

    def _leaving(self, state: EngineState, leaving: jax.Array) -> tuple[VerifyRows, Chunk | None]:
        group = self._group(state.flight, leaving)
        drafts, in_chunk = group.tokens[:, 1:], jnp.zeros_like(group.valid)
        rows = VerifyRows(group.slot, group.generation, group.start, drafts, group.valid, in_chunk)
        if not self.bucket.chunk:
            return rows, None
        chunk, generation = self._chunk(state.lane, leaving)
        absent = jnp.full(rows.drafts.shape[1:], -1, jnp.int32)
        with_chunk = VerifyRows(
            slot=jnp.append(rows.slot, chunk.slot),
            generation=jnp.append(rows.generation, generation),
            start=jnp.append(rows.start, chunk.start + chunk.count - 1),
            drafts=jnp.concatenate([rows.drafts, absent[None]]),
            valid=jnp.append(rows.valid, chunk.valid & (chunk.next_token < 0)),
            in_chunk=jnp.append(in_chunk, True),
        )
        return with_chunk, chunk

    def _from_last_stage(self, x: jax.Array) -> jax.Array:
        """The last stage's x on every stage."""
        last = jax.lax.axis_index(STAGE) == self.num_stages - 1
        return jax.lax.psum(jnp.where(last, x, jnp.zeros((), x.dtype)), STAGE)

    def _rebuild(self, state: EngineState, leaving: jax.Array) -> tuple[Flight, Carry]:
        """Builds the leaving group anew from its slots. Returns (flight, its embeddings [B, T, ...])."""
        plan, slots, k = self.plan, state.slots, self.head.config.num_speculative_tokens
        assigned = jax.lax.dynamic_index_in_dim(plan.rows, leaving, keepdims=False)  # B
        slot = jnp.maximum(assigned, 0)
        length, max_total = slots.length[slot], plan.max_total[slot]
        fits = jnp.minimum(length + 2 * k + 1, max_total) <= plan.capacity[slot]
        current = (slots.generation[slot] == plan.generation[slot]) & (plan.generation[slot] > 0)
        live = (assigned >= 0) & current & ~slots.finished[slot] & fits
        tokens = slots.last_token[slot][:, None]
        if plan.num_drafts is not None and slots.drafts is not None:
            # The bonus token always counts: drafts beyond max_total could only be cut again.
            offered = jnp.minimum(plan.num_drafts[slot], max_total - length - 2)
            columns = jnp.arange(self.bucket.drafts)
            drafts = jnp.where(columns < offered[:, None], slots.drafts[slot, : columns.size], -1)
            tokens = jnp.concatenate([tokens, drafts], axis=1)
        embedded = self._embed(tokens, None if slots.context is None else slots.context[slot])
        # A step that verifies fewer drafts than its follower leaves the other columns without any. What the
        # follower then computes there, of a flight that it finds midway, is never accepted and never read.
        tokens = jnp.pad(tokens, ((0, 0), (0, k - self.bucket.drafts)), constant_values=-1)

        def put(field: jax.Array, rows: jax.Array) -> jax.Array:
            return field.at[leaving, : self.bucket.rows].set(rows)

        old = state.flight
        flight = Flight(
            slot=put(old.slot, slot),
            generation=put(old.generation, plan.generation[slot]),
            start=put(old.start, length),
            tokens=put(old.tokens, tokens),
            live=put(old.live, live),
            stood=put(old.stood, slots.stood[slot]),
        )
        return flight, embedded

    def _pass_on(self, state: EngineState, carry: Carry, embedded: Carry) -> EngineState:
        """Moves every stage's output to the next one, in one piece; the rebuilt group enters stage 0."""
        first = jax.lax.axis_index(STAGE) == 0
        forward = [(s, (s + 1) % self.num_stages) for s in range(self.num_stages)]
        sent, unpack = _packed(carry)
        arrived = unpack(jax.lax.ppermute(sent, STAGE, forward))
        rows = jax.tree.map(lambda x: self._split(x)[0], arrived)
        entering = _where_embedded(
            rows, embedded, lambda old, new: jnp.where(first, new.astype(old.dtype), old)
        )
        b, t, c = self.bucket.rows, self.bucket.drafts + 1, self.bucket.chunk
        new_rows = jax.tree.map(lambda old, new: old.at[0, :b, :t].set(new), state.rows, entering)
        lane = state.lane_rows
        if c:
            lane = jax.tree.map(lambda old, new: old.at[0, :c].set(self._split(new)[1]), lane, arrived)
        return dataclasses.replace(state, rows=new_rows, lane_rows=lane)


def _packed(carry: Carry) -> tuple[jax.Array, Callable[[jax.Array], Carry]]:
    """A carry as one array [M, ...], and what makes a carry of such an array: a message costs its latency."""
    indices = carry.indices
    values = [carry.x] if carry.ngram is None else [carry.x, carry.ngram]
    widths = [value.shape[1] for value in values]
    x = jnp.concatenate(values, axis=1)

    def of_values(x: jax.Array, indices: jax.Array | None) -> Carry:
        ngram = None if carry.ngram is None else x[:, widths[0] :]
        return Carry(x[:, : widths[0]], indices, ngram)

    if indices is None:
        return x, lambda sent: of_values(sent, None)
    # As integers, for no bit of an index may be taken for a NaN's.
    word = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    words = jax.lax.bitcast_convert_type(indices, word).reshape(indices.shape[0], -1)

    def unpack(sent: jax.Array) -> Carry:
        halves = sent[:, sum(widths) :].reshape(*indices.shape, *(() if word == jnp.uint32 else (2,)))
        x_back = jax.lax.bitcast_convert_type(sent[:, : sum(widths)], x.dtype)
        return of_values(x_back, jax.lax.bitcast_convert_type(halves, jnp.int32))

    return jnp.concatenate([jax.lax.bitcast_convert_type(x, word), words], axis=1), unpack


def _where_embedded(rows: Carry, embedded: Carry, put: Callable[[jax.Array, jax.Array], jax.Array]) -> Carry:
    """The rows with put(field, embedded field) for what embeddings say, the other fields as they are."""
    ngram = rows.ngram
    if ngram is not None and embedded.ngram is not None:
        ngram = put(ngram, embedded.ngram)
    return dataclasses.replace(rows, x=put(rows.x, embedded.x), ngram=ngram)


def _skip_layer(carry: Carry, cache: Cache, rope: Rope, attend: PagedAttention) -> tuple[Carry, Cache]:
    """An empty layer slot: computes nothing, writes nothing."""
    del rope, attend
    return carry, cache
