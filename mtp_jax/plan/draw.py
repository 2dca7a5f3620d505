"""A plan's numbers: the engine's own functions on a mesh that does not exist."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.build import draw_layout
from mtp_jax.engine.memory import MemoryPlan, check_memory, plan_memory
from mtp_jax.engine.options import EngineOptions, resolve_config
from mtp_jax.engine.weights import WeightLayout, with_float8
from mtp_jax.errors import InvalidValueError
from mtp_jax.models.registry import expected_tensors, layer_kinds, mtp_tensors
from mtp_jax.plan.devices import Device
from sharding.mesh import abstract_mesh


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage; bytes are those of each of its devices."""

    first: int  # layer
    last: int
    kinds: dict[str, int]  # layers of each kind
    weights: int
    empty_slots: int
    empty_weights: int  # of slots that this stage leaves empty
    empty_page: int  # a page of their caches


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model on a mesh of devices of one kind."""

    model: ModelConfig
    config: EngineConfig  # but for `num_pages`, which is `memory`'s
    device: Device
    layout: WeightLayout
    memory: MemoryPlan
    refusal: str | None  # why it does not fit
    blocks: Mapping[str, int]  # columns that share a scale, of tensors that are in float8

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def num_devices(self) -> int:
        return self.config.stages * self.config.data * self.config.tensor

    @property
    def num_parameters(self) -> int:
        """Of the target, without its MTP module."""
        target = dataclasses.replace(self.model, num_nextn_predict_layers=0)
        return sum(math.prod(shape) for shape in expected_tensors(target).values())

    @property
    def num_mtp_parameters(self) -> int:
        """Of the MTP module, without the embedding and the LM head, which are the target's."""
        if not self.model.num_nextn_predict_layers:
            return 0
        return sum(math.prod(shape) for shape in mtp_tensors(self.model).values())

    @property
    def num_tokens(self) -> int:
        """Tokens that a replica's pages hold."""
        return self.memory.num_pages * self.memory.page_size

    @property
    def num_longest(self) -> int:
        """Requests of `max_model_len` tokens whose pages a replica holds at once."""
        return self.memory.num_pages // self.config.pages_per_slot

    def stages(self) -> tuple[Stage, ...]:
        """Every stage's layers and empty slots."""
        plan, parts, kinds = self.layout.plan, self.memory.parts, layer_kinds(self.model)
        found = []
        for stage, layers in enumerate(plan.layers):
            empty = [slot for slot in range(plan.num_slots) if plan.layer_at(slot, stage) is None]
            unused = sum(parts.slots[slot] for slot in empty)
            found.append(
                Stage(
                    first=layers[0],
                    last=layers[-1],
                    kinds=dict(collections.Counter(kinds[layer].describe() for layer in layers)),
                    weights=parts.trunk - unused,
                    empty_slots=len(empty),
                    empty_weights=unused,
                    empty_page=sum(parts.slot_pages[slot] for slot in empty),
                )
            )
        return tuple(found)


def draw_plan(
    model: ModelConfig,
    options: EngineOptions,
    device: Device,
    blocks: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """Plans an engine with these options on as many devices as its mesh has. Needs none of them.

    `blocks`: columns that share a scale, of tensors that are in float8.

    Raises:
      InvalidValueError: an option that cannot work on any device.
    """
    config = resolve_config(options, model, has_mtp=model.num_nextn_predict_layers > 0, on_cpu=False)
    layout = draw_layout(model, config, abstract_mesh(config.stages, config.data, config.tensor))
    layout = with_float8(layout, blocks)
    pages_given = "num_pages" in options.overrides
    memory = plan_memory(layout, config, options.kv_cache_gib, pages_given, device.usable)
    refusal = None
    try:
        check_memory(memory, config, options.kv_cache_gib, pages_given)
    except InvalidValueError as error:
        where = "" if error.field == "--model" else f"{error.field}: "
        refusal = f"{where}got {error.got}; expected {error.legal}"
    return Plan(model, config, device, layout, memory, refusal, blocks)
