"""What leaves the last stage at a tick: the rows to verify, and the prompt chunk beside them."""

import dataclasses

import jax
import jax.numpy as jnp

from mtp_jax.engine.state import Slots


@dataclasses.dataclass(frozen=True)
class VerifyRows:
    """What one tick verifies: the leaving group's rows and, as a last row, the leaving prompt chunk.

    A chunk that ends its prompt is a row without drafts: its first column samples the first token.
    """

    slot: jax.Array  # B
    generation: jax.Array  # B
    start: jax.Array  # B      position of the first column's input token
    drafts: jax.Array  # B K   -1: absent
    valid: jax.Array  # B bool produces tokens, and may write to its slot
    in_chunk: jax.Array  # B bool its input was a prompt's last token


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The leaving prompt chunk; tokens [C], the others scalars. `valid`: its generation is current."""

    slot: jax.Array
    start: jax.Array
    count: jax.Array
    next_token: jax.Array
    tokens: jax.Array
    valid: jax.Array


def scatter_index(rows: VerifyRows, slots: Slots) -> jax.Array:
    """Slot of each row to write to, [B]; past the end, and so dropped, where the row is not valid."""
    return jnp.where(rows.valid, rows.slot, slots.generation.shape[0])
