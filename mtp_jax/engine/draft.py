"""Drafting with one MTP module, recycled for drafts 2 to K.

Step 0 runs the module over the rows just verified, at their own positions, with ids shifted by one: its
cache row p encodes (target hidden at p, token p + 1), so rows behind an accepted draft hold true hidden
states. Later steps take one token a slot and the module's own post-norm output; what they write is
provisional, and step 0 of the next round writes it anew. Nothing is ever rolled back.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.buckets import Bucket, Sampling
from mtp_jax.engine.leaving import Chunk, VerifyRows, scatter_index
from mtp_jax.engine.paged import PagedAttention, Segment
from mtp_jax.engine.plan_arrays import PlanArrays
from mtp_jax.engine.sampling import DRAFT, scale_by_temperature
from mtp_jax.engine.state import Slots
from mtp_jax.engine.vocabulary import Vocabulary
from mtp_jax.models.layers import Around, Cache, SumOver, rope_tables
from mtp_jax.models.mtp import MTPModule, StreamMTPModule


@dataclasses.dataclass(frozen=True)
class MTP:
    """The MTP module on this device, with the reductions that its placement asks for."""

    module: MTPModule | StreamMTPModule
    vocabulary: Vocabulary  # the target's, maybe with fewer rows in the LM head
    gather_proj: Callable[[jax.Array], jax.Array] | None
    sum_attention: SumOver
    sum_ffn: SumOver
    sum_experts: SumOver


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Makes the bucket's number of drafts for rows that emitted tokens, and keeps the MTP cache true."""

    model: ModelConfig
    config: EngineConfig
    bucket: Bucket
    mtp: MTP
    plan: PlanArrays

    def __call__(
        self,
        slots: Slots,
        cache: Cache,
        rows: VerifyRows,
        chunk: Chunk | None,
        hidden: jax.Array,
        lane_hidden: jax.Array | None,
        tokens: jax.Array,
        accepted: jax.Array,
    ) -> tuple[Slots, Cache]:
        """hidden [B, T, D] and lane_hidden [C, D] as the module takes them: post-norm, or streams [..., S D].

        tokens [B (+1), T], accepted [B (+1)].
        """
        output, indices, cache = self._reread(cache, rows, chunk, hidden, lane_hidden, tokens, accepted)
        if not self._shares_indices:
            indices = None
        last = rows.start + accepted  # the last verified position of each row
        limit = jnp.where(rows.valid, self.plan.capacity[rows.slot], 0)
        drafts, kept = [], []
        for step in range(self.bucket.drafts):
            token, logits = self._propose(output, rows.slot, last + 2 + step)
            drafts.append(token)
            kept.append(logits)
            if step + 1 < self.bucket.drafts:
                segment = Segment(self.plan.table[rows.slot], (last + 1 + step)[:, None], limit)
                output, _, cache = self._run(output, token, cache, (segment,), indices)
        at = scatter_index(rows, slots)
        assert slots.drafts is not None
        absent = jnp.full_like(last, -1)
        drafts += [absent] * (slots.drafts.shape[1] - len(drafts))
        slots = dataclasses.replace(
            slots, drafts=slots.drafts.at[at].set(jnp.stack(drafts, axis=1), mode="drop")
        )
        # Only whole-row verification reads q, and a slot that needs it never sees a lesser step.
        if slots.draft_logits is not None and kept and self.bucket.sampling >= Sampling.WHOLE:
            stacked = jnp.stack(kept, axis=1)  # B k Vd
            logits = slots.draft_logits.at[at, : len(kept)].set(stacked, mode="drop")
            slots = dataclasses.replace(slots, draft_logits=logits)
        return slots, cache

    def _reread(
        self,
        cache: Cache,
        rows: VerifyRows,
        chunk: Chunk | None,
        hidden: jax.Array,
        lane_hidden: jax.Array | None,
        tokens: jax.Array,
        accepted: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """Step 0. Returns the output [B (+1), D] at each row's last verified position, and what it read."""
        b, t, d = hidden.shape
        columns = jnp.arange(t, dtype=jnp.int32)
        slot, start, valid = rows.slot[:b], rows.start[:b], rows.valid[:b]
        written = jnp.minimum(start + accepted[:b] + 1, self.plan.capacity[slot])
        segments = [Segment(self.plan.table[slot], start[:, None] + columns, jnp.where(valid, written, 0))]
        ids = [jnp.where(columns <= accepted[:b, None], tokens[:b], -1).reshape(-1)]
        states = [hidden.reshape(b * t, d)]
        pick = jnp.arange(b, dtype=jnp.int32) * t + accepted[:b]
        if chunk is not None:
            assert lane_hidden is not None
            segment, shifted = self._shifted_chunk(chunk, tokens[b, 0])
            segments.append(segment)
            ids.append(shifted)
            states.append(lane_hidden)
            pick = jnp.append(pick, b * t + chunk.count - 1)
        output, indices, cache = self._run(
            jnp.concatenate(states), jnp.concatenate(ids), cache, tuple(segments)
        )
        return output[pick], None if indices is None else indices[pick], cache

    @property
    def _shares_indices(self) -> bool:
        """Whether later steps attend to where the last verified position did (GLM-5.2, Qwen4Exp)."""
        shares = self.model.indexer is not None and self.model.indexer.share_in_drafts
        return shares or self.model.blocks is not None

    def _shifted_chunk(self, chunk: Chunk, sampled: jax.Array) -> tuple[Segment, jax.Array]:
        """The chunk's segment, and its ids shifted by one: the last is the next token, or the sampled one."""
        size = chunk.tokens.shape[0]
        columns = jnp.arange(size, dtype=jnp.int32)
        following = jnp.where(chunk.next_token >= 0, chunk.next_token, sampled)
        ids = jnp.where(columns == chunk.count - 1, following, jnp.roll(chunk.tokens, -1))
        limit = jnp.where(chunk.valid, chunk.start + chunk.count, 0)
        table = self.plan.table[chunk.slot]
        return Segment(table[None], (chunk.start + columns)[None], limit[None]), ids

    def _run(
        self,
        hidden: jax.Array,
        ids: jax.Array,
        cache: Cache,
        segments: tuple[Segment, ...],
        indices: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None, Cache]:
        """The module over token rows: hidden [M, D], ids [M] of the tokens that follow -> [M, D].

        With `indices` [M, J] the module's indexer is not asked.
        """
        attend = PagedAttention(segments, self.config.page_size)
        mtp = self.mtp
        embedding = mtp.vocabulary.embed(ids).astype(hidden.dtype)
        around = Around(
            rope=rope_tables(attend.positions, self.model),
            attend=attend,
            sum_attention=mtp.sum_attention,
            sum_ffn=mtp.sum_ffn,
            sum_experts=mtp.sum_experts,
            kernels=True,
            reuse_indices=indices is not None,
        )
        output, indices, cache = mtp.module(hidden, embedding, indices, cache, around, mtp.gather_proj)
        # Without the barrier XLA copies the cache between draft steps inside a cond (Z > 1).
        if not self.bucket.drafts:  # nobody wants the output: all but keys and values falls away
            return output, indices, jax.lax.optimization_barrier(cache)
        output, cache = jax.lax.optimization_barrier((output, cache))
        return output, indices, cache

    def _propose(
        self, output: jax.Array, slot: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A draft [B] for tokens at `position` [B], and log q up to a constant [B, V / devices].

        Only temperature shapes q: verification is exact whatever q is.
        """
        vocabulary = self.mtp.vocabulary
        logits = vocabulary.logits(self.mtp.module.to_head(output))
        if self.config.draft_sampling == "greedy" or self.bucket.sampling is Sampling.GREEDY:
            return vocabulary.argmax(logits), logits
        sampling = self.plan.sampling(slot, position)
        scaled = scale_by_temperature(logits, sampling.temperature)
        return vocabulary.argmax(vocabulary.add_noise(scaled, sampling, DRAFT)), scaled
