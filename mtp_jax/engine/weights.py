"""Which weights the program takes: their shapes, places, and reading them from a checkpoint."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtp_jax.config import ModelConfig
from mtp_jax.engine.leaf_reader import LeafReader, ReadPart, padded_rows, place_leaf
from mtp_jax.engine.trees import spec_of, stand_in
from mtp_jax.engine.vocabulary import DraftHead
from mtp_jax.loading.mtp_head import DRAFT_VOCAB_IDS
from mtp_jax.models.block import LayerKind, layer_caches, layer_leaves
from mtp_jax.models.layers import CacheRows
from mtp_jax.models.leaves import Leaf, Read, ReadScaled
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
from mtp_jax.models.scaled import CODES, SCALES, BlockScaled, Weight
from sharding.placement import Placement
from sharding.stage_plan import StagePlan

NGRAMS_KEY = "ngrams"  # the name of their table in `WeightLayout.groups`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """All weights, as flat leaves in the order of their `Leaf` tables; nothing is stored twice."""

    trunk: tuple[tuple[Weight, ...], ...]  # per layer slot, each leaf with a leading stage axis
    embedding: jax.Array  # V D, rows spread over the head's devices
    lm_head: jax.Array | None  # V D likewise; None where the model ties it to the embedding
    final_norm: tuple[jax.Array, ...]  # leaves of `final_leaves`
    mtp: tuple[Weight, ...] | None  # None where the engine drafts nothing
    draft_head: DraftHead | None  # None where drafts are chosen among all rows of the LM head
    ngrams: Weight | None = None  # `table_leaf`; None: the model has no n-gram embeddings


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Shapes and places of `Weights` for one model on one mesh."""

    model: ModelConfig
    plan: StagePlan
    placement: Placement
    dtype: jnp.dtype
    with_mtp: bool
    draft_vocab: int | None = None  # ids that drafts are chosen from; None: all of them
    # Columns that share a scale, of each leaf that stays in float8, by `slot_key`, `mtp_key` or NGRAMS_KEY
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict)

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
    def ngram_leaf(self) -> Leaf | None:
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
                tuple(self._spec(slot_key(slot, leaf), leaf, "layer_stage") for leaf in leaves)
                for slot, leaves in enumerate(self.trunk_leaves)
            ),
            embedding=rows,
            lm_head=None if self.model.tie_word_embeddings else rows,
            final_norm=tuple(spec(*leaf.axes) for leaf in self._final_leaves),
            mtp=tuple(self._spec(mtp_key(leaf), leaf) for leaf in self.mtp_leaves) if self.with_mtp else None,
            draft_head=DraftHead(rows, spec("vocab")) if self.draft_vocab else None,
            ngrams=None if self.ngram_leaf is None else self._spec(NGRAMS_KEY, self.ngram_leaf),
        )

    def shapes(self) -> Weights:
        """ShapeDtypeStructs in the shape of `Weights`: what the memory plan adds up."""

        def array(*shape: int, dtype: jnp.dtype | None = None) -> jax.Array:
            return stand_in(jax.ShapeDtypeStruct(shape, dtype or self.dtype))

        rows, stages = array(self.padded_vocab, self.model.hidden_size), self.plan.num_stages
        return Weights(
            trunk=tuple(
                tuple(self._shape(slot_key(slot, leaf), leaf, stages) for leaf in leaves)
                for slot, leaves in enumerate(self.trunk_leaves)
            ),
            embedding=rows,
            lm_head=None if self.model.tie_word_embeddings else rows,
            final_norm=tuple(array(*leaf.shape, dtype=leaf.dtype) for leaf in self._final_leaves),
            mtp=tuple(self._shape(mtp_key(leaf), leaf) for leaf in self.mtp_leaves)
            if self.with_mtp
            else None,
            draft_head=self._draft_head_shapes(),
            ngrams=None if self.ngram_leaf is None else self._shape(NGRAMS_KEY, self.ngram_leaf),
        )

    def _spec(self, key: str, leaf: Leaf, *lead: str) -> Weight:
        spec, group = stand_in(self.placement.spec(*lead, *leaf.axes)), self.groups.get(key)
        return spec if group is None else BlockScaled(spec, spec, group)

    def _shape(self, key: str, leaf: Leaf, *lead: int) -> Weight:
        def array(dtype: jnp.dtype, columns: int) -> jax.Array:
            return stand_in(jax.ShapeDtypeStruct((*lead, *leaf.shape[:-1], columns), dtype))

        columns, group = leaf.shape[-1], self.groups.get(key)
        if group is None:
            return array(leaf.dtype or self.dtype, columns)
        return BlockScaled(array(CODES, columns), array(SCALES, -(-columns // group)), group)

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
        scaled: ReadScaled | None = None,
    ) -> Weights:
        """Reads, converts and places every weight, one leaf at a time.

        `read` gives a target tensor by its Hugging Face name, `read_mtp` one of the MTP module; `names` are
        the checkpoint's, where it may store something in several ways, and `mtp_names` those of another file
        with the MTP module; `scaled` reads what stays in float8 (`groups`); `report` is called with (leaves
        done, leaves in all).
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
            trunk.append(
                tuple(
                    place_leaf(
                        place,
                        functools.partial(self._stage_part, leaf, slot),
                        functools.partial(LeafReader, leaf, names=names),
                        (read, scaled),
                        *of,
                    )
                    for leaf, *of in rows
                )
            )
        outputs = embeddings = read(EMBEDDING)
        embedding = place(padded_rows(embeddings, self.padded_vocab), shapes.embedding, specs.embedding)
        lm_head = None
        if shapes.lm_head is not None and specs.lm_head is not None:
            outputs = read(LM_HEAD)
            lm_head = place(padded_rows(outputs, self.padded_vocab), shapes.lm_head, specs.lm_head)
        draft_head = None
        if shapes.draft_head is not None and specs.draft_head is not None:
            assert read_mtp is not None
            few, like, spec = self.padded_draft_vocab, shapes.draft_head, specs.draft_head
            ids = read_mtp(f"{mtp_prefix(self.model)}{DRAFT_VOCAB_IDS}")
            padded_ids = np.pad(ids, (0, few - ids.size), constant_values=self.padded_vocab)
            draft_head = DraftHead(
                place(padded_rows(outputs[ids], few), like.rows, spec.rows),
                place(padded_ids, like.ids, spec.ids),
            )
        rows = zip(self._final_leaves, shapes.final_norm, specs.final_norm, strict=True)
        final_norm = tuple(place(LeafReader(leaf, read, names).whole, *of) for leaf, *of in rows)
        ngrams = mtp = None
        if self.ngram_leaf is not None and shapes.ngrams is not None and specs.ngrams is not None:
            reader = functools.partial(LeafReader, self.ngram_leaf, names=names)
            of = (read, scaled), shapes.ngrams, specs.ngrams
            ngrams = place_leaf(place, lambda reader, like: reader.whole, reader, *of)
        if shapes.mtp is not None and specs.mtp is not None:
            assert read_mtp is not None
            rows = zip(self.mtp_leaves, shapes.mtp, specs.mtp, strict=True)
            of_mtp = names if mtp_names is None else mtp_names
            mtp = tuple(
                place_leaf(
                    place,
                    self._mtp_part,
                    functools.partial(LeafReader, leaf, names=of_mtp),
                    (read_mtp, scaled),
                    *of,
                )
                for leaf, *of in rows
            )
        report(total, total)
        return Weights(tuple(trunk), embedding, lm_head, final_norm, mtp, draft_head, ngrams)

    def slot_layers(self, slot: int, leaf: Leaf) -> tuple[int | None, ...]:
        """Each stage's layer in a slot; None: it leaves the slot empty, or its layer is without this leaf."""
        kinds = self.slot_kinds(slot)
        tables = {kind: layer_leaves(self.model, kind) for kind in kinds if kind is not None}
        has = {kind for kind, table in tables.items() if any(one.path == leaf.path for one in table)}
        layers = self.plan.slots[slot]
        return tuple(layer if kind in has else None for layer, kind in zip(layers, kinds, strict=True))

    def _stage_part(self, leaf: Leaf, slot: int, reader: LeafReader, like: jax.Array) -> ReadPart:
        """Reads parts of an array with the leaves of all stages in a layer slot."""
        layers = self.slot_layers(slot, leaf)

        def read_stage(index: tuple[slice, ...]) -> np.ndarray:
            layer = layers[index[0].start or 0]
            if layer is None:  # weights that are never read
                cuts = zip(index[1:], like.shape[1:], strict=True)
                shape = (1, *(len(range(*cut.indices(size))) for cut, size in cuts))
                return np.broadcast_to(np.zeros((), like.dtype), shape)
            return reader.part(layer_prefix(layer), index[1:])[None]

        return read_stage

    def _mtp_part(self, reader: LeafReader, like: jax.Array) -> ReadPart:
        del like
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


def slot_key(slot: int, leaf: Leaf) -> str:
    """A trunk leaf's name in `WeightLayout.groups`."""
    return f"{slot}.{leaf.name}"


def mtp_key(leaf: Leaf) -> str:
    """The same for a leaf of the MTP module."""
    return f"mtp.{leaf.name}"


def with_float8(layout: WeightLayout, blocks: Mapping[str, int]) -> WeightLayout:
    """The layout with every leaf in float8 that can stay so (`Leaf.group`).

    Args:
      layout: without any.
      blocks: columns that share a scale, of the checkpoint's float8 tensors.
    """
    groups: dict[str, int] = {}

    def add(key: str, leaf: Leaf, prefixes: list[str]) -> None:
        last = leaf.axes[-1]
        group = leaf.group(prefixes, blocks, 1 if last is None else layout.placement.axis_size(last))
        groups.update({} if group is None else {key: group})

    for slot, leaves in enumerate(layout.trunk_leaves if blocks else ()):
        for leaf in leaves:
            layers = layout.slot_layers(slot, leaf)
            add(slot_key(slot, leaf), leaf, [layer_prefix(layer) for layer in layers if layer is not None])
    for leaf in layout.mtp_leaves if blocks and layout.with_mtp else ():
        add(mtp_key(leaf), leaf, [mtp_prefix(layout.model)])
    if blocks and layout.ngram_leaf is not None:
        add(NGRAMS_KEY, layout.ngram_leaf, [""])
    return dataclasses.replace(layout, groups=groups)
