"""A plan as a table for people, and as JSON for programs."""

import json
from collections.abc import Sequence

from mtp_jax.models.registry import layer_kinds
from mtp_jax.plan.devices import FRACTION
from mtp_jax.plan.draw import Plan
from mtp_jax.plan.search import Change
from mtp_jax.server.arguments import flag_of

GIB = 2**30
_LABEL = 36


def table(plan: Plan, changes: Sequence[Change]) -> str:
    """The whole plan; `changes` are what would make it fit."""
    parts = [_head(plan), _stages(plan), _memory(plan), _verdict(plan)]
    if not plan.fits:
        parts.append(_changes(plan, changes))
    return "\n\n".join(parts)


def _head(plan: Plan) -> str:
    config, model, device = plan.config, plan.model, plan.device
    mtp = f" + {plan.num_mtp_parameters / 1e9:.2f} B in the MTP module" if plan.num_mtp_parameters else ""
    taken = f", of which JAX takes {device.fraction():.0%} ({FRACTION})" if device.is_gpu else ""
    k = config.num_speculative_tokens
    kind = f"float8 and {config.dtype}" if plan.layout.groups else config.dtype
    lines = [
        f"model        {model.model_type}, {plan.num_parameters / 1e9:.2f} B parameters{mtp}, {kind}",
        f"mesh         stage {config.stages} x data {config.data} x tensor {config.tensor} = "
        f"{plan.num_devices} x {device.name} of {device.memory / GIB:.1f} GiB{taken}",
        f"speculation  {f'up to {k} drafts' if config.adaptive_drafts else f'{k} drafts' if k else 'off'}",
        f"requests     {config.max_num_seqs} at a time, {config.max_model_len} tokens each at most",
    ]
    whole = sorted(_replicated(plan))
    if whole:
        lines.append(f"replicated   {', '.join(whole)}: the mesh does not divide them")
    return "\n".join(lines)


def _replicated(plan: Plan) -> frozenset[str]:
    """Logical axes of this model's weights and caches that every device of their mesh axes has whole."""
    layout = plan.layout
    trunk = (leaf for leaves in layout.trunk_leaves for leaf in leaves)
    leaves = [*trunk, *(layout.mtp_leaves if layout.with_mtp else ())]
    used = {axis for leaf in leaves for axis in leaf.axes if axis is not None}
    return layout.placement.replicated & used


def _stages(plan: Plan) -> str:
    lines = [f"{'stage':<7}{'layers':<9}{'GiB a device':>13}{'empty slots':>13}{'GiB':>8}   kinds"]
    for number, stage in enumerate(plan.stages()):
        kinds = ", ".join(f"{count} {kind}" for kind, count in stage.kinds.items())
        span = f"{stage.first}-{stage.last}"
        empty = f"{stage.empty_slots:>13}{stage.empty_weights / GIB:>8.2f}"
        lines.append(f"{number:<7}{span:<9}{stage.weights / GIB:>13.2f}{empty}   {kinds}")
    stage_plan, wasted = plan.layout.plan, sum(stage.empty_weights for stage in plan.stages())
    shards = plan.config.data * plan.config.tensor
    mixed = f", {len(stage_plan.mixed)} of two kinds" if stage_plan.mixed else ""
    slots = f"{stage_plan.num_slots} layer slots a stage{mixed}"
    taken = f"{wasted * shards / GIB:.2f} GiB of all devices, {stage_plan.overhead:.1%} on top of the trunk"
    lines.append(f"{slots}; empty ones take {taken}")
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    memory, parts = plan.memory, plan.memory.parts
    unused = max(stage.empty_page for stage in plan.stages()) * memory.num_pages
    rows = [
        ("trunk weights", parts.trunk),
        ("embedding", parts.embedding),
        ("LM head", parts.lm_head),
        ("MTP module", parts.mtp),
        ("n-gram table", parts.ngrams),
        ("latents" if plan.model.latent is not None else "keys and values", parts.kv_page * memory.num_pages),
        ("indexer keys", parts.indexer_page * memory.num_pages),
        ("recurrent state", parts.recurrent),
        ("flights, slots and sinks", parts.flights + parts.sinks),
    ]
    lines = [f"{'bytes a device':<{_LABEL}}{'GiB':>10}"]
    lines += [f"  {name:<{_LABEL - 2}}{size / GIB:>10.3f}" for name, size in rows if size]
    lines.append(f"{'together':<{_LABEL}}{memory.total / GIB:>10.3f}")
    lines.append(f"{'the device has':<{_LABEL}}{plan.device.usable / GIB:>10.3f}")
    if plan.fits:
        free = plan.device.usable - memory.total
        lines.append(f"{'left for temporaries of a step':<{_LABEL}}{free / GIB:>10.3f}")
    if unused:
        lines.append(f"(pages of empty slots: up to {unused / GIB:.3f} GiB of a device)")
    return "\n".join(lines)


