"""What an engine needs of each device's memory, before anything is allocated. Needs no device."""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mtp_jax.config import EngineConfig
from mtp_jax.engine.paged import sink_pages
from mtp_jax.engine.state import EngineState, state_shapes, state_specs
from mtp_jax.engine.weights import WeightLayout, Weights
from mtp_jax.errors import InvalidValueError
from mtp_jax.models.registry import mtp_caches

CPU_CACHE_BYTES = 2**30
CACHE_SHARE = 0.85  # of what an accelerator has left beside the weights; the rest is for temporaries


@dataclasses.dataclass(frozen=True)
class Parts:
    """Exact bytes a device, by what they are for. Pages are one page of all caches of their kind."""

    slots: tuple[int, ...]  # weights of each layer slot; empty ones have them too
    slot_pages: tuple[int, ...]  # one page of each layer slot's caches, likewise
    embedding: int
    lm_head: int  # and the final norm, and the rows that drafts are chosen from; little where it is tied
    mtp: int
    ngrams: int  # the table of hashed n-grams
    kv_page: int  # keys and values or latents of the trunk and of the MTP module
    indexer_page: int  # keys of indexers
    recurrent: int  # state of recurrent layers, by slot
    sinks: int  # behind each paged cache
    flights: int  # activations in the ring and the prefill lane, flights and slots

    @property
    def trunk(self) -> int:
        return sum(self.slots)

    @property
    def weights(self) -> int:
        return self.trunk + self.embedding + self.lm_head + self.mtp + self.ngrams


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes a device. Weights and state are exact; `available` is the device's word (None: unknown)."""

    parts: Parts
    num_pages: int
    page_size: int
    available: int | None

    @property
    def weights(self) -> int:
        return self.parts.weights

    @property
    def page(self) -> int:
        """One page of every layer's cache and of the MTP cache."""
        return self.parts.kv_page + self.parts.indexer_page

    @property
    def cache(self) -> int:
        return self.page * self.num_pages

    @property
    def other(self) -> int:
        """State that does not grow with the pages."""
        return self.parts.recurrent + self.parts.sinks + self.parts.flights

    @property
    def total(self) -> int:
        """All arrays that live as long as the engine; a step's temporaries come on top."""
        return self.weights + self.cache + self.other

    def describe(self) -> str:
        """One line for people."""
        gib = 2**30
        text = (
            f"{self.weights / gib:.2f} GiB weights + {self.cache / gib:.2f} GiB KV cache "
            f"({self.num_pages} pages of {self.page_size} tokens) a device"
        )
        return text if self.available is None else f"{text}, of {self.available / gib:.1f} GiB"


