"""What to change so that a model fits: the nearest options that do."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from mtp_jax.engine.auto_layout import A_HOST
from mtp_jax.engine.options import EngineOptions
from mtp_jax.errors import InvalidValueError
from mtp_jax.plan.draw import Plan, draw_plan

LARGEST = 1024  # devices
SHORTEST = 1024  # tokens of max_model_len that are worth serving


@dataclasses.dataclass(frozen=True)
class Change:
    """Flags to change, and the plan that they lead to. A value of None: without the flag."""

    flags: Mapping[str, str | None]
    plan: Plan


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The options that are varied."""

    stages: int
    tensor: int
    dtype: str
    max_model_len: int

    @property
    def devices(self) -> int:
        return self.stages * self.tensor

    def changed(self, other: "_Choice") -> dict[str, int | str]:
        mine = dataclasses.asdict(self)
        return {name: value for name, value in mine.items() if value != getattr(other, name)}


def nearest(plan: Plan, options: EngineOptions) -> tuple[Change, ...]:
    """The nearest change that keeps the number of devices, and the nearest one that only adds to them."""
    config = plan.config
    now = _Choice(config.stages, config.tensor, config.dtype, config.max_model_len)
    meshes = _meshes(plan)
    halves = (now.max_model_len >> times for times in range(20))
    lengths = [now.max_model_len, *(length for length in halves if SHORTEST <= length < now.max_model_len)]
    dtypes = dict.fromkeys((now.dtype, "bfloat16" if now.dtype == "float32" else now.dtype))
    same = [
        _Choice(*mesh, dtype, length)
        for mesh in meshes
        for dtype in dtypes
        for length in lengths
        if mesh[0] * mesh[1] == now.devices
    ]
    more = [
        _Choice(*mesh, now.dtype, now.max_model_len) for mesh in meshes if mesh[0] * mesh[1] > now.devices
    ]
    # Shorter requests are the last resort; stages before shards.
    same.sort(key=lambda one: (-one.max_model_len, len(one.changed(now)), abs(one.stages - now.stages)))
    more.sort(key=lambda one: (one.devices, len(one.changed(now)), one.tensor != now.tensor, one.tensor))
    found = (_first(plan, options, now, choices) for choices in (same, more))
    return tuple(change for change in found if change is not None)


def _meshes(plan: Plan) -> list[tuple[int, int]]:
    """Stages and shards: those of the plan times or over powers of two, as many devices or more."""
    config, most = plan.config, plan.model.num_hidden_layers
    powers = [2**exponent for exponent in range(11)]
    stages = {config.stages * power for power in powers} | {config.stages // power for power in powers}
    shards = {config.tensor * power for power in powers} | {config.tensor // power for power in powers}
    meshes = ((z, t) for z in stages for t in shards if 1 <= z <= most and t >= 1)
    largest = max(A_HOST, config.tensor)
    devices = range(config.stages * config.tensor, LARGEST // config.data + 1)
    return [(z, t) for z, t in meshes if t <= largest and z * t in devices]


def _first(plan: Plan, options: EngineOptions, now: _Choice, choices: Iterable[_Choice]) -> Change | None:
    # What names the stages or the pages of a plan that does not fit makes no sense in another.
    dropped = {name for name in ("stage_layers", "num_pages") if name in options.overrides}
    kept = {name: value for name, value in options.overrides.items() if name not in dropped}
    dropped |= set() if options.kv_cache_gib is None else {"kv_cache_gib"}
    for choice in choices:
        changed = choice.changed(now)
        if (not changed and not dropped) or _least_bytes(plan, choice) > plan.device.usable:
            continue
        moved = {name: value for name, value in changed.items() if name != "dtype"}
        new = dataclasses.replace(options, dtype=choice.dtype, kv_cache_gib=None, overrides=kept | moved)
        try:
            candidate = draw_plan(plan.model, new, plan.device, plan.blocks)
        except InvalidValueError:
            continue
        if candidate.fits:
            flags: dict[str, str | None] = {name: str(value) for name, value in changed.items()}
            return Change(flags | dict.fromkeys(sorted(dropped)), candidate)
    return None


def _least_bytes(plan: Plan, choice: _Choice) -> float:
    """Bytes a device below which no layout of the weights can be: spares drawing most choices."""
    weights = plan.num_parameters + (plan.num_mtp_parameters if plan.layout.with_mtp else 0)
    size = 1 if plan.blocks else jnp.dtype(choice.dtype).itemsize  # float8: most weights, never less
    return weights * size / choice.devices