def _verdict(plan: Plan) -> str:
    if plan.refusal is not None:
        return f"does not fit: {plan.refusal}"
    where = " in each replica" if plan.config.data > 1 else ""
    memory = plan.memory
    return (
        f"fits: {memory.num_pages} pages of {memory.page_size} tokens, {plan.num_tokens} tokens, "
        f"{plan.num_longest} requests of {plan.config.max_model_len} tokens{where}"
    )


def _changes(plan: Plan, changes: Sequence[Change]) -> str:
    if not changes:
        return "no layout of up to 1024 such devices fits"
    lines = []
    for change in changes:
        given = [f"{flag_of(name)} {value}" for name, value in change.flags.items() if value is not None]
        dropped = [flag_of(name) for name, value in change.flags.items() if value is None]
        words = [("with", given), ("without", dropped)]
        flags = [word for joint, names in words if names for word in (joint, *names)]
        new = change.plan
        devices = "" if new.num_devices == plan.num_devices else f" on {new.num_devices} devices"
        room = f"{new.memory.total / GIB:.1f} GiB a device, {new.num_longest} requests of full length"
        lines.append(f"fits {' '.join(flags)}{devices}: {room}")
    return "\n".join(lines)


def as_json(plan: Plan, changes: Sequence[Change]) -> str:
    """Everything; sizes are bytes."""
    return json.dumps(_values(plan) | {"changes": [_change(change) for change in changes]}, indent=1)


def _change(change: Change) -> dict[str, object]:
    plan = change.plan
    return {
        "flags": {flag_of(name): value for name, value in change.flags.items()},
        "devices": plan.num_devices,
        "total": plan.memory.total,
    }


def _values(plan: Plan) -> dict[str, object]:
    config, memory, parts = plan.config, plan.memory, plan.memory.parts
    kinds = [kind.describe() for kind in layer_kinds(plan.model)]
    return {
        "model_type": plan.model.model_type,
        "parameters": plan.num_parameters,
        "mtp_parameters": plan.num_mtp_parameters,
        "dtype": config.dtype,
        "mesh": {"stage": config.stages, "data": config.data, "tensor": config.tensor},
        "device": {
            "name": plan.device.name,
            "memory": plan.device.memory,
            "usable": plan.device.usable,
        },
        "num_speculative_tokens": config.num_speculative_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "replicated": sorted(_replicated(plan)),
        "stages": [
            {
                "layers": [stage.first, stage.last],
                "kinds": stage.kinds,
                "weights": stage.weights,
                "empty_slots": stage.empty_slots,
                "empty_weights": stage.empty_weights,
                "empty_page": stage.empty_page,
            }
            for stage in plan.stages()
        ],
        "slots": [kinds[plan.layout.plan.any_layer(slot)] for slot in range(plan.layout.plan.num_slots)],
        "mixed_slots": list(plan.layout.plan.mixed),
        "overhead": plan.layout.plan.overhead,
        "bytes": {
            "trunk": parts.trunk,
            "embedding": parts.embedding,
            "lm_head": parts.lm_head,
            "mtp": parts.mtp,
            "ngrams": parts.ngrams,
            "kv": parts.kv_page * memory.num_pages,
            "indexer_keys": parts.indexer_page * memory.num_pages,
            "recurrent": parts.recurrent,
            "flights": parts.flights,
            "sinks": parts.sinks,
            "total": memory.total,
        },
        "page": memory.page,
        "page_size": memory.page_size,
        "num_pages": memory.num_pages,
        "num_tokens": plan.num_tokens,
        "num_longest": plan.num_longest,
        "fits": plan.fits,
        "refusal": plan.refusal,
    }
