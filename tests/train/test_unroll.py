"""The parallel unroll computes what a plain recurrence computes, one line and one step after another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.config import ModelConfig
from mtp_jax.models.layers import Around, Cache, rope_tables, split_qkv
from mtp_jax.models.leaves import merge
from mtp_jax.models.mtp import MTPModule
from mtp_jax.models.registry import make_mtp, mtp_table
from mtp_jax.train.attention import PackedAttention
from mtp_jax.train.trunk import Packed, Target, hidden_states
from mtp_jax.train.unroll import Params, draft_outputs, live_lines
from tests.train.models import LLAMA, MIMO, pack, params_of, target_of

# fp32 sums of up to 100 terms of size 1 in another order; wrong positions or rows differ by 0.1 and more.
RTOL, ATOL = 2e-4, 2e-5
NUM_DRAFTS = 3


class ListAttention(PackedAttention):
    """Attention of a single query over an explicit list of keys and values, in float64 NumPy."""

    def __init__(self, keys: list[np.ndarray], values: list[np.ndarray]):
        self.keys, self.values = keys, values

    def grouped(self, qkv: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        q, k, v = split_qkv(qkv)
        self.keys.append(np.asarray(k[0], np.float64))
        self.values.append(np.asarray(v[0], np.float64))
        keys, values = np.stack(self.keys), np.stack(self.values)  # S G H
        query = np.asarray(q[0], np.float64)  # G Q H
        scores = np.einsum("gqh,sgh->gqs", query, keys) * query.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("gqs,sgh->gqh", weights, values)
        return jnp.asarray(out[None], jnp.float32), cache


def recurrence(
    config: ModelConfig, params: Params, hidden: np.ndarray, embedding: np.ndarray, num_drafts: int
) -> dict[tuple[int, int], np.ndarray]:
    """One sample: hidden and embedding [S, D] -> output of step j at base p, by (j, p)."""
    leaves = mtp_table(config)
    module: MTPModule = merge(
        make_mtp(config, jnp.dtype("float32")), leaves, [params[x.name] for x in leaves]
    )

    def run(h: np.ndarray, token: int, position: int, keys: list, values: list) -> np.ndarray:
        rope = rope_tables(jnp.asarray([position]), config)
        attend = ListAttention(keys, values)
        nothing = (jnp.zeros(()), jnp.zeros(()))
        around = Around(rope, attend)
        out, *_ = module(jnp.asarray(h[None]), jnp.asarray(embedding[token][None]), None, nothing, around)
        return np.asarray(out[0])

    found, keys, values = {}, [], []
    for base in range(hidden.shape[0] - 1):
        y = found[0, base] = run(hidden[base], base + 1, base, keys, values)
        line_keys, line_values = list(keys), list(values)  # provisional rows are the line's own
        for step in range(1, num_drafts):
            if base + 1 + step >= hidden.shape[0]:
                break
            y = found[step, base] = run(y, base + 1 + step, base + step, line_keys, line_values)
    return found


@functools.partial(jax.jit, static_argnums=0)
def parallel(config: ModelConfig, params: Params, target: Target, rows: Packed) -> tuple[jax.Array, ...]:
    """Hidden states, embeddings, and outputs [K, B, S, D]."""
    hidden, embedding = hidden_states(config, target, rows, "xla"), target.embedding[rows.tokens]
    return hidden, embedding, draft_outputs(config, params, hidden, embedding, rows, NUM_DRAFTS, "xla")


@pytest.mark.parametrize("config", [LLAMA, MIMO], ids=lambda config: config.model_type)
def test_unroll_is_the_recurrence(config: ModelConfig) -> None:
    params, rows = params_of(config), pack([[7, 5], [9]], prompts=2, length=13, vocab=config.vocab_size)
    hidden, embedding, found = map(np.asarray, parallel(config, params, target_of(config), rows))
    compared = 0
    for row, start, size in [(0, 0, 7), (0, 7, 5), (1, 0, 9)]:
        at = slice(start, start + size)
        expected = recurrence(config, params, hidden[row, at], embedding[row, at], NUM_DRAFTS)
        for (step, base), y in expected.items():
            np.testing.assert_allclose(found[step, row, start + base], y, rtol=RTOL, atol=ATOL)
            compared += 1
    assert compared == sum(sum(size - 1 - step for step in range(NUM_DRAFTS)) for size in (7, 5, 9))


def test_neighbours_in_a_row_do_not_matter() -> None:
    """A sample alone in a row has the outputs that it has behind another one."""
    target, params = target_of(LLAMA), params_of(LLAMA)
    both = pack([[6, 7]], prompts=1, length=13, vocab=LLAMA.vocab_size)
    # The same shape for both, so that one program computes them.
    alone = jax.tree.map(lambda x: jnp.pad(x[:, 6:], ((0, 0), (0, 6))), both)
    live = np.asarray(live_lines(alone, NUM_DRAFTS))[..., :7]
    assert live.any(axis=(1, 2)).all()
    packed, single = (np.asarray(parallel(LLAMA, params, target, rows)[2]) for rows in (both, alone))
    np.testing.assert_allclose(packed[:, :, 6:][live], single[:, :, :7][live], rtol=RTOL, atol=ATOL)


def test_live_lines() -> None:
    """A sample of 6 with 2 given tokens: base 1 drafts behind token 2, the first of the model's own."""
    rows = pack([[6, 3]], prompts=2, length=10, vocab=5)
    live = np.asarray(live_lines(rows, 3))[:, 0].astype(int)
    assert live.tolist() == [
        [0, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
