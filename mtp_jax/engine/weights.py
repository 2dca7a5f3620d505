"""Which weights the program takes: their shapes, places, and reading them from a checkpoint."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.config import ModelConfig
from mtp_jax.engine.trees import spec_of, stand_in
from mtp_jax.models.registry import Leaf, Read, layer_leaves, mtp_leaves
from sharding.placement import Placement
from sharding.stage_plan import StagePlan

MTP_PREFIX = "model.mtp_layers.0."


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """All weights, as flat leaves in the order of their `Leaf` tables; nothing is stored twice."""

    trunk: tuple[tuple[jax.Array, ...], ...]  # per layer slot, each leaf with a leading stage axis
    embedding: jax.Array  # V D, rows spread over the head's devices
    lm_head: jax.Array | None  # V D likewise; None where the model ties it to the embedding
    final_norm: jax.Array  # D
    mtp: tuple[jax.Array, ...] | None  # None where the engine drafts nothing


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Shapes and places of `Weights` for one model on one mesh."""

    model: ModelConfig
    plan: StagePlan
    placement: Placement
    dtype: jnp.dtype
    with_mtp: bool

    @property
    def trunk_leaves(self) -> tuple[Leaf, ...]:
        return layer_leaves(self.model, kv_heads="kv_heads", ffn="ffn")

    @property
    def mtp_leaves(self) -> tuple[Leaf, ...]:
        return mtp_leaves(self.model)

    @property
    def head_devices(self) -> int:
        """Devices that share the vocabulary."""
        return self.placement.axis_size("vocab")

    @property
    def padded_vocab(self) -> int:
        return -(-self.model.vocab_size // self.head_devices) * self.head_devices

    def specs(self) -> Weights:
        """PartitionSpecs in the shape of `Weights`."""

        def spec(*logical: str | None) -> jax.Array:
            return stand_in(self.placement.spec(*logical))

        layer = tuple(spec("layer_stage", *leaf.axes) for leaf in self.trunk_leaves)
        rows = spec("vocab", None)
        return Weights(
            trunk=(layer,) * self.plan.num_slots,
            embedding=rows,
            lm_head=None if self.model.tie_word_embeddings else rows,
            final_norm=spec(None),
            mtp=tuple(spec(*leaf.axes) for leaf in self.mtp_leaves) if self.with_mtp else None,
        )

    def shapes(self) -> Weights:
        """ShapeDtypeStructs in the shape of `Weights`: what the memory plan adds up."""

        def array(*shape: int) -> jax.Array:
            return stand_in(jax.ShapeDtypeStruct(shape, self.dtype))

        layer = tuple(array(self.plan.num_stages, *leaf.shape) for leaf in self.trunk_leaves)
        rows = array(self.padded_vocab, self.model.hidden_size)
        return Weights(
            trunk=(layer,) * self.plan.num_slots,
            embedding=rows,
            lm_head=None if self.model.tie_word_embeddings else rows,
            final_norm=array(self.model.hidden_size),
            mtp=tuple(array(*leaf.shape) for leaf in self.mtp_leaves) if self.with_mtp else None,
        )

    def load(self, read: Read, read_mtp: Read | None, report: Callable[[int, int], None]) -> Weights:
        """Reads, converts and places every weight, one leaf at a time.

        `read` gives a target tensor by its Hugging Face name, `read_mtp` one of the MTP module;
        `report` is called with (leaves done, leaves in all).
        """
        total = self.plan.num_slots * len(self.trunk_leaves) + 3 + len(self.mtp_leaves) * self.with_mtp
        done = 0

        def place(
            whole: np.ndarray | Callable[[int], np.ndarray], shape: tuple[int, ...], spec: jax.Array
        ) -> jax.Array:
            nonlocal done
            array = self._place(whole, shape, spec_of(spec))
            done += 1
            report(done, total)
            return array

        specs = self.specs()
        trunk = []
        for slot, slot_specs in enumerate(specs.trunk):
            leaves = []
            for leaf, spec in zip(self.trunk_leaves, slot_specs, strict=True):
                shape = (self.plan.num_stages, *leaf.shape)
                leaves.append(place(self._stage_reader(read, leaf, slot), shape, spec))
            trunk.append(tuple(leaves))
        rows = (self.padded_vocab, self.model.hidden_size)
        embedding = place(self._padded_rows(read("model.embed_tokens.weight")), rows, specs.embedding)
        lm_head = None
        if specs.lm_head is not None:
            lm_head = place(self._padded_rows(read("lm_head.weight")), rows, specs.lm_head)
        final_norm = place(read("model.norm.weight"), rows[1:], specs.final_norm)
        mtp = None
        if specs.mtp is not None:
            assert read_mtp is not None
            pairs = zip(self.mtp_leaves, specs.mtp, strict=True)
            mtp = tuple(place(leaf.read(read_mtp, MTP_PREFIX), leaf.shape, spec) for leaf, spec in pairs)
        report(total, total)
        return Weights(tuple(trunk), embedding, lm_head, final_norm, mtp)

    def _stage_reader(self, read: Read, leaf: Leaf, slot: int) -> Callable[[int], np.ndarray]:
        def read_stage(stage: int) -> np.ndarray:
            layer = self.plan.layer_at(slot, stage)
            if layer is None:
                return np.zeros(leaf.shape, self.dtype)
            return leaf.read(read, f"model.layers.{layer}.")

        return read_stage

    def _padded_rows(self, rows: np.ndarray) -> np.ndarray:
        missing = self.padded_vocab - rows.shape[0]
        return np.pad(rows, ((0, missing), (0, 0))) if missing else rows

    def _place(
        self, whole: np.ndarray | Callable[[int], np.ndarray], shape: tuple[int, ...], spec: P
    ) -> jax.Array:
        """A placed array from a whole one, or from a function of the stage that gives its slice.

        Each device gets its own shard only, converted on the host; a stage's tensor is read once a process.
        """
        slices: dict[int, np.ndarray] = {}

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            if not callable(whole):
                return np.ascontiguousarray(whole[index]).astype(self.dtype, copy=False)
            stage = index[0].start or 0
            if stage not in slices:
                slices.clear()
                slices[stage] = whole(stage)
            return slices[stage][index[1:]].astype(self.dtype, copy=False)[None]

        return jax.make_array_from_callback(shape, NamedSharding(self.placement.mesh, spec), shard)
