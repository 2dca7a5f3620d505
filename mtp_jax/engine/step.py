"""The engine step: one jitted SPMD program a bucket, step(weights, state, plan) -> (state, output)."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.buckets import Bucket, Sampling
from mtp_jax.engine.draft import MTP
from mtp_jax.engine.head import Head
from mtp_jax.engine.ngrams import NgramTable
from mtp_jax.engine.plan_arrays import PLAN_SPEC, PlanArrays
from mtp_jax.engine.ring import Ring, RunLayer
from mtp_jax.engine.shaping_state import shaping_specs
from mtp_jax.engine.state import EngineState, state_specs, with_shaping
from mtp_jax.engine.trees import stand_in
from mtp_jax.engine.vocabulary import Vocabulary
from mtp_jax.engine.weights import WeightLayout, Weights
from mtp_jax.models.block import LayerKind, layer_leaves
from mtp_jax.models.layers import UNSPLIT, Around, SumOver
from mtp_jax.models.leaves import merge
from mtp_jax.models.registry import layer_kinds, make_final, make_layer, make_mtp
from sharding.mesh import DATA, TENSOR
from sharding.placement import HEAD_AXES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What the host reads of a dispatch."""

    results: jax.Array  # ticks, replicas * rows, RESULT_FIELDS + T int32; rows without tokens have count 0
    useful: jax.Array  # int32: stage-ticks of this dispatch that had work, of all replicas


