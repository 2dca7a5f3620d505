"""Losses in chunks are the plain ones, and acceptance is counted as serving counts it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.train import losses
from mtp_jax.train.losses import (
    Heads,
    accepted_counts,
    best_tokens,
    chunk_length,
    draft_cross_entropies,
    hard_cross_entropy,
)
from mtp_jax.train.trunk import Packed
from mtp_jax.train.unroll import live_lines
from tests.train.models import pack

K, B, S, D, V = 3, 2, 11, 8, 23
# fp32 sums of some 60 terms of size 3, in another order than NumPy's in float64.
RTOL, ATOL = 2e-5, 1e-5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 or 4 positions, of which 22 fill no whole number."""
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 8 * V)


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def rows_of(seed: int = 0) -> Packed:
    return pack([[7, 4], [9]], prompts=2, length=S, vocab=V, seed=seed)


@pytest.mark.parametrize("ids", [None, np.array([1, 2, 5, 11, 22], np.int32)], ids=["all", "reduced"])
def test_draft_cross_entropies(ids: np.ndarray | None) -> None:
    """Against a loop over lines: draft j + 1 of base p is compared with the target at p + 1 + j."""
    outputs, hidden, whole = draw(1, K, B, S, D), draw(2, B, S, D), draw(3, V, D)
    live = np.asarray(live_lines(rows_of(), K))
    weights = np.where(live, np.random.default_rng(4).uniform(0.5, 2, live.shape), 0).astype(np.float32)
    draft, tokens = (whole, np.arange(V)) if ids is None else (whole[ids], ids)
    heads = Heads(jnp.asarray(whole), jnp.asarray(draft), None if ids is None else jnp.asarray(ids))
    best = (hidden @ whole.T).argmax(-1).astype(np.int32)
    y, h, t, w = map(jnp.asarray, (outputs, hidden, best, weights))
    soft, labels, drafts = draft_cross_entropies(y, h, t, w, heads)
    expected, lacking = np.zeros((2, K)), 0
    for j, b, p in np.argwhere(live):
        wanted = np.exp(log_softmax(hidden[b, p + 1 + j] @ draft.T))
        said = log_softmax(outputs[j, b, p] @ draft.T)
        expected[0, j] -= weights[j, b, p] * (wanted * said).sum()
        at = np.flatnonzero(tokens == best[b, p + 1 + j])
        expected[1, j] -= weights[j, b, p] * said[at].sum()
        lacking += len(at) == 0
        assert drafts[j, b, p] == tokens[said.argmax()]
    assert (lacking == 0) == (ids is None)
    np.testing.assert_allclose(soft, expected[0], rtol=RTOL)
    np.testing.assert_allclose(labels, expected[1], rtol=RTOL)


def test_gradients_of_chunks() -> None:
    """The chunked loss has the gradient of the plain one, for outputs and for a head that is trained."""
    hidden, head = jnp.asarray(draw(4, B, S, D)), jnp.asarray(draw(5, V, D))
    labels = jnp.asarray(np.random.default_rng(6).integers(0, V, (B, S)))
    counted = jnp.asarray(np.random.default_rng(7).random((B, S)) < 0.6)

    def plain(hidden: jax.Array, head: jax.Array) -> jax.Array:
        said = jax.nn.log_softmax(jnp.einsum("bsd,vd->bsv", hidden, head, precision="highest"))
        return -jnp.sum(jnp.take_along_axis(said, labels[..., None], axis=-1)[..., 0] * counted.astype("f4"))

    chunked = functools.partial(lambda h, w: hard_cross_entropy(h, labels, counted, w))
    for one, other in zip(
        jax.tree.leaves(jax.value_and_grad(chunked, argnums=(0, 1))(hidden, head)),
        jax.tree.leaves(jax.value_and_grad(plain, argnums=(0, 1))(hidden, head)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=RTOL, atol=ATOL)


def test_best_tokens() -> None:
    hidden, head = draw(8, B, S, D), draw(9, V, D)
    found = best_tokens(jnp.asarray(hidden), jnp.asarray(head))
    np.testing.assert_array_equal(found, (hidden @ head.T).argmax(-1))


def test_accepted_counts() -> None:
    """Against a loop; half of the drafts are right, so that every length of acceptance occurs."""
    rng, rows = np.random.default_rng(10), pack([[20, 15], [30]], prompts=2, length=40, vocab=V)
    live, tokens = np.asarray(live_lines(rows, K)), np.asarray(rows.tokens)
    wanted = rng.integers(0, V, tokens.shape).astype(np.int32)
    wanted[:, :-1] = np.where(rng.random(tokens[:, 1:].shape) < 0.5, tokens[:, 1:], wanted[:, :-1])
    drafts = rng.integers(0, V, (K, *tokens.shape)).astype(np.int32)
    for j in range(K):
        right = np.roll(wanted, -1 - j, axis=1)
        drafts[j] = np.where(rng.random(tokens.shape) < 0.7, right, drafts[j])
    lines, greedy, sampled = accepted_counts(
        jnp.asarray(drafts), jnp.asarray(wanted), rows, jnp.asarray(live)
    )
    counts = np.zeros((2, K))
    whole = np.argwhere(live[-1])
    for b, p in whole:
        for kind, right in enumerate((wanted[b, p + 1 :], tokens[b, p + 2 :])):
            for j in range(K):
                if drafts[j, b, p] != right[j]:
                    break
                counts[kind, j] += 1
    assert lines == len(whole) and 0 < counts[1, -1] < counts[0, -1] < counts[0, 0] < len(whole)
    np.testing.assert_array_equal([greedy, sampled], counts)


def test_chunk_length() -> None:
    assert chunk_length(rows=22, vocab=V) == 8
    assert chunk_length(rows=3, vocab=V) == 4  # no more than the rows fill
    assert chunk_length(rows=22, vocab=100 * V) == 1
