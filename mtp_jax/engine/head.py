"""The head of a tick: verify the rows that left the last stage, update their slots, draft the next tokens."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.buckets import Bucket, Report, Sampling
from mtp_jax.engine.draft import MTP, Drafter
from mtp_jax.engine.guided import apply_masks
from mtp_jax.engine.leaving import Chunk, VerifyRows, scatter_index
from mtp_jax.engine.logprobs import prompt_rows, report, report_prompt, report_whole
from mtp_jax.engine.ngrams import advance_context
from mtp_jax.engine.plan_arrays import PlanArrays
from mtp_jax.engine.sampling import TARGET, RowSampling, add_noise, keep_top, scale_by_temperature
from mtp_jax.engine.shaping import drop_unlikely, min_p_of, note_emitted, shape_logits
from mtp_jax.engine.state import Slots
from mtp_jax.engine.verify import accept_one_hot, accept_probabilistic, cut_at_stop
from mtp_jax.engine.vocabulary import Vocabulary
from mtp_jax.models.layers import Cache


@dataclasses.dataclass(frozen=True)
class Head:
    """Vocabulary, final norm and MTP module of one device, bound to one dispatch's plan."""

    model: ModelConfig
    config: EngineConfig
    bucket: Bucket
    vocabulary: Vocabulary
    final_norm: Callable[[jax.Array], jax.Array]  # or the mixer of several residual streams
    mtp: MTP | None
    plan: PlanArrays

    def __call__(
        self,
        slots: Slots,
        mtp_cache: Cache | None,
        rows: VerifyRows,
        chunk: Chunk | None,
        hidden: jax.Array,
        lane_hidden: jax.Array | None,
    ) -> tuple[Slots, Cache | None, jax.Array]:
        """hidden [B, T, D] and lane_hidden [C, D] are the residual stream(s) after the last layer.

        Returns (slots, MTP cache, results [B (+1), RESULT_FIELDS + T] int32). Where the bucket shapes logits,
        the next drafts follow in each row; where it reports log-probabilities, these do; those of a prompt
        chunk are C rows more.
        """
        recycled, lane_recycled = hidden, lane_hidden
        last_rows = hidden = self.final_norm(hidden)
        if chunk is not None:
            assert lane_hidden is not None
            lane_hidden = self.final_norm(lane_hidden)
            # An empty lane has count 0, and then a row that is not valid.
            last = jax.lax.dynamic_slice_in_dim(lane_hidden, chunk.count - 1, 1)
            column = jnp.zeros((1, *hidden.shape[1:]), hidden.dtype).at[0, 0].set(last[0])
            last_rows = jnp.concatenate([hidden, column])
        with jax.named_scope("verify"):
            tokens, accepted, reports = self._verify(slots, rows, last_rows)
            count = jnp.where(rows.valid, accepted + 1, 0)
            count = jnp.minimum(count, self.plan.max_total[rows.slot] - rows.start - 1)
            count, stopped = cut_at_stop(tokens, count, self.plan.stop_ids[rows.slot])
        slots = self._advance(slots, rows, tokens, count, stopped)
        if self.mtp is not None:
            assert mtp_cache is not None
            if self.model.streams is None:  # else the module takes the streams
                recycled, lane_recycled = hidden, lane_hidden
            with jax.named_scope("draft"):
                drafter = Drafter(self.model, self.config, self.bucket, self.mtp, self.plan)
                slots, mtp_cache = drafter(
                    slots, mtp_cache, rows, chunk, recycled, lane_recycled, tokens, accepted
                )
        offered = jnp.sum(rows.drafts >= 0, axis=1, dtype=jnp.int32)
        fields = jnp.stack([rows.slot, rows.generation, count, offered, accepted], axis=1)
        parts = [fields, tokens]
        if self.bucket.sampling is Sampling.SHAPED and slots.drafts is not None:
            parts.append(slots.drafts[rows.slot, : self.bucket.drafts])  # grammars want to know them
        if reports is not None:
            parts.append(reports)
        results = jnp.concatenate(parts, axis=1)
        if self.bucket.report is Report.PROMPTS and chunk is not None and lane_hidden is not None:
            of_prompt = self._report_prompt(chunk, rows.generation[-1], lane_hidden, results.shape[1])
            results = jnp.concatenate([results, of_prompt])
        return slots, mtp_cache, results

    # Verification

    def _verify(
        self, slots: Slots, rows: VerifyRows, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """hidden [B, T, D] post-norm -> (tokens [B, T], accepted [B], reports [B, T * REPORT_FIELDS])."""
        b, t, d = hidden.shape
        raw = self.vocabulary.logits(hidden.reshape(b * t, d)).reshape(b, t, -1)
        logits = raw
        if slots.shaping is not None:
            logits = shape_logits(slots.shaping, rows, raw, self.vocabulary)
            assert self.plan.masks is not None
            logits = apply_masks(self.plan.masks[rows.slot], raw, logits, self.vocabulary)
        if self.bucket.report and self.config.logprobs_mode == "processed":
            return self._verify_whole_rows(slots, rows, self._sampling(rows, t), logits, reports=True)
        tokens, accepted = self._choose(slots, rows, logits)
        if not self.bucket.report:
            return tokens, accepted, None
        return tokens, accepted, report(raw, tokens, self.vocabulary).reshape(b, -1)

    def _sampling(self, rows: VerifyRows, columns: int) -> RowSampling:
        """Sampling parameters [B, T] of the rows' columns."""
        numbers = jnp.arange(columns, dtype=jnp.int32)
        slot = jnp.broadcast_to(rows.slot[:, None], (rows.slot.shape[0], columns))
        return self.plan.sampling(slot, rows.start[:, None] + numbers + 1)

    def _choose(self, slots: Slots, rows: VerifyRows, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Spread logits [B, T, V / devices] -> (tokens [B, T], accepted [B])."""
        kind = self.bucket.sampling
        if kind is Sampling.GREEDY:
            return self._accept_best(rows, logits)
        sampling = self._sampling(rows, logits.shape[1])

        def noisy(logits: jax.Array) -> jax.Array:
            scaled = scale_by_temperature(logits, sampling.temperature)
            return self.vocabulary.add_noise(scaled, sampling, TARGET)

        def whole() -> tuple[jax.Array, jax.Array]:
            return self._verify_whole_rows(slots, rows, sampling, logits)[:2]

        if kind is Sampling.NOISE:
            return self._accept_best(rows, noisy(logits))
        # Where conditionals are slow, shaped steps do without.
        if kind is Sampling.WHOLE or (kind is Sampling.SHAPED and self.config.static_sampling):
            return whole()

        warm = (sampling.temperature > 0) & rows.valid[:, None]
        needs_whole = warm & ((sampling.top_k > 0) | (sampling.top_p < 1))
        if slots.shaping is not None:
            needs_whole |= warm & (min_p_of(slots.shaping, rows) > 0)[:, None]
        if slots.draft_logits is not None and self.bucket.drafts:
            needs_whole = warm
        return jax.lax.cond(
            jnp.any(needs_whole),
            whole,
            lambda: self._accept_best(rows, jax.lax.cond(jnp.any(warm), noisy, lambda x: x, logits)),
        )

    def _accept_best(self, rows: VerifyRows, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The best of scores [B, T, V / devices] are the samples: no normaliser is needed."""
        samples = self.vocabulary.argmax(scores.reshape(-1, scores.shape[-1]))
        return accept_one_hot(samples.reshape(scores.shape[:2]), rows.drafts)

    def _verify_whole_rows(
        self,
        slots: Slots,
        rows: VerifyRows,
        sampling: RowSampling,
        logits: jax.Array,
        *,
        reports: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Sorting and rejection need whole rows: every device takes the slots that fall to it.

        Returns (tokens [B, T], accepted [B], reports of the distribution that was sampled from, or None).
        """
        vocabulary = self.vocabulary
        mine = sampling.map(vocabulary.my_rows)
        target = scale_by_temperature(vocabulary.to_whole_rows(logits), mine.temperature)
        if slots.shaping is not None:
            min_p = vocabulary.my_rows(min_p_of(slots.shaping, rows))
            target = drop_unlikely(target, min_p, mine.temperature)
        target = keep_top(target, mine)
        drafts = vocabulary.my_rows(rows.drafts)
        if slots.draft_logits is not None and drafts.shape[1]:
            assert self.mtp is not None
            kept = slots.draft_logits[rows.slot, : drafts.shape[1]]
            kept = self.mtp.vocabulary.over_all_ids(vocabulary.to_whole_rows(kept))
            tokens, accepted = accept_probabilistic(target, kept, drafts, mine)
        else:
            ids = jnp.arange(target.shape[-1], dtype=jnp.int32)
            samples = jnp.argmax(add_noise(target, mine, ids, TARGET), axis=-1).astype(jnp.int32)
            tokens, accepted = accept_one_hot(samples, drafts)
        b = rows.slot.shape[0]
        made = vocabulary.gather_rows(tokens, b), vocabulary.gather_rows(accepted, b)
        if not reports:
            return *made, None
        packed = report_whole(target, tokens)
        return *made, vocabulary.gather_rows(packed.reshape(packed.shape[0], -1), b)

    def _report_prompt(self, chunk: Chunk, generation: jax.Array, hidden: jax.Array, width: int) -> jax.Array:
        """Result rows [C, width]: log-probabilities of the prompt's tokens after each of the chunk's."""
        columns = jnp.arange(chunk.tokens.shape[0], dtype=jnp.int32)
        following = jnp.where(columns == chunk.count - 1, chunk.next_token, jnp.roll(chunk.tokens, -1))
        following = jnp.where(chunk.valid & (columns < chunk.count), following, -1)
        reports = report_prompt(hidden, following, self.vocabulary)
        return prompt_rows(reports, chunk.slot, generation, chunk.start, following, width)

    def _advance(
        self, slots: Slots, rows: VerifyRows, tokens: jax.Array, count: jax.Array, stopped: jax.Array
    ) -> Slots:
        """Slots after their rows emitted `count` [B] of `tokens` [B, T]; count 0 leaves a slot as it was."""
        length = rows.start + count
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        finished = stopped | (length + 1 >= self.plan.max_total[rows.slot])
        at = scatter_index(rows, slots)
        shaping, context = slots.shaping, slots.context
        if shaping is not None:
            shaping = note_emitted(shaping, rows, tokens, count, self.vocabulary)
        if context is not None:
            old = context[rows.slot]  # behind a prompt it is what comes before the first token emitted
            read = jnp.concatenate([slots.last_token[rows.slot][:, None], tokens], axis=1)
            moved = advance_context(old, read, count)
            context = context.at[at].set(jnp.where(rows.in_chunk[:, None], old, moved), mode="drop")
        return dataclasses.replace(
            slots,
            shaping=shaping,
            context=context,
            generation=slots.generation.at[at].set(rows.generation, mode="drop"),
            length=slots.length.at[at].set(length, mode="drop"),
            last_token=slots.last_token.at[at].set(last, mode="drop"),
            finished=slots.finished.at[at].set(finished, mode="drop"),
            stood=slots.stood.at[at].set(jnp.where(rows.in_chunk, 0, count), mode="drop"),
        )