Step = Callable[[Weights, EngineState, PlanArrays], tuple[EngineState, StepOutput]]


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything static about an engine: from here each bucket's step is built."""

    config: EngineConfig
    layout: WeightLayout

    def step(self, bucket: Bucket) -> Step:
        """The jitted step of one bucket. DONATES the state.

        Its entry point is named after the bucket, so that compile logs and profiles tell them apart.
        """
        layout, mesh = self.layout, self.layout.placement.mesh
        states = state_specs(layout, self.config)
        if bucket.sampling is Sampling.SHAPED:
            states = with_shaping(states, shaping_specs(layout.placement))
        in_specs = (layout.specs(), states, PLAN_SPEC)
        out_specs = (states, StepOutput(stand_in(P()), stand_in(P())))

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        def step(weights: Weights, state: EngineState, plan: PlanArrays) -> tuple[EngineState, StepOutput]:
            state, results, useful = self._ring(bucket, weights, plan).dispatch(state)
            # Once a dispatch, so that the host can read them from whichever device it has.
            results = jax.lax.all_gather(results, DATA, axis=1, tiled=True, to="invarying")
            return state, StepOutput(results, jax.lax.psum(useful, DATA))

        step.__name__ = bucket.name
        return jax.jit(step, donate_argnums=1)

    def _ring(self, bucket: Bucket, weights: Weights, plan: PlanArrays) -> Ring:
        """One device's ring, from its shards."""
        layout = self.layout
        layers = jax.tree.map(lambda leaf: leaf[0], weights.trunk)  # this stage's layers
        vocabulary = Vocabulary(
            embedding=weights.embedding,
            lm_head=weights.embedding if weights.lm_head is None else weights.lm_head,
            size=layout.model.vocab_size,
            devices=layout.head_devices,
        )
        head = Head(
            model=layout.model,
            config=self.config,
            bucket=bucket,
            vocabulary=vocabulary,
            final_norm=make_final(layout.model, layout.dtype, weights.final_norm),
            mtp=self._mtp(weights, vocabulary),
            plan=plan,
        )
        ngrams = None
        if weights.ngrams is not None and layout.model.ngram is not None:
            whole = "ngram_parts" in layout.placement.replicated
            ngrams = NgramTable(weights.ngrams, layout.dtype, layout.model.ngram, whole)
        runners = self._layer_runners()
        return Ring(bucket, layout.plan, layers, runners, head, plan, self._shares_experts, ngrams)

    @property
    def _shares_experts(self) -> bool:
        return "experts" in self.layout.placement.shared

    def _layer_runners(self) -> tuple[tuple[RunLayer | None, ...], ...]:
        """How each stage runs each layer slot; what is alike shares one function."""
        slots = range(self.layout.plan.num_slots)
        runs = [
            [(self.layout.slot_kind(slot), kind) for kind in self.layout.slot_kinds(slot)] for slot in slots
        ]
        runners = {pair: self._layer_runner(*pair) for pair in dict.fromkeys(itertools.chain(*runs))}
        return tuple(tuple(runners[pair] for pair in stages) for stages in runs)

    def _layer_runner(self, kind: LayerKind, runs: LayerKind | None) -> RunLayer | None:
        """Runs a layer of a slot of this kind; a layer without an indexer may lie in a slot that has one.

        Likewise one without n-grams.
        """
        if runs is None:
            return None
        structure = make_layer(self.layout.model, kind, self.layout.dtype)
        table = layer_leaves(self.layout.model, kind)
        heads = {"grouped": "kv_heads", "blocks": "kv_heads", "delta": "key_heads"}
        heads = heads.get(kind.attention, "heads")
        sum_attention, sum_ffn = (self._sum_over(name, (TENSOR,)) for name in (heads, "ffn"))
        sum_experts = self._sum_over("experts", (TENSOR,))
        if self._shares_experts:
            sum_experts = SumOver((DATA, TENSOR), rows=(DATA,))

        reuse = runs.attention != kind.attention
        carries = self.layout.model.indexer is not None

        @jax.jit
        def layer(leaves, carry, cache, rope, attend):
            around = Around(
                rope, attend, sum_attention, sum_ffn, sum_experts, kernels=True, reuse_indices=reuse
            )
            if runs.ngrams:
                around = dataclasses.replace(around, ngram=carry.ngram)
            x, indices, cache = merge(structure, table, leaves)(carry.x, carry.indices, cache, around)
            # Positions that each layer chooses for itself go no further.
            return dataclasses.replace(carry, x=x, indices=indices if carries else None), cache

        return layer

    def _mtp(self, weights: Weights, vocabulary: Vocabulary) -> MTP | None:
        if weights.mtp is None:
            return None
        layout, outputs = self.layout, vocabulary
        if weights.draft_head is not None:
            outputs = vocabulary.reduced_to(weights.draft_head)
        return MTP(
            module=merge(make_mtp(layout.model, layout.dtype), layout.mtp_leaves, weights.mtp),
            vocabulary=outputs,
            gather_proj=self._gather("mtp_out"),
            sum_attention=self._sum_over(
                "mtp_kv_heads" if layout.model.latent is None else "mtp_heads", HEAD_AXES
            ),
            sum_ffn=self._sum_over("mtp_ffn", HEAD_AXES),
            sum_experts=self._sum_over("mtp_experts", HEAD_AXES),
        )

    def _sum_over(self, logical: str, axes: tuple[str, ...]) -> SumOver:
        """Sums partial products over the devices that a logical axis is split over."""
        return UNSPLIT if logical in self.layout.placement.replicated else SumOver(axes)

    def _gather(self, logical: str) -> Callable[[jax.Array], jax.Array] | None:
        """Joins output features [M, D / devices] -> [M, D]."""
        if logical in self.layout.placement.replicated:
            return None
        return lambda x: jax.lax.all_gather(x, HEAD_AXES, axis=1, tiled=True, to="invarying")


def dividing_sizes(model: ModelConfig) -> dict[str, int]:
    """Sizes of the logical axes that a mesh may fail to divide; `make_placement` then replicates them."""
    sizes = {"mtp_out": model.hidden_size}
    if model.ngram is not None:
        sizes["ngram_parts"] = model.ngram.parts
    if model.delta is not None:
        sizes["key_heads"] = model.delta.num_key_heads
    has_dense = any(kind.ffn == "dense" for kind in layer_kinds(model))
    widths = (model.intermediate_size if has_dense else 0, model.experts.shared_width if model.experts else 0)
    ffn = math.gcd(*widths)
    for prefix in ("", "mtp_"):
        sizes[f"{prefix}ffn"] = ffn
        sizes[f"{prefix}heads"] = model.num_attention_heads
        sizes[f"{prefix}kv_heads"] = model.num_key_value_heads
        if model.experts is not None:
            sizes[f"{prefix}experts"] = model.experts.num_experts
    return sizes