def device_memory_bytes() -> int | None:
    """Memory of the first device that this process may use; None where it does not say (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def measure(layout: WeightLayout, config: EngineConfig) -> Parts:
    """What every array of an engine takes on each device, whatever `num_pages` is."""
    weights = _sizes(layout.shapes(), layout.specs(), layout)

    def state_sizes(num_pages: int) -> EngineState:
        sized = dataclasses.replace(config, num_pages=num_pages)
        return _sizes(state_shapes(layout, sized), state_specs(layout, sized), layout)

    one, two = state_sizes(1), state_sizes(2)
    kv_page = indexer_page = sinks = recurrent = 0
    caches = list(zip(layout.slot_caches, one.caches, two.caches, strict=True))
    if one.mtp_cache is not None and two.mtp_cache is not None:
        caches.append((mtp_caches(layout.model), one.mtp_cache, two.mtp_cache))
    for table, *sizes in caches:
        for rows, small, large in zip(table, *sizes, strict=True):
            page = int(large) - int(small)
            if rows.per != "token":
                recurrent += int(small)
            elif rows.is_index:
                indexer_page, sinks = indexer_page + page, sinks + int(small) - page
            else:
                kv_page, sinks = kv_page + page, sinks + int(small) - page
    beside = dataclasses.replace(one, caches=(), mtp_cache=None)
    head = (weights.lm_head, weights.final_norm, weights.draft_head)
    return Parts(
        slots=tuple(map(_total, weights.trunk)),
        slot_pages=tuple(
            _total(large) - _total(small) for small, large in zip(one.caches, two.caches, strict=True)
        ),
        embedding=_total(weights.embedding),
        lm_head=_total(head),
        mtp=_total(weights.mtp),
        ngrams=_total(weights.ngrams),
        kv_page=kv_page,
        indexer_page=indexer_page,
        recurrent=recurrent,
        sinks=sinks,
        flights=_total(beside),
    )


def plan_memory(
    layout: WeightLayout,
    config: EngineConfig,
    kv_cache_gib: float | None,
    pages_given: bool,
    available: int | None,
) -> MemoryPlan:
    """Chooses the number of pages unless the user did, and adds everything up. `check_memory` judges it.

    Args:
      layout: where the weights lie.
      config: the engine's; its `num_pages` counts only where they are given.
      kv_cache_gib: the user's --kv-cache-gib.
      pages_given: whether the user chose `num_pages`.
      available: bytes of a device; None: unknown.
    """
    plan = MemoryPlan(measure(layout, config), config.num_pages, config.page_size, available)
    page, request = plan.page, config.pages_per_slot  # one request of the longest kind must fit
    free = None if available is None else max(0, available - plan.weights - plan.other)
    if kv_cache_gib is not None:
        num_pages = int(kv_cache_gib * 2**30 / page)
    elif pages_given:
        num_pages = config.num_pages
    elif free is None:
        # Four times what all slots can hold at once is room enough for a prefix cache.
        num_pages = max(min(CPU_CACHE_BYTES // page, 4 * config.slots_per_replica * request), request)
    else:
        num_pages = int(free * CACHE_SHARE / page)
    # XLA indexes a cache in 32 bits; without a prefix cache, pages beyond all slots could never be used.
    num_pages = min(num_pages, _most_pages(layout, config))
    if not (config.enable_prefix_caching or pages_given):
        num_pages = min(num_pages, config.slots_per_replica * request)
    return dataclasses.replace(plan, num_pages=num_pages)


def _most_pages(layout: WeightLayout, config: EngineConfig) -> int:
    """Pages of the largest cache that 32-bit indices reach, the sink behind them included."""
    caches = (*layout.slot_caches, mtp_caches(layout.model))
    row = max((math.prod(rows.shape) for slot in caches for rows in slot if rows.per == "token"), default=1)
    sink = sink_pages(
        config.rows_per_group * (config.num_speculative_tokens + 1) + config.prefill_chunk, config.page_size
    )
    return (2**31 - 1) // (config.page_size * row) - sink


def check_memory(
    plan: MemoryPlan, config: EngineConfig, kv_cache_gib: float | None, pages_given: bool
) -> None:
    """Raises InvalidValueError, naming what the user can change, where the plan cannot work."""
    gib = 2**30
    fixed = plan.weights + plan.other
    if plan.num_pages < 1 or (not pages_given and plan.num_pages < config.pages_per_slot):
        if kv_cache_gib is not None:
            least = config.pages_per_slot * plan.page / gib
            raise InvalidValueError(
                "--kv-cache-gib", kv_cache_gib, f"at least {least:.3f}, one request's pages"
            )
        longest = config.pages_per_slot * plan.page / gib
        got = f"{fixed / gib:.2f} GiB of weights and {longest:.2f} GiB a request"
        limit = (plan.available or 0) / gib
        legal = f"up to {limit:.2f} GiB a device; try more --stages or a smaller --max-model-len"
        raise InvalidValueError("--model", got, legal)
    if plan.available is not None and fixed + plan.cache > plan.available:
        flag, got = "--num-pages", plan.num_pages
        if kv_cache_gib is not None:
            flag, got = "--kv-cache-gib", kv_cache_gib
        most = max(0, plan.available - fixed)
        raise InvalidValueError(
            flag, got, f"at most {most / gib:.2f} GiB, which is {most // plan.page} pages"
        )


def _sizes[T: Weights | EngineState](shapes: T, specs: T, layout: WeightLayout) -> T:
    """Bytes of each array's shard, in the places of the arrays."""

    def size(array: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        shard = NamedSharding(layout.placement.mesh, spec).shard_shape(array.shape)
        return math.prod(shard) * array.dtype.itemsize

    return jax.tree.map(size, shapes, specs)


def _total(sizes: object) -> int:
    return sum(jax.tree.leaves(sizes))
