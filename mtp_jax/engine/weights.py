"""Which weights the program takes: their shapes, places, and reading them from a checkpoint."""

import collections
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
from mtp_jax.models.block import LayerKind, layer_caches, layer_leaves
from mtp_jax.models.layers import CacheRows
from mtp_jax.models.leaves import Leaf, Read
from mtp_jax.models.ngram import table_leaf
from mtp_jax.models.registry import (
    EMBEDDING,
    LM_HEAD,
    final_leaves,
    layer_kinds,
    layer_prefix,
    mtp_prefix,
    mtp_table,
)
from sharding.placement import Placement
from sharding.stage_plan import StagePlan

ReadPart = Callable[[tuple[slice, ...]], np.ndarray]  # reads the part at these slices of a leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """All weights, as flat leaves in the order of their `Leaf` tables; nothing is stored twice."""

    trunk: tuple[tuple[jax.Array, ...], ...]  # per layer slot, each leaf with a leading stage axis
    embedding: jax.Array  # V D, rows spread over the head's devices
    lm_head: jax.Array | None  # V D likewise; None where the model ties it to the embedding
    final_norm: tuple[jax.Array, ...]  # leaves of `final_leaves`
    mtp: tuple[jax.Array, ...] | None  # None where the engine drafts nothing
    draft_head: DraftHead | None  # None where drafts are chosen among all rows of the LM head
    ngrams: jax.Array | None = None  # `table_leaf`; None: the model has no n-gram embeddings


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Shapes and places of `Weights` for one model on one mesh."""

    model: ModelConfig
    plan: StagePlan
    placement: Placement
    dtype: jnp.dtype
    with_mtp: bool
    draft_vocab: int | None = None  # ids that drafts are chosen from; None: all of them

    def slot_kind(self, slot: int) -> LayerKind:
        """What a layer slot has the weights and caches for."""
        return layer_kinds(self.model)[self.plan.any_layer(slot)]

    def slot_kinds(self, slot: int) -> tuple[LayerKind | None, ...]:
        """What each stage runs in a layer slot; None where it leaves it empty."""
        kinds = layer_kinds(self.model)
        return tuple(None if layer is None else kinds[layer] for layer in self.plan.slots[slot])

    def slot_leaves(self, slot: int) -> tuple[Leaf, ...]:
        """Leaves of a layer slot, without the leading stage axis."""
        return layer_leaves(self.model, self.slot_kind(slot))

    @property
    def slot_caches(self) -> tuple[tuple[CacheRows, ...], ...]:
        """Caches of every layer slot."""
        return tuple(layer_caches(self.model, self.slot_kind(slot)) for slot in range(self.plan.num_slots))

    @property
    def carries_indices(self) -> bool:
        """Whether a stage begins with a layer that takes the positions of an earlier layer's indexer."""
        indexer = self.model.indexer
        return indexer is not None and not all(indexer.owners[stage[0]] for stage in self.plan.layers)

    @property
    def trunk_leaves(self) -> tuple[tuple[Leaf, ...], ...]:
        """Leaves of every layer slot."""
        return tuple(self.slot_leaves(slot) for slot in range(self.plan.num_slots))

    @property
    def _final_leaves(self) -> tuple[Leaf, ...]:
        return final_leaves(self.model)

    @property
    def _ngram_leaf(self) -> Leaf | None:
        return None if self.model.ngram is None else table_leaf(self.model)

    @property
    def mtp_leaves(self) -> tuple[Leaf, ...]:
        return mtp_table(self.model)

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

        rows = spec("vocab", None)
        return Weights(
            trunk=tuple(
                tuple(spec("layer_stage", *leaf.axes) for leaf in leaves) for leaves in self.trunk_leaves
            ),
            embedding=rows,
            lm_head=None if self.model.tie_word_embeddings else rows,
            final_norm=tuple(spec(*leaf.axes) for leaf in self._final_leaves),
            mtp=tuple(spec(*leaf.axes) for leaf in self.mtp_leaves) if self.with_mtp else None,
            draft_head=DraftHead(rows, spec("vocab")) if self.draft_vocab else None,
            ngrams=None if self._ngram_leaf is None else spec(*self._ngram_leaf.axes),
        )

    def shapes(self) -> Weights:
        """ShapeDtypeStructs in the shape of `Weights`: what the memory plan adds up."""

        def array(*shape: int, dtype: jnp.dtype | None = None) -> jax.Array:
            return stand_in(jax.ShapeDtypeStruct(shape, dtype or self.dtype))

        rows, stages = array(self.padded_vocab, self.model.hidden_size), self.plan.num_stages
        return Weights(
            trunk=tuple(
                tuple(array(stages, *leaf.shape, dtype=leaf.dtype) for leaf in leaves)
                for leaves in self.trunk_leaves
            ),
            embedding=rows,
            lm_head=None if self.model.tie_word_embeddings else rows,
            final_norm=tuple(array(*leaf.shape, dtype=leaf.dtype) for leaf in self._final_leaves),
            mtp=tuple(array(*leaf.shape, dtype=leaf.dtype) for leaf in self.mtp_leaves)
            if self.with_mtp
            else None,
            draft_head=self._draft_head_shapes(),
            ngrams=None if self._ngram_leaf is None else array(*self._ngram_leaf.shape),
        )

    def _draft_head_shapes(self) -> DraftHead | None:
        if self.draft_vocab is None:
            return None
        rows = (self.padded_draft_vocab, self.model.hidden_size)
        return DraftHead(
            stand_in(jax.ShapeDtypeStruct(rows, self.dtype)),
            stand_in(jax.ShapeDtypeStruct(rows[:1], jnp.int32)),
        )

    def load(
        self,
        read: Read,
        read_mtp: Read | None,
        report: Callable[[int, int], None],
        names: frozenset[str] = frozenset(),
        mtp_names: frozenset[str] | None = None,
    ) -> Weights:
        """Reads, converts and places every weight, one leaf at a time.

        `read` gives a target tensor by its Hugging Face name, `read_mtp` one of the MTP module; `names` are
        the checkpoint's, where it may store something in several ways, and `mtp_names` those of another file
        with the MTP module; `report` is called with (leaves done, leaves in all).
        """
        shapes, specs = self.shapes(), self.specs()
        total, done = len(jax.tree.leaves(shapes)), 0

        def place(whole: np.ndarray | ReadPart, like: jax.Array, spec: jax.Array) -> jax.Array:
            nonlocal done
            array = self._place(whole, like, spec_of(spec))
            done += 1
            report(done, total)
            return array

        trunk = []
        for slot, leaves in enumerate(self.trunk_leaves):
            rows = zip(leaves, shapes.trunk[slot], specs.trunk[slot], strict=True)
            trunk.append(tuple(place(self._stage_reader(read, names, leaf, slot), *of) for leaf, *of in rows))
        outputs = embeddings = read(EMBEDDING)
        embedding = place(_padded_rows(embeddings, self.padded_vocab), shapes.embedding, specs.embedding)
        lm_head = None
        if shapes.lm_head is not None and specs.lm_head is not None:
            outputs = read(LM_HEAD)
            lm_head = place(_padded_rows(outputs, self.padded_vocab), shapes.lm_head, specs.lm_head)
        draft_head = None
        if shapes.draft_head is not None and specs.draft_head is not None:
            assert read_mtp is not None
            few, like, spec = self.padded_draft_vocab, shapes.draft_head, specs.draft_head
            ids = read_mtp(f"{mtp_prefix(self.model)}{DRAFT_VOCAB_IDS}")
            padded_ids = np.pad(ids, (0, few - ids.size), constant_values=self.padded_vocab)
            draft_head = DraftHead(
                place(_padded_rows(outputs[ids], few), like.rows, spec.rows),
                place(padded_ids, like.ids, spec.ids),
            )
        rows = zip(self._final_leaves, shapes.final_norm, specs.final_norm, strict=True)
        final_norm = tuple(place(_LeafReader(leaf, read, names).whole, *of) for leaf, *of in rows)
        ngrams = mtp = None
        if self._ngram_leaf is not None and shapes.ngrams is not None and specs.ngrams is not None:
            ngrams = place(_LeafReader(self._ngram_leaf, read, names).whole, shapes.ngrams, specs.ngrams)
        if shapes.mtp is not None and specs.mtp is not None:
            assert read_mtp is not None
            rows = zip(self.mtp_leaves, shapes.mtp, specs.mtp, strict=True)
            mtp = tuple(
                place(self._mtp_reader(read_mtp, names if mtp_names is None else mtp_names, leaf), *of)
                for leaf, *of in rows
            )
        report(total, total)
        return Weights(tuple(trunk), embedding, lm_head, final_norm, mtp, draft_head, ngrams)

    def _stage_reader(self, read: Read, names: frozenset[str], leaf: Leaf, slot: int) -> ReadPart:
        """Reads parts of the leaves of all stages in a layer slot."""
        reader, kinds = _LeafReader(leaf, read, names), self.slot_kinds(slot)
        tables = {kind: layer_leaves(self.model, kind) for kind in kinds if kind is not None}
        has = {kind: any(one.path == leaf.path for one in table) for kind, table in tables.items()}

        def read_stage(index: tuple[slice, ...]) -> np.ndarray:
            stage = index[0].start or 0
            layer, kind = self.plan.layer_at(slot, stage), kinds[stage]
            if layer is None or kind is None or not has[kind]:  # weights that are never read
                cuts = zip(index[1:], leaf.shape, strict=True)
                shape = (1, *(len(range(*cut.indices(size))) for cut, size in cuts))
                return np.broadcast_to(np.zeros((), leaf.dtype or self.dtype), shape)
            return reader.part(layer_prefix(layer), index[1:])[None]

        return read_stage

    def _mtp_reader(self, read: Read, names: frozenset[str], leaf: Leaf) -> ReadPart:
        reader = _LeafReader(leaf, read, names)
        return lambda index: reader.part(mtp_prefix(self.model), index)

    def _place(self, whole: np.ndarray | ReadPart, like: jax.Array, spec: P) -> jax.Array:
        """A placed array of the shape and type of `like`, from a whole one or a function that gives parts.

        Each device gets its own shard only, converted on the host; a part that several devices hold is
        read once.
        """
        sharding, shards = NamedSharding(self.placement.mesh, spec), []
        where = sharding.addressable_devices_indices_map(like.shape)
        holders = collections.defaultdict(list)  # of each part; replicas of a shard need not be neighbours
        for device, index in where.items():
            holders[str(index)].append(device)
        for devices in holders.values():
            index = where[devices[0]]
            assert index is not None
            part = whole(index) if callable(whole) else np.ascontiguousarray(whole[index])
            part = part.astype(like.dtype, copy=False)
            shards += [jax.device_put(part, device) for device in devices]
        return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)


class _LeafReader:
    """Reads parts of one leaf. A leaf that is stored whole is read once for all devices that share it."""

    def __init__(self, leaf: Leaf, read: Read, names: frozenset[str]):
        self._leaf, self._read, self._names = leaf, read, names
        self._last: tuple[str, np.ndarray] | None = None

    def whole(self, index: tuple[slice, ...]) -> np.ndarray:
        """This part of a leaf whose tensors have whole names."""
        return self.part("", index)

    def part(self, prefix: str, index: tuple[slice, ...]) -> np.ndarray:
        """This part of the leaf; of experts that are stored one by one, only those are read."""
        leaf = self._leaf
        if leaf.chosen(prefix, self._names).by_index:
            first = range(*index[0].indices(leaf.shape[0]))
            return leaf.read(self._read, prefix, self._names, first)[(slice(None), *index[1:])]
        if self._last is None or self._last[0] != prefix:
            self._last = prefix, leaf.read(self._read, prefix, self._names)
        return self._last[1][index]


def _padded_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, the added ones zero."""
    missing = count - rows.shape[0]
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows
