"""Mistakes that engines of this kind have been seen to make, put back by patching.

Each is a function of a `pytest.MonkeyPatch`; engines built afterwards make the mistake. The numbers are those
of the reports' list in docs/historic-failures.md.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.config import EngineConfig
from mtp_jax.engine import latent
from mtp_jax.engine.draft import Drafter
from mtp_jax.engine.paged import PagedAttention
from mtp_jax.engine.ring import Ring
from mtp_jax.errors import InvalidValueError
from mtp_jax.models.layers import rms_norm
from mtp_jax.models.mtp import MTPModule
from sharding.mesh import STAGE

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]

# The module and its inputs


def skip_fc(patch: Patch) -> None:
    """15: the module's projection is skipped, so that it never hears the token."""

    def call(self: MTPModule, hidden, embedding, indices, cache, around, gather_proj=None):
        x = rms_norm(hidden, self.hidden_norm[...], self.eps)
        x, indices, cache = self.layer(x, indices, cache, around)
        return rms_norm(x, self.final_norm[...], self.eps), indices, cache

    patch.setattr(MTPModule, "__call__", call)


def skip_fc_off_first_rank(patch: Patch) -> None:
    """15, as it was: only where the device is not of the first stage."""
    whole = MTPModule.__call__

    def call(self: MTPModule, hidden, embedding, indices, cache, around, gather_proj=None):
        first = jax.lax.axis_index(STAGE) == 0
        embedding = jnp.where(first, embedding, jnp.zeros((), embedding.dtype))
        return whole(self, hidden, embedding, indices, cache, around, gather_proj)

    patch.setattr(MTPModule, "__call__", call)


def foreign_embedding(patch: Patch) -> None:
    """16 and 18: the module embeds tokens by rows that are not the target's (here: other tokens')."""
    run = Drafter._run

    def wrong(self: Drafter, *args, **kwargs):
        vocabulary = self.mtp.vocabulary
        other = dataclasses.replace(vocabulary, embedding=jnp.flip(vocabulary.embedding, axis=0))
        return run(
            dataclasses.replace(self, mtp=dataclasses.replace(self.mtp, vocabulary=other)), *args, **kwargs
        )

    patch.setattr(Drafter, "_run", wrong)


def stale_draft_indices(patch: Patch) -> None:
    """17: the module's attention reads positions that nobody chose this time: always the first ones."""
    whole = MTPModule.__call__

    def call(self: MTPModule, hidden, embedding, indices, cache, around, gather_proj=None):
        indexer = self.layer.attention.indexer
        first = jnp.arange(indexer.topk, dtype=jnp.int32)
        stale = jnp.broadcast_to(first, (hidden.shape[0], indexer.topk))
        around = dataclasses.replace(around, reuse_indices=True)
        return whole(self, hidden, embedding, stale, cache, around, gather_proj)

    patch.setattr(MTPModule, "__call__", call)


def recycle_before_norm(patch: Patch) -> None:
    """19: later draft steps take the module's output before its final norm."""
    propose = Drafter._propose

    def call(self: MTPModule, hidden, embedding, indices, cache, around, gather_proj=None):
        normed = [
            rms_norm(hidden, self.hidden_norm[...], self.eps),
            rms_norm(embedding, self.token_norm[...], self.eps),
        ]
        x = jnp.concatenate(normed, axis=-1) @ self.input_proj[...].T
        return self.layer(x, indices, cache, around)

    def normed(self: Drafter, output, slot, position):
        module = self.mtp.module
        return propose(self, rms_norm(output, module.final_norm[...], module.eps), slot, position)

    patch.setattr(MTPModule, "__call__", call)
    patch.setattr(Drafter, "_propose", normed)


# What stages hear of one another


def refuse_drafts_over_stages(patch: Patch) -> None:
    """1: a head is refused where the target is split into stages."""
    check = EngineConfig.__post_init__

    def refuse(self: EngineConfig) -> None:
        check(self)
        if self.stages > 1 and self.num_speculative_tokens:
            raise InvalidValueError("stages", self.stages, "1, where drafts are made")

    patch.setattr(EngineConfig, "__post_init__", refuse)


def _with_flights(patch: Patch, change: Callable[[Ring, object], object]) -> None:
    """Stages read flights that `change` made of the true ones."""
    run = Ring._run_stage

    def wrong(self: Ring, state, here):
        return run(self, dataclasses.replace(state, flight=change(self, state.flight)), here)

    patch.setattr(Ring, "_run_stage", wrong)


def _is_last(ring: Ring) -> jax.Array:
    return jax.lax.axis_index(STAGE) == ring.num_stages - 1


def advance_as_if_all_stood(patch: Patch) -> None:
    """9: stages but the last never hear of rejected drafts: their positions run ahead."""

    def change(ring: Ring, flight):
        rejected = jnp.where(flight.stood > 0, ring.head.config.num_speculative_tokens + 1 - flight.stood, 0)
        start = jnp.where(_is_last(ring), flight.start, flight.start + rejected)
        return dataclasses.replace(flight, start=start)

    _with_flights(patch, change)


def keep_all_rows(patch: Patch, everywhere: bool = False) -> None:
    """10: recurrent layers of all stages but the last keep rejected rows in their states.

    `everywhere`: of all stages, so that nothing is ever rolled back.
    """

    def change(ring: Ring, flight):
        everything = jnp.where(flight.stood > 0, ring.head.config.num_speculative_tokens + 1, 0)
        spared = jnp.zeros((), jnp.bool_) if everywhere else _is_last(ring)
        return dataclasses.replace(flight, stood=jnp.where(spared, flight.stood, everything))

    _with_flights(patch, change)


def embed_no_drafts(patch: Patch) -> None:
    """11: the first stage embeds zeros where drafts should be."""
    rebuild = Ring._rebuild

    def wrong(self: Ring, state, leaving):
        flight, embedded = rebuild(self, state, leaving)
        return flight, dataclasses.replace(embedded, x=embedded.x.at[:, 1:].set(0))

    patch.setattr(Ring, "_rebuild", wrong)


def drafts_of_another_step(patch: Patch) -> None:
    """12: what is verified are drafts of another batch in flight, not those that the rows were built with."""
    leaving_rows = Ring._leaving

    def wrong(self: Ring, state, leaving):
        rows, chunk = leaving_rows(self, state, leaving)
        other = self._group(state.flight, (leaving + 1) % self.num_stages).tokens[:, 1:]
        drafts = jnp.concatenate([other, rows.drafts[other.shape[0] :]])
        return dataclasses.replace(rows, drafts=drafts), chunk

    patch.setattr(Ring, "_leaving", wrong)


def ignore_generations(patch: Patch) -> None:
    """13: work in flight for a request that ended goes on, though its slot has another owner."""
    group = Ring._group

    def wrong(self: Ring, flight, index):
        found = group(self, flight, index)
        live = jax.lax.dynamic_index_in_dim(flight.live, index, keepdims=False)[: self.bucket.rows]
        return dataclasses.replace(found, valid=live)

    patch.setattr(Ring, "_group", wrong)


def lose_indices(patch: Patch) -> None:
    """22: chosen positions do not go along to the next stage: it finds what was there before."""
    pass_on = Ring._pass_on

    def wrong(self: Ring, state, carry, embedded):
        stale = dataclasses.replace(carry, indices=jnp.zeros_like(carry.indices))
        return pass_on(self, state, stale, embedded)

    patch.setattr(Ring, "_pass_on", wrong)


def number_index_caches_globally(patch: Patch) -> None:
    """23: an indexer of a later stage reads the cache of its number among all, where its keys are not."""
    select = latent.select

    def wrong(self: PagedAttention, q, weights, key, cache, topk):
        if STAGE not in jax.typeof(cache).manual_axis_type.varying:  # the module's, which is on all devices
            return right(self, q, weights, key, cache, topk)
        (written,) = self._written((cache,), (key,))
        first = jax.lax.axis_index(STAGE) == 0
        read = jnp.where(first, written, jnp.zeros((), written.dtype))
        chosen = [
            select(rows, heads, read, segment.table, segment.positions, topk)
            for segment, rows, heads in self._split(q, weights)
        ]
        return jnp.concatenate(chosen), written

    right = PagedAttention.select
    patch.setattr(PagedAttention, "select", wrong)


def send_fewer_columns(patch: Patch) -> None:
    """6: a step without drafts writes narrower rows than its follower reads."""
    rebuild = Ring._rebuild

    def wrong(self: Ring, state, leaving):
        flight, embedded = rebuild(self, state, leaving)
        return dataclasses.replace(flight, tokens=flight.tokens[:, :, : self.bucket.drafts + 1]), embedded

    patch.setattr(Ring, "_rebuild", wrong)


keep_all_rows_everywhere = functools.partial(keep_all_rows, everywhere=True)
