"""The head of a tick: verify the rows that left the last stage, update their slots, draft the next tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.draft import MTP, Drafter
from mtp_jax.engine.leaving import Chunk, VerifyRows, scatter_index
from mtp_jax.engine.plan_arrays import PlanArrays
from mtp_jax.engine.sampling import TARGET, RowSampling, add_noise, keep_top, scale_by_temperature
from mtp_jax.engine.state import Slots
from mtp_jax.engine.verify import accept_one_hot, accept_probabilistic, cut_at_stop
from mtp_jax.engine.vocabulary import Vocabulary
from mtp_jax.models.layers import KVCache, rms_norm


@dataclasses.dataclass(frozen=True)
class Head:
    """Vocabulary, final norm and MTP module of one device, bound to one dispatch's plan."""

    model: ModelConfig
    config: EngineConfig
    vocabulary: Vocabulary
    final_norm: jax.Array
    mtp: MTP | None
    plan: PlanArrays

    def __call__(
        self,
        slots: Slots,
        mtp_cache: KVCache | None,
        rows: VerifyRows,
        chunk: Chunk | None,
        hidden: jax.Array,
        lane_hidden: jax.Array | None,
    ) -> tuple[Slots, KVCache | None, jax.Array]:
        """hidden [B, T, D] and lane_hidden [C, D] are the residual stream after the last layer.

        Returns (slots, MTP cache, results [B (+1), RESULT_FIELDS + T] int32).
        """
        hidden = rms_norm(hidden, self.final_norm, self.model.rms_norm_eps)
        last_rows = hidden
        if chunk is not None:
            assert lane_hidden is not None
            lane_hidden = rms_norm(lane_hidden, self.final_norm, self.model.rms_norm_eps)
            # An empty lane has count 0, and then a row that is not valid.
            last = jax.lax.dynamic_slice_in_dim(lane_hidden, chunk.count - 1, 1)
            column = jnp.zeros((1, *hidden.shape[1:]), hidden.dtype).at[0, 0].set(last[0])
            last_rows = jnp.concatenate([hidden, column])
        with jax.named_scope("verify"):
            tokens, accepted = self._verify(slots, rows, last_rows)
            count = jnp.where(rows.valid, accepted + 1, 0)
            count = jnp.minimum(count, self.plan.max_total[rows.slot] - rows.start - 1)
            count, stopped = cut_at_stop(tokens, count, self.plan.stop_ids[rows.slot])
        slots = self._advance(slots, rows, tokens, count, stopped)
        if self.mtp is not None:
            assert mtp_cache is not None
            with jax.named_scope("draft"):
                drafter = Drafter(self.model, self.config, self.vocabulary, self.mtp, self.plan)
                slots, mtp_cache = drafter(
                    slots, mtp_cache, rows, chunk, hidden, lane_hidden, tokens, accepted
                )
        offered = jnp.sum(rows.drafts >= 0, axis=1, dtype=jnp.int32)
        fields = jnp.stack([rows.slot, rows.generation, count, offered, accepted], axis=1)
        return slots, mtp_cache, jnp.concatenate([fields, tokens], axis=1)

    # Verification

    def _sampling(self, slot: jax.Array, position: jax.Array) -> RowSampling:
        """Parameters of rows with these slots, for tokens at these positions (of one shape)."""
        plan = self.plan
        return RowSampling(
            plan.temperature[slot], plan.top_k[slot], plan.top_p[slot], plan.seed[slot], position
        )

    def _verify(self, slots: Slots, rows: VerifyRows, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """hidden [B, T, D] post-norm -> (tokens [B, T], accepted [B])."""
        b, t, d = hidden.shape
        columns = jnp.arange(t, dtype=jnp.int32)
        slot = jnp.broadcast_to(rows.slot[:, None], (b, t))
        sampling = self._sampling(slot, rows.start[:, None] + columns + 1)
        logits = self.vocabulary.logits(hidden.reshape(b * t, d)).reshape(b, t, -1)
        warm = (sampling.temperature > 0) & rows.valid[:, None]
        cut = (sampling.top_k > 0) | (sampling.top_p < 1)
        probabilistic = self.config.draft_sampling == "probabilistic" and self.mtp is not None

        def spread() -> tuple[jax.Array, jax.Array]:
            # Greedy and plain temperature need no normaliser: an argmax over the shards is enough.
            def noisy(x: jax.Array) -> jax.Array:
                return self.vocabulary.add_noise(
                    scale_by_temperature(x, sampling.temperature), sampling, TARGET
                )

            scores = jax.lax.cond(jnp.any(warm), noisy, lambda x: x, logits)
            samples = self.vocabulary.argmax(scores.reshape(b * t, -1)).reshape(b, t)
            return accept_one_hot(samples, rows.drafts)

        def whole() -> tuple[jax.Array, jax.Array]:
            return self._verify_whole_rows(slots, rows, sampling, logits, probabilistic)

        needs_whole = jnp.any(warm & (cut | probabilistic))
        return jax.lax.cond(needs_whole, whole, spread)

    def _verify_whole_rows(
        self, slots: Slots, rows: VerifyRows, sampling: RowSampling, logits: jax.Array, probabilistic: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Sorting and rejection need whole rows: every device takes the slots that fall to it."""
        vocabulary = self.vocabulary
        mine = sampling.map(vocabulary.my_rows)
        target = scale_by_temperature(vocabulary.to_whole_rows(logits), mine.temperature)
        target = keep_top(target, mine)
        drafts = vocabulary.my_rows(rows.drafts)
        if probabilistic:
            assert slots.draft_logits is not None
            kept = vocabulary.to_whole_rows(slots.draft_logits[rows.slot])
            tokens, accepted = accept_probabilistic(target, kept, drafts, mine)
        else:
            ids = jnp.arange(target.shape[-1], dtype=jnp.int32)
            samples = jnp.argmax(add_noise(target, mine, ids, TARGET), axis=-1).astype(jnp.int32)
            tokens, accepted = accept_one_hot(samples, drafts)
        b = rows.slot.shape[0]
        return vocabulary.gather_rows(tokens, b), vocabulary.gather_rows(accepted, b)

    def _advance(
        self, slots: Slots, rows: VerifyRows, tokens: jax.Array, count: jax.Array, stopped: jax.Array
    ) -> Slots:
        """Slots after their rows emitted `count` [B] of `tokens` [B, T]; count 0 leaves a slot as it was."""
        length = rows.start + count
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        finished = stopped | (length + 1 >= self.plan.max_total[rows.slot])
        at = scatter_index(rows, slots)
        return dataclasses.replace(
            slots,
            generation=slots.generation.at[at].set(rows.generation, mode="drop"),
            length=slots.length.at[at].set(length, mode="drop"),
            last_token=slots.last_token.at[at].set(last, mode="drop"),
            finished=slots.finished.at[at].set(finished, mode="drop"),
        )
