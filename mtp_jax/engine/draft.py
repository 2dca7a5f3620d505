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
from mtp_jax.models.layers import KVCache, SumOver, rope_tables
from mtp_jax.models.mtp import MimoMTP


@dataclasses.dataclass(frozen=True)
class MTP:
    """The MTP module on this device, with the reductions that its placement asks for."""

    module: MimoMTP
    vocabulary: Vocabulary  # the target's, maybe with fewer rows in the LM head
    gather_proj: Callable[[jax.Array], jax.Array] | None
    reduce_attention: SumOver
    reduce_ffn: SumOver


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
        cache: KVCache,
        rows: VerifyRows,
        chunk: Chunk | None,
        hidden: jax.Array,
        lane_hidden: jax.Array | None,
        tokens: jax.Array,
        accepted: jax.Array,
    ) -> tuple[Slots, KVCache]:
        """hidden [B, T, D] and lane_hidden [C, D] post-norm; tokens [B (+1), T], accepted [B (+1)]."""
        output, cache = self._reread(cache, rows, chunk, hidden, lane_hidden, tokens, accepted)
        last = rows.start + accepted  # the last verified position of each row
        limit = jnp.where(rows.valid, self.plan.capacity[rows.slot], 0)
        drafts, kept = [], []
        for step in range(self.bucket.drafts):
            token, logits = self._propose(output, rows.slot, last + 2 + step)
            drafts.append(token)
            kept.append(logits)
            if step + 1 < self.bucket.drafts:
                segment = Segment(self.plan.table[rows.slot], (last + 1 + step)[:, None], limit)
                output, cache = self._run(output, token, cache, (segment,))
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
        cache: KVCache,
        rows: VerifyRows,
        chunk: Chunk | None,
        hidden: jax.Array,
        lane_hidden: jax.Array | None,
        tokens: jax.Array,
        accepted: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Step 0. Returns the module's output at each row's last verified position, [B (+1), D]."""
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
        output, cache = self._run(jnp.concatenate(states), jnp.concatenate(ids), cache, tuple(segments))
        return output[pick], cache

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
        self, hidden: jax.Array, ids: jax.Array, cache: KVCache, segments: tuple[Segment, ...]
    ) -> tuple[jax.Array, KVCache]:
        """The module over token rows: hidden [M, D], ids [M] of the tokens that follow -> [M, D]."""
        attend = PagedAttention(segments, self.config.page_size)
        embedding = self.mtp.vocabulary.embed(ids).astype(hidden.dtype)
        rope = rope_tables(attend.positions, self.model)
        mtp = self.mtp
        reduces = (mtp.gather_proj, mtp.reduce_attention, mtp.reduce_ffn)
        output, cache = mtp.module(hidden, embedding, cache, rope, attend, *reduces, kernels=True)
        # Without the barrier XLA copies the cache between draft steps inside a cond (Z > 1).
        if not self.bucket.drafts:  # nobody wants the output: all but keys and values falls away
            return output, jax.lax.optimization_barrier(cache)
        return jax.lax.optimization_barrier((output, cache))

    def _propose(
        self, output: jax.Array, slot: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A draft [B] for tokens at `position` [B], and log q up to a constant [B, V / devices].

        Only temperature shapes q: verification is exact whatever q is.
        """
        vocabulary = self.mtp.vocabulary
        logits = vocabulary.logits(output)
        if self.config.draft_sampling == "greedy" or self.bucket.sampling is Sampling.GREEDY:
            return vocabulary.argmax(logits), logits
        sampling = self.plan.sampling(slot, position)
        scaled = scale_by_temperature(logits, sampling.temperature)
        return vocabulary.argmax(vocabulary.add_noise(scaled, sampling, DRAFT)), scaled
