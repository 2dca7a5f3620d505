"""Everything that must survive a dispatch, as one frozen pytree that each dispatch donates.

Three owners, and nothing is shared between them:

  * a *slot* owns what a request carries between rounds (length, last token, drafts);
  * a *flight* (one group of rows in the ring) owns what it was built with, until it leaves the last stage;
  * a *chunk* in the prefill lane owns its tokens and place, likewise.

Flights and chunks carry (slot, generation). Where the slot's generation has moved on, they are dropped.

Shapes below are those of one replica, which are what its devices see. Along the first axis of each array
(the second where the first one is of stages) the replicas' parts lie one behind another, split over `data`.
Slots and pages are numbered within a replica, so no device ever reads of another replica.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mtp_jax.config import EngineConfig
from mtp_jax.engine.paged import sink_pages
from mtp_jax.engine.shaping_state import ShapingState
from mtp_jax.engine.trees import spec_of, stand_in
from mtp_jax.engine.weights import WeightLayout
from mtp_jax.models.layers import Cache, CacheRows
from mtp_jax.models.registry import mtp_caches
from sharding.mesh import DATA
from sharding.placement import Placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Per request slot, on all devices of its replica.

    A slot is live from the end of its prompt, under its generation.
    """

    generation: jax.Array  # U int32   the request these fields belong to; 0: none
    length: jax.Array  # U int32       positions with valid KV: known tokens minus the last one
    last_token: jax.Array  # U int32   known, not yet in the cache
    drafts: jax.Array | None  # U K int32  proposals for the tokens after last_token; None where K = 0
    finished: jax.Array  # U bool      a stop token or max_total was reached
    stood: jax.Array  # U int32        rows of the last round that stand, for recurrent layers to replay
    draft_logits: (
        jax.Array | None
    )  # U K Vd float32  log q up to a constant, split along Vd; None: one-hot drafts
    shaping: ShapingState | None = None  # there only in steps that shape logits
    # U J int32: the tokens before last_token; in a prompt, those before its next chunk. None without n-grams
    context: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flight:
    """Rows of each of the Z groups of the ring, on all devices of a replica; B is the largest row bucket."""

    slot: jax.Array  # Z B int32
    generation: jax.Array  # Z B int32
    start: jax.Array  # Z B int32      position of the first token of the row
    tokens: jax.Array  # Z B T int32   last token, then drafts; -1: absent
    live: jax.Array  # Z B bool
    stood: jax.Array  # Z B int32      rows of the slot's round before that stand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lane:
    """Prompt chunks in flight, likewise, by the tick (mod Z) at which they entered."""

    slot: jax.Array  # Z int32
    generation: jax.Array  # Z int32
    start: jax.Array  # Z int32        position of the first token
    count: jax.Array  # Z int32        tokens in the chunk
    next_token: jax.Array  # Z int32   the prompt's next token; -1: the chunk ends the prompt
    tokens: jax.Array  # Z C int32
    live: jax.Array  # Z bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What token rows take from one stage to the next."""

    x: jax.Array  # ... D            residual stream; or ... S D, all of them
    indices: jax.Array | None  # ... J int32  positions of the last indexer; None where no stage needs them
    ngram: jax.Array | None = None  # ... X  the tokens' n-gram embeddings; None: the model has none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    slots: Slots
    flight: Flight
    lane: Lane
    rows: Carry  # what is about to enter each stage, each Z B T ..., split along Z
    lane_rows: Carry  # the same for the prefill lane, Z C ...
    caches: tuple[Cache, ...]  # per layer slot, each array Z P page ...
    mtp_cache: Cache | None  # each array P page ...; None where K = 0


def with_shaping(state: EngineState, shaping: ShapingState | None) -> EngineState:
    """The state (or its specs or shapes) of a step that shapes logits; None takes it out again."""
    return dataclasses.replace(state, slots=dataclasses.replace(state.slots, shaping=shaping))


def _keeps_logits(config: EngineConfig) -> bool:
    return config.draft_sampling == "probabilistic" and config.num_speculative_tokens > 0


