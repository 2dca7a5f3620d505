"""Everything that must survive a dispatch, as one frozen pytree that each dispatch donates.

Three owners, and nothing is shared between them:

  * a *slot* owns what a request carries between rounds (length, last token, drafts);
  * a *flight* (one group of rows in the ring) owns what it was built with, until it leaves the last stage;
  * a *chunk* in the prefill lane owns its tokens and place, likewise.

Flights and chunks carry (slot, generation). Where the slot's generation has moved on, they are dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.paged import sink_pages
from sharding.placement import Placement

_pytree = functools.partial(jax.tree_util.register_dataclass)


@_pytree
@dataclasses.dataclass(frozen=True)
class Slots:
    """Per request slot, replicated. A slot is live from the end of its prompt, under its generation."""

    generation: jax.Array  # U int32   the request these fields belong to; 0: none
    length: jax.Array  # U int32       positions with valid KV: known tokens minus the last one
    last_token: jax.Array  # U int32   known, not yet in the cache
    drafts: jax.Array | None  # U K int32  proposals for the tokens after last_token; None where K = 0
    finished: jax.Array  # U bool      a stop token or max_total was reached
    draft_logits: (
        jax.Array | None
    )  # U K V float32  log q up to a constant, split along V; None: one-hot drafts


@_pytree
@dataclasses.dataclass(frozen=True)
class Flight:
    """Rows of each of the Z groups of the ring, replicated; B is the largest row bucket."""

    slot: jax.Array  # Z B int32
    generation: jax.Array  # Z B int32
    start: jax.Array  # Z B int32      position of the first token of the row
    tokens: jax.Array  # Z B T int32   last token, then drafts; -1: absent
    live: jax.Array  # Z B bool


@_pytree
@dataclasses.dataclass(frozen=True)
class Lane:
    """Prompt chunks in flight, replicated, by the tick (mod Z) at which they entered."""

    slot: jax.Array  # Z int32
    generation: jax.Array  # Z int32
    start: jax.Array  # Z int32        position of the first token
    count: jax.Array  # Z int32        tokens in the chunk
    next_token: jax.Array  # Z int32   the prompt's next token; -1: the chunk ends the prompt
    tokens: jax.Array  # Z C int32
    live: jax.Array  # Z bool


@_pytree
@dataclasses.dataclass(frozen=True)
class EngineState:
    slots: Slots
    flight: Flight
    lane: Lane
    rows_x: jax.Array  # Z B T D   residual stream about to enter each stage, split along Z
    lane_x: jax.Array  # Z C D     the same for the prefill lane
    caches: tuple[tuple[jax.Array, jax.Array], ...]  # per layer slot: keys, values, each Z P page G H
    mtp_cache: tuple[jax.Array, jax.Array] | None  # P page G H each; None where K = 0


def _keeps_logits(config: EngineConfig) -> bool:
    return config.draft_sampling == "probabilistic" and config.num_speculative_tokens > 0


def state_specs(
    model: ModelConfig, config: EngineConfig, placement: Placement, num_layer_slots: int
) -> EngineState:
    """The state's PartitionSpecs, in the state's own shape."""
    cache = placement.spec("layer_stage", None, None, "kv_heads", None)
    mtp_cache = placement.spec(None, None, "mtp_kv_heads", None)
    return EngineState(
        slots=Slots(
            P(),
            P(),
            P(),
            P() if config.num_speculative_tokens else None,
            P(),
            placement.spec(None, None, "vocab") if _keeps_logits(config) else None,
        ),
        flight=Flight(P(), P(), P(), P(), P()),
        lane=Lane(P(), P(), P(), P(), P(), P(), P()),
        rows_x=placement.spec("layer_stage"),
        lane_x=placement.spec("layer_stage"),
        caches=((cache, cache),) * num_layer_slots,
        mtp_cache=(mtp_cache, mtp_cache) if config.num_speculative_tokens else None,
    )


def state_shapes(model: ModelConfig, config: EngineConfig, num_layer_slots: int, vocab: int) -> EngineState:
    """The state as ShapeDtypeStructs: what the memory plan adds up. `vocab` is padded to the head's devices."""
    u, z, b, c = config.max_num_seqs, config.stages, config.rows_per_group, config.prefill_chunk
    k, d = config.num_speculative_tokens, model.hidden_size
    dtype = jnp.dtype(config.dtype)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def flags(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bool_)

    sink = sink_pages(b * (k + 1) + c, config.page_size)
    pages = (config.num_pages + sink, config.page_size, model.num_key_value_heads, model.head_dim)
    cache = jax.ShapeDtypeStruct((z, *pages), dtype)
    mtp_cache = jax.ShapeDtypeStruct(pages, dtype)
    kept = jax.ShapeDtypeStruct((u, k, vocab), jnp.float32) if _keeps_logits(config) else None
    return EngineState(
        slots=Slots(ints(u), ints(u), ints(u), ints(u, k) if k else None, flags(u), kept),
        flight=Flight(ints(z, b), ints(z, b), ints(z, b), ints(z, b, k + 1), flags(z, b)),
        lane=Lane(ints(z), ints(z), ints(z), ints(z), ints(z), ints(z, c), flags(z)),
        rows_x=jax.ShapeDtypeStruct((z, b, k + 1, d), dtype),
        lane_x=jax.ShapeDtypeStruct((z, c, d), dtype),
        caches=((cache, cache),) * num_layer_slots,
        mtp_cache=(mtp_cache, mtp_cache) if k else None,
    )


def init_state(shapes: EngineState, specs: EngineState, placement: Placement) -> EngineState:
    """An empty engine: all zeros, so nothing is live and every page is free. Placed as the step returns it."""
    shardings = jax.tree.map(lambda spec: NamedSharding(placement.mesh, spec), specs)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=shardings
    )
    return zeros()
