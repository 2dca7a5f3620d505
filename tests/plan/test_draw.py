"""A plan's bytes are those of the real arrays, and published models have their published sizes."""

import collections
import dataclasses
from pathlib import Path

import jax
import pytest

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.build import draw_layout
from mtp_jax.engine.memory import measure
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.state import init_state, state_shapes, state_specs
from mtp_jax.engine.weights import WeightLayout
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.plan.devices import DEVICES, FRACTION, Device
from mtp_jax.plan.draw import draw_plan
from sharding.mesh import abstract_mesh, make_mesh
from tests.house.source import ROOT
from tests.parity.rig import TINY, RandomSource

PUBLISHED = {
    path.name: config_from_directory(path) for path in sorted((ROOT / "configs/published").iterdir())
}
GOLDEN = Path(__file__).parents[1] / "golden"
OF_FAMILIES = {
    name: config_from_directory(GOLDEN / name)
    for name in ("tiny_deepseek_v3", "tiny_glm_moe_dsa", "tiny_glm4_moe", "tiny_qwen2", "tiny_qwen3_next")
}
OF_FAMILIES["tiny_qwen4_exp"] = config_from_directory(GOLDEN / "tiny_qwen4_exp")


def _layouts(config: ModelConfig, **engine: int | str) -> tuple[EngineConfig, WeightLayout, WeightLayout]:
    """The same on devices that are there, and on none."""
    mesh = {name: int(engine.get(name, 1)) for name in ("stages", "data", "tensor")}
    options = EngineConfig(max_model_len=64, max_num_seqs=6, prefill_chunk=16, **engine)  # type: ignore[arg-type]
    real = draw_layout(config, options, make_mesh(**mesh))
    return options, real, draw_layout(config, options, abstract_mesh(**mesh))


def _bytes_by_device(arrays: object) -> set[int]:
    """What the devices hold of these arrays; one number if they hold equally much."""
    held: dict[jax.Device, int] = collections.defaultdict(int)
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return set(held.values())


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", [*OF_FAMILIES, "tiny_mimo"])
def test_predicts_every_byte(name: str, mesh: tuple[int, int, int]) -> None:
    """Not within some per cent: shapes and shards are the engine's own."""
    model = OF_FAMILIES.get(name, TINY)
    stages, data, tensor = mesh
    if stages > model.num_hidden_layers:
        stages = 2
    drafts = 2 if model.num_nextn_predict_layers else 0
    options, real, planned = _layouts(
        model,
        stages=stages,
        data=data,
        tensor=tensor,
        num_speculative_tokens=drafts,
        draft_sampling="probabilistic",
        num_pages=19,
    )
    source = RandomSource(model)
    weights = real.load(source.read, source.read, lambda done, total: None, source.names())
    state = init_state(state_shapes(real, options), state_specs(real, options), real.placement)
    parts = measure(planned, options)
    head = (weights.lm_head, weights.final_norm, weights.draft_head)
    assert _bytes_by_device(weights.trunk) == {parts.trunk}
    assert [_bytes_by_device(slot) for slot in weights.trunk] == [{size} for size in parts.slots]
    assert _bytes_by_device(weights.embedding) == {parts.embedding}
    assert _bytes_by_device(head) == {parts.lm_head}
    assert _bytes_by_device(weights.mtp) == ({parts.mtp} if drafts else set())
    assert _bytes_by_device(weights.ngrams) == ({parts.ngrams} if model.ngram else set())
    page = parts.kv_page + parts.indexer_page
    caches = (state.caches, state.mtp_cache)
    assert _bytes_by_device(caches) == {page * 19 + parts.sinks + parts.recurrent}
    beside = dataclasses.replace(state, caches=(), mtp_cache=None)
    assert _bytes_by_device(beside) == {parts.flights}
    assert (parts.indexer_page > 0) == (model.indexer is not None or model.blocks is not None)
    assert (parts.recurrent > 0) == (model.delta is not None)


