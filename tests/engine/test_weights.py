"""Where weights lie. That padding a vocabulary changes no token, tests/parity shows: TINY has 97 ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.engine.weights import WeightLayout
from sharding.mesh import make_mesh
from sharding.placement import make_placement
from sharding.stage_plan import balanced_plan
from tests.parity.rig import TINY, RandomSource


def layout_of(stages: int, vocab: int = 96) -> WeightLayout:
    model = dataclasses.replace(TINY, vocab_size=vocab)
    placement = make_placement(make_mesh(stages), {"mtp_kv_heads": 2, "mtp_ffn": 48, "mtp_out": 32})
    plan = balanced_plan(model.num_hidden_layers, stages)
    return WeightLayout(model, plan, placement, jnp.dtype("float32"), True)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_device_has_its_own_layers(stages: int) -> None:
    layout = layout_of(stages)
    source, reports = RandomSource(layout.model), []
    weights = layout.load(source.read, source.read, lambda done, total: reports.append((done, total)))
    assert jax.tree.map(lambda x: x.shape, weights) == jax.tree.map(lambda x: x.shape, layout.shapes())
    for slot, arrays in enumerate(weights.trunk):
        for leaf, array in zip(layout.slot_leaves(slot), arrays, strict=True):
            for shard in array.addressable_shards:
                stage = jax.devices().index(shard.device)
                layer = layout.plan.layer_at(slot, stage)
                expected = np.zeros(leaf.shape, np.float32)
                if layer is not None:
                    expected = leaf.read(source.read, f"model.layers.{layer}.")
                np.testing.assert_array_equal(shard.data[0], expected)
    assert reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_vocabulary_rows(stages: int) -> None:
    """97 rows: each device has an equal share, the last one's padded with zeros."""
    layout = layout_of(stages, vocab=97)
    source = RandomSource(layout.model)
    weights = layout.load(source.read, source.read, lambda done, total: None)
    share = -(-97 // stages)
    table = np.zeros((share * stages, 32), np.float32)
    table[:97] = source.read("model.embed_tokens.weight")
    assert layout.padded_vocab == share * stages
    for shard in weights.embedding.addressable_shards:
        first = share * jax.devices().index(shard.device)
        np.testing.assert_array_equal(shard.data, table[first : first + share])


def test_a_tied_head_is_stored_once() -> None:
    layout = dataclasses.replace(layout_of(2), model=dataclasses.replace(TINY, tie_word_embeddings=True))
    source = RandomSource(layout.model)
    assert layout.load(source.read, source.read, lambda done, total: None).lm_head is None


def test_a_part_that_several_devices_hold_is_read_once() -> None:
    """Replicas of the data axis have the same weights, and are no neighbours where there are shards too."""
    model = dataclasses.replace(TINY, num_hidden_layers=2)
    plan = balanced_plan(model.num_hidden_layers, 1)
    placement = make_placement(make_mesh(1, 2, 2), {"mtp_ffn": 48})
    layout, read = WeightLayout(model, plan, placement, jnp.dtype("float32"), False), []

    def part(index: tuple[slice, ...]) -> np.ndarray:
        read.append(index)
        return np.arange(8.0)[index]

    like = jax.ShapeDtypeStruct((8,), jnp.float32)
    array = layout._place(part, like, placement.spec("ffn"))  # type: ignore[arg-type]
    assert read == [(slice(0, 4),), (slice(4, 8),)]
    np.testing.assert_array_equal(array, np.arange(8.0))
    assert [shard.data[0] for shard in array.addressable_shards] == [0, 4, 0, 4]
