"""The loss of a target and its MTP module that are trained together, on text (DeepSeek-V3's)."""

import dataclasses

import jax
import jax.numpy as jnp

from mtp_jax.config import ModelConfig
from mtp_jax.train.attention import Implementation
from mtp_jax.train.losses import accepted_counts, best_tokens, hard_cross_entropy
from mtp_jax.train.notes import Notes
from mtp_jax.train.step import Sums
from mtp_jax.train.trunk import Packed, Target, cast_target, hidden_states
from mtp_jax.train.unroll import Params, ahead, cast_params, draft_outputs, live_lines


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joint:
    """What is trained: fp32."""

    target: Target
    mtp: Params


@dataclasses.dataclass(frozen=True)
class JointLoss:
    """The next token's cross entropy, plus `mtp_weight` times the mean of those of the K drafts.

    Indexers and routers add losses of their own (`Notes`).
    """

    model: ModelConfig
    num_drafts: int
    mtp_weight: float
    implementation: Implementation
    dtype: jnp.dtype

    def __call__(self, params: Joint, frozen: None, rows: Packed) -> tuple[jax.Array, Sums]:
        """Sums over the rows: the weighted loss, and what is reported of it."""
        target, k = cast_target(self.model, params.target, self.dtype), self.num_drafts
        mtp = cast_params(self.model, params.mtp, self.dtype)
        notes = Notes(rows.segments.reshape(-1) > 0)
        hidden = hidden_states(self.model, target, rows, self.implementation, remat=True, notes=notes)
        written = ahead(rows.loss_mask, 1) & (ahead(rows.segments, 1) == rows.segments) & (rows.segments > 0)
        main = hard_cross_entropy(hidden, ahead(rows.tokens, 1), written, target.head)
        embedding = target.embedding[rows.tokens]
        outputs = draft_outputs(self.model, mtp, hidden, embedding, rows, k, self.implementation, notes)
        live = live_lines(rows, k)
        labels = [ahead(rows.tokens, 2 + j) for j in range(k)]
        losses = jnp.stack(
            [hard_cross_entropy(outputs[j], labels[j], live[j], target.head) for j in range(k)]
        )
        fixed = jax.lax.stop_gradient((outputs, hidden, target.head))
        drafts = jnp.stack([best_tokens(fixed[0][j], fixed[2]) for j in range(k)])
        lines, accepted, sampled = accepted_counts(drafts, best_tokens(fixed[1], fixed[2]), rows, live)
        count = jnp.sum(written, dtype=jnp.float32)
        sums = {
            "main_loss": main,
            "main_count": count,
            "loss": losses,
            "counts": jnp.sum(live, axis=(1, 2), dtype=jnp.float32),
            "lines": lines,
            "accepted": accepted,
            "accepted_sampled": sampled,
            "weight": count,
        }
        return main + self.mtp_weight * jnp.mean(losses) + notes.total, sums
