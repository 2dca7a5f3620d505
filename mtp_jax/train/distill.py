"""The loss of an MTP module that learns a frozen target's distribution."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mtp_jax.config import ModelConfig
from mtp_jax.train.attention import Implementation
from mtp_jax.train.losses import Heads, accepted_counts, best_tokens, draft_cross_entropies
from mtp_jax.train.notes import Notes
from mtp_jax.train.step import Sums
from mtp_jax.train.trunk import Packed, Target, hidden_states
from mtp_jax.train.unroll import Params, cast_params, draft_outputs, live_lines


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """What the loss reads and nobody trains: the target, and the rows that drafts choose among."""

    target: Target
    draft_head: jax.Array | None  # Vd D; None: drafts use the whole LM head
    draft_ids: jax.Array | None  # Vd int32, ascending

    @property
    def heads(self) -> Heads:
        whole = self.target.head
        return Heads(whole, whole if self.draft_head is None else self.draft_head, self.draft_ids)


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The loss: sum over steps j of `step_weights[j]` times the cross entropy of draft j + 1.

    That is one against the target's distribution and, with `label_weight` of the whole, one against its best
    token: at low temperatures only that is accepted. Lines of samples that were written greedily weigh
    `greedy_weight`, others 1. Beside it stands what the module's layer wants to learn (`Notes`).
    """

    model: ModelConfig
    step_weights: Sequence[float]  # K
    implementation: Implementation
    label_weight: float = 0.0
    greedy_weight: float = 1.0

    def __call__(self, params: Params, frozen: Frozen, rows: Packed) -> tuple[jax.Array, Sums]:
        """Sums over the rows: the weighted loss, and what is reported of it."""
        num_drafts = len(self.step_weights)
        target, heads = frozen.target, frozen.heads
        dtype = target.embedding.dtype
        hidden = jax.lax.stop_gradient(hidden_states(self.model, target, rows, self.implementation))
        embedding = target.embedding[rows.tokens]
        params = cast_params(self.model, params, dtype)
        notes = Notes(rows.segments.reshape(-1) > 0)
        outputs = draft_outputs(
            self.model, params, hidden, embedding, rows, num_drafts, self.implementation, notes
        )
        live = live_lines(rows, num_drafts)
        weights = jnp.where(live, jnp.where(rows.greedy, jnp.float32(self.greedy_weight), 1.0), 0.0)
        wanted = best_tokens(hidden, heads.whole)
        soft, labels, drafts = draft_cross_entropies(outputs, hidden, wanted, weights, heads)
        lines, accepted, sampled = accepted_counts(drafts, wanted, rows, live)
        greedy_lines, accepted_greedy, _ = accepted_counts(drafts, wanted, rows, live & rows.greedy)
        counts = jnp.sum(weights, axis=(1, 2))
        sums = {
            "loss": soft,
            "label_loss": labels,
            "counts": counts,
            "lines": lines,
            "accepted": accepted,
            "accepted_sampled": sampled,
            "greedy_lines": greedy_lines,
            "accepted_greedy": accepted_greedy,
            "weight": counts[0],
        }
        losses = (1 - self.label_weight) * soft + self.label_weight * labels
        return jnp.dot(jnp.asarray(self.step_weights, jnp.float32), losses) + notes.total, sums
