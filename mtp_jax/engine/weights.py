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
from mtp_jax.engine.vocabulary import DraftHead
from mtp_jax.loading.mtp_head import DRAFT_VOCAB_IDS
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
    draft_head: DraftHead | None  # None where drafts are chosen among all rows of the LM head


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Shapes and places of `Weights` for one model on one mesh."""

    model: ModelConfig
    plan: StagePlan
    placement: Placement
    dtype: jnp.dtype
    with_mtp: bool
    draft_vocab: int | None = None  # ids that drafts are chosen from; None: all of them

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
        return self._padded(self.model.vocab_size)

    @property
    def padded_draft_vocab(self) -> int:
        """Rows that a draft's logits have."""
        return self.padded_vocab if self.draft_vocab is None else self._padded(self.draft_vocab)

    def _padded(self, rows: int) -> int:
        return -(-rows // self.head_devices) * self.head_devices

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
            draft_head=DraftHead(rows, spec("vocab")) if self.draft_vocab else None,
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
            draft_head=self._draft_head_shapes(),
        )

    def _draft_head_shapes(self) -> DraftHead | None:
        if self.draft_vocab is None:
            return None
        rows = (self.padded_draft_vocab, self.model.hidden_size)
        return DraftHead(
            stand_in(jax.ShapeDtypeStruct(rows, self.dtype)),
            stand_in(jax.ShapeDtypeStruct(rows[:1], jnp.int32)),
        )

    def load(self, read: Read, read_mtp: Read | None, report: Callable[[int, int], None]) -> Weights:
        """Reads, converts and places every weight, one leaf at a time.

        `read` gives a target tensor by its Hugging Face name, `read_mtp` one of the MTP module;
        `report` is called with (leaves done, leaves in all).
        """
        total = self.plan.num_slots * len(self.trunk_leaves) + 3 + len(self.mtp_leaves) * self.with_mtp
        total += 2 * (self.draft_vocab is not None)
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
        outputs = embeddings = read("model.embed_tokens.weight")
        embedding = place(_padded_rows(embeddings, rows[0]), rows, specs.embedding)
        lm_head = None
        if specs.lm_head is not None:
            outputs = read("lm_head.weight")
            lm_head = place(_padded_rows(outputs, rows[0]), rows, specs.lm_head)
        draft_head = None
        if specs.draft_head is not None:
            assert read_mtp is not None
            few = (self.padded_draft_vocab, self.model.hidden_size)
            ids = read_mtp(f"{MTP_PREFIX}{DRAFT_VOCAB_IDS}")
            padded_ids = np.pad(ids, (0, few[0] - ids.size), constant_values=self.padded_vocab)
            draft_head = DraftHead(
                place(_padded_rows(outputs[ids], few[0]), few, specs.draft_head.rows),
                place(padded_ids, few[:1], specs.draft_head.ids),
            )
        final_norm = place(read("model.norm.weight"), rows[1:], specs.final_norm)
        mtp = None
        if specs.mtp is not None:
            assert read_mtp is not None
            pairs = zip(self.mtp_leaves, specs.mtp, strict=True)
            mtp = tuple(place(leaf.read(read_mtp, MTP_PREFIX), leaf.shape, spec) for leaf, spec in pairs)
        report(total, total)
        return Weights(tuple(trunk), embedding, lm_head, final_norm, mtp, draft_head)

    def _stage_reader(self, read: Read, leaf: Leaf, slot: int) -> Callable[[int], np.ndarray]:
        def read_stage(stage: int) -> np.ndarray:
            layer = self.plan.layer_at(slot, stage)
            if layer is None:
                return np.zeros(leaf.shape, self.dtype)
            return leaf.read(read, f"model.layers.{layer}.")

        return read_stage

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
                part = np.ascontiguousarray(whole[index])
                return part if part.dtype == np.int32 else part.astype(self.dtype, copy=False)
            stage = index[0].start or 0
            if stage not in slices:
                slices.clear()
                slices[stage] = whole(stage)
            return slices[stage][index[1:]].astype(self.dtype, copy=False)[None]

        return jax.make_array_from_callback(shape, NamedSharding(self.placement.mesh, spec), shard)


def _padded_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, the added ones zero."""
    missing = count - rows.shape[0]
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows
