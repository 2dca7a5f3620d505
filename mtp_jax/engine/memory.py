"""What an engine needs of each device's memory, before anything is allocated."""

import dataclasses
import math

import jax

from mtp_jax.config import EngineConfig
from mtp_jax.engine.state import EngineState, state_shapes, state_specs
from mtp_jax.engine.weights import WeightLayout, Weights
from mtp_jax.errors import InvalidValueError

CPU_CACHE_BYTES = 2**30
CACHE_SHARE = 0.85  # of what an accelerator has left beside the weights; the rest is for temporaries


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes a device. Weights and caches are exact; `available` is the device's word (None: unknown)."""

    weights: int
    page: int  # one page of every layer's cache and of the MTP cache
    num_pages: int
    page_size: int
    other: int  # flights, slots, and the sink behind each cache
    available: int | None

    @property
    def cache(self) -> int:
        return self.page * self.num_pages

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


def plan_memory(
    layout: WeightLayout, config: EngineConfig, kv_cache_gib: float | None, pages_given: bool
) -> MemoryPlan:
    """Chooses the number of pages unless the user did, and adds everything up.

    Raises:
      InvalidValueError: weights and caches together exceed the device, or no request would fit.
    """
    mesh = layout.placement.mesh
    weights = _bytes_per_device(layout.shapes(), layout.specs(), mesh)

    def state_bytes(num_pages: int) -> int:
        sized = dataclasses.replace(config, num_pages=num_pages)
        return _bytes_per_device(state_shapes(layout, sized), state_specs(layout, sized), mesh)

    page = state_bytes(2) - state_bytes(1)
    other = state_bytes(1) - page
    available = device_memory_bytes()
    request = config.pages_per_slot  # one request of the longest kind must fit
    free = None if available is None else max(0, available - weights - other)
    if kv_cache_gib is not None:
        num_pages = int(kv_cache_gib * 2**30 / page)
    elif pages_given:
        num_pages = config.num_pages
    elif free is None:
        # Four times what all slots can hold at once is room enough for a prefix cache.
        num_pages = max(min(CPU_CACHE_BYTES // page, 4 * config.max_num_seqs * request), request)
    else:
        num_pages = int(free * CACHE_SHARE / page)
    # XLA indexes a cache in 32 bits; without a prefix cache, pages beyond all slots could never be used.
    num_pages = min(num_pages, (2**31 - 1) // _elements_per_page(layout, config))
    if not (config.enable_prefix_caching or pages_given):
        num_pages = min(num_pages, config.max_num_seqs * request)
    plan = MemoryPlan(weights, page, num_pages, config.page_size, other, available)
    _check_memory(plan, config, kv_cache_gib, pages_given)
    return plan


def _elements_per_page(layout: WeightLayout, config: EngineConfig) -> int:
    """Of the largest cache."""
    return config.page_size * max(
        math.prod(rows.shape) for slot in layout.slot_caches for rows in slot if rows.per == "token"
    )


def _check_memory(
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


def _bytes_per_device(
    shapes: Weights | EngineState | tuple, specs: Weights | EngineState | tuple, mesh: jax.sharding.Mesh
) -> int:
    def size(array: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
        shard = jax.sharding.NamedSharding(mesh, spec).shard_shape(array.shape)
        return math.prod(shard) * array.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, specs)))