def state_specs(layout: WeightLayout, config: EngineConfig) -> EngineState:
    """The state's PartitionSpecs, in the state's own shape."""
    placement = layout.placement
    whole = stand_in(placement.spec("replica"))
    by_stage = stand_in(placement.spec("layer_stage", "replica"))
    logits = stand_in(placement.spec("replica", None, "vocab")) if _keeps_logits(config) else None
    drafts = config.num_speculative_tokens > 0
    ngrams = layout.model.ngram is not None
    carry = Carry(by_stage, by_stage if layout.carries_indices else None, by_stage if ngrams else None)
    slots = Slots(whole, whole, whole, whole if drafts else None, whole, whole, logits)

    def cache(rows: tuple[CacheRows, ...], *leading: str | None) -> Cache:
        entries = {"token": ("replica", None), "slot": ("replica",), "round": ("replica", None)}
        return tuple(stand_in(placement.spec(*leading, *entries[row.per], *row.axes)) for row in rows)

    return EngineState(
        slots=dataclasses.replace(slots, context=whole if ngrams else None),
        flight=Flight(whole, whole, whole, whole, whole, whole),
        lane=Lane(whole, whole, whole, whole, whole, whole, whole),
        rows=carry,
        lane_rows=carry,
        caches=tuple(cache(rows, "layer_stage") for rows in layout.slot_caches),
        mtp_cache=cache(mtp_caches(layout.model)) if drafts else None,
    )


def state_shapes(layout: WeightLayout, config: EngineConfig) -> EngineState:
    """The state as ShapeDtypeStructs, for the memory plan."""
    model, draft_vocab = layout.model, layout.padded_draft_vocab
    u, z, b, c = config.slots_per_replica, config.stages, config.rows_per_group, config.prefill_chunk
    k, dtype = config.num_speculative_tokens, jnp.dtype(config.dtype)

    def array(shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
        return stand_in(jax.ShapeDtypeStruct(shape, dtype))

    group, lane = array((z, b)), array((z,))
    sink = sink_pages(b * (k + 1) + c, config.page_size)
    pages = (config.num_pages + sink, config.page_size)

    def cache(rows: tuple[CacheRows, ...], *leading: int) -> Cache:
        # Behind the slots is a sink, as there is one behind the pages.
        entries = {"token": pages, "slot": (u + 1,), "round": (u + 1, k + 1)}
        return tuple(array((*leading, *entries[row.per], *row.shape), row.dtype or dtype) for row in rows)

    def carry(*rows: int) -> Carry:
        indices = None
        if layout.carries_indices and model.indexer is not None:
            indices = array((*rows, model.indexer.topk))
        ngram = None if model.ngram is None else array((*rows, model.ngram.width), dtype)
        return Carry(array((*rows, model.residual_width), dtype), indices, ngram)

    one = EngineState(  # a replica's
        slots=Slots(
            generation=array((u,)),
            length=array((u,)),
            last_token=array((u,)),
            drafts=array((u, k)) if k else None,
            finished=array((u,), jnp.bool_),
            stood=array((u,)),
            draft_logits=array((u, k, draft_vocab), jnp.float32) if _keeps_logits(config) else None,
            context=None if model.ngram is None else array((u, model.ngram.context)),
        ),
        flight=Flight(group, group, group, array((z, b, k + 1)), array((z, b), jnp.bool_), group),
        lane=Lane(lane, lane, lane, lane, lane, array((z, c)), array((z,), jnp.bool_)),
        rows=carry(z, b, k + 1),
        lane_rows=carry(z, c),
        caches=tuple(cache(rows, z) for rows in layout.slot_caches),
        mtp_cache=cache(mtp_caches(model)) if k else None,
    )

    def of_all(shape: jax.Array, spec: jax.Array) -> jax.Array:
        at = tuple(spec_of(spec)).index(DATA)
        sizes = (*shape.shape[:at], config.data * shape.shape[at], *shape.shape[at + 1 :])
        return array(sizes, shape.dtype)

    return jax.tree.map(of_all, one, state_specs(layout, config))


def init_state(shapes: EngineState, specs: EngineState, placement: Placement) -> EngineState:
    """An empty engine: zeros, so nothing is live and every page is free. Placed as steps return it."""
    shardings = jax.tree.map(lambda spec: NamedSharding(placement.mesh, spec), specs)

    def zeros() -> EngineState:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    return jax.jit(zeros, out_shardings=shardings)()