def test_experts_over_replicas() -> None:
    """Each device has a part of the experts; the MTP module is every replica's own."""
    model, mesh = OF_FAMILIES["tiny_deepseek_v3"], {"stages": 1, "data": 2, "tensor": 2}
    options, real, planned = _layouts(model, **mesh, num_pages=19, experts_over="data-tensor")
    source = RandomSource(model)
    weights = real.load(source.read, source.read, lambda done, total: None, source.names())
    parts, whole = measure(planned, options), measure(_layouts(model, **mesh, num_pages=19)[2], options)
    assert _bytes_by_device(weights.trunk) == {parts.trunk}
    assert parts.trunk < whole.trunk and parts.mtp == whole.mtp


@pytest.mark.parametrize(
    ("name", "target", "mtp"),
    [
        ("deepseek_v3", 671e9, 11.6e9),  # "11.5 B" are its layer; the projection into it is 0.1 B
        ("deepseek_v32", 671e9 + 61 * 14e6, 11.6e9),  # and an indexer in each layer
        ("glm_5", 744e9, 10e9),
        ("glm_52", 744e9 - 57 * 9.4e6, 10e9),  # 57 indexers fewer
        ("mimo_7b", 7.6e9, 0.21e9),
        # Experts of all layers, and the table of n-grams; the rest is 5 B.
        ("qwen38_flash_next", 48 * 512 * 3 * 640 * 2560 + 320_001_536 * 160 + 5e9, 2.6e9),
    ],
)
def test_published_sizes(name: str, target: float, mtp: float) -> None:
    plan = draw_plan(PUBLISHED[name], EngineOptions(), DEVICES["h200"])
    assert plan.num_parameters == pytest.approx(target, rel=1e-3 if target > 1e10 else 1e-2)
    assert plan.num_mtp_parameters == pytest.approx(mtp, rel=0.05)


def test_published_sizes_of_glm_45() -> None:
    """Its authors count the MTP module, and neither embedding nor LM head."""
    plan = draw_plan(PUBLISHED["glm_45"], EngineOptions(), DEVICES["h200"])
    tables = 2 * plan.model.vocab_size * plan.model.hidden_size
    assert round((plan.num_parameters + plan.num_mtp_parameters - tables) / 1e9) == 355
    air = draw_plan(PUBLISHED["glm_45_air"], EngineOptions(), DEVICES["h200"])
    assert 105e9 < air.num_parameters < 108e9


# Every fourth of its 48 layers is of another kind: 12 periods, of which one of 8 stages must hold two.
UNEVEN = {("qwen38_flash_next", 8): 16 / 12 - 1 + 0.01}  # and the second layer is a little larger


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_empty_slots_stay_below_15_per_cent(name: str, stages: int) -> None:
    plan = draw_plan(PUBLISHED[name], EngineOptions(overrides={"stages": stages}), DEVICES["h200"])
    assert plan.layout.plan.overhead < UNEVEN.get((name, stages), 0.15)


def test_empty_slots_in_bytes() -> None:
    """5 layers on 2 stages: the second leaves one slot empty, and its devices hold it all the same."""
    options = EngineOptions(overrides={"stages": 2, "num_pages": 1024, "max_model_len": 64})
    plan = draw_plan(TINY, options, DEVICES["h200"])
    first, second = plan.stages()
    assert (first.empty_slots, second.empty_slots) == (0, 1)
    assert second.empty_weights * 3 == plan.memory.parts.trunk == first.weights
    assert second.weights == 2 * second.empty_weights
    assert plan.layout.plan.overhead == pytest.approx(1 / 5)
    assert second.empty_page * 3 < plan.memory.page, "the MTP module has a cache too"


def test_what_fits() -> None:
    plan = draw_plan(PUBLISHED["mimo_7b"], EngineOptions(overrides={"max_model_len": 8192}), DEVICES["h100"])
    assert plan.fits and plan.memory.total <= plan.device.usable
    assert plan.num_tokens == 16 * plan.memory.num_pages
    assert plan.num_longest == plan.num_tokens // 8192
    small = draw_plan(PUBLISHED["mimo_7b"], EngineOptions(), DEVICES["v5e"])
    assert not small.fits and small.refusal is not None
    assert "of weights" in small.refusal and "14.90 GiB a device" in small.refusal


def test_jax_takes_a_part_of_a_gpu() -> None:
    device = Device("h200", 1000, True)
    assert device.fraction({}) == 0.75 and device.fraction({FRACTION: "0.9"}) == 0.9
    assert Device("v5e", 1000, False).fraction({FRACTION: "0.9"}) == 1
