"""The pure functions of sampling and verification."""

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.engine.sampling import (
    ACCEPT,
    DRAFT,
    TARGET,
    RowSampling,
    add_noise,
    gumbel,
    keep_top,
    scale_by_temperature,
    uniform,
)
from mtp_jax.engine.verify import accept_one_hot, accept_probabilistic, count_prefix, cut_at_stop


def rows(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> RowSampling:
    return RowSampling(
        temperature=jnp.full(count, temperature, jnp.float32),
        top_k=jnp.full(count, top_k, jnp.int32),
        top_p=jnp.full(count, top_p, jnp.float32),
        seed=jnp.tile(jnp.array([[5, 9]], jnp.uint32), (count, 1)),
        position=jnp.arange(count, dtype=jnp.int32),
    )


def kept(probabilities: list[float], **params: float) -> list[int]:
    """Ids that stay."""
    logits = jnp.log(jnp.array([probabilities], jnp.float32))
    return np.flatnonzero(np.isfinite(np.asarray(keep_top(logits, rows(1, **params)))[0])).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),  # more than there are
        ({"top_p": 0.01}, [1]),  # at least one
        ({"top_p": 0.45}, [1]),
        ({"top_p": 0.7}, [1, 2]),
        ({"top_p": 0.99}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.6}, [1]),  # of what top-k left, the first has 5/8
        ({"top_k": 2, "top_p": 0.65}, [1, 2]),
        ({"temperature": 0.0, "top_k": 1, "top_p": 0.1}, [0, 1, 2, 3]),  # greedy needs no cut
    ],
)
def test_keep_top(params: dict[str, float], expected: list[int]) -> None:
    assert kept([0.1, 0.5, 0.3, 0.1], **params) == expected


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.6}])
def test_keep_top_includes_ties(params: dict[str, float]) -> None:
    assert kept([0.5, 0.25, 0.25], **params) == [0, 1, 2]


def test_top_p_of_one_keeps_the_least_likely() -> None:
    """Rounding of the cumulated mass must not drop the tail."""
    logits = jnp.linspace(0, -80, 1000, dtype=jnp.float32)[None]
    assert bool(jnp.all(keep_top(logits, rows(1)) == logits))


def test_rows_are_cut_each_by_its_own_parameters() -> None:
    mixed = RowSampling(
        temperature=jnp.array([1.0, 0.0, 1.0]),
        top_k=jnp.array([1, 1, 0], jnp.int32),
        top_p=jnp.array([1.0, 0.1, 0.5]),
        seed=jnp.zeros((3, 2), jnp.uint32),
        position=jnp.zeros(3, jnp.int32),
    )
    logits = jnp.tile(jnp.log(jnp.array([0.2, 0.5, 0.3], jnp.float32)), (3, 1))
    counts = np.isfinite(np.asarray(keep_top(logits, mixed))).sum(-1)
    assert counts.tolist() == [1, 3, 1]


def test_temperature_zero_is_greedy() -> None:
    logits = jnp.array([[1.0, 3.0, 2.0]])
    cold = rows(1, temperature=0.0)
    assert bool(jnp.all(scale_by_temperature(logits, cold.temperature) == logits))
    assert bool(jnp.all(add_noise(logits, cold, jnp.arange(3), TARGET) == logits))


def test_noise_does_not_depend_on_the_split() -> None:
    """A device that holds ids 60..89 draws for them what one that holds all ids does."""
    sampling = rows(4)
    whole = gumbel(sampling.seed, sampling.position, jnp.arange(120, dtype=jnp.int32), TARGET)
    part = gumbel(sampling.seed, sampling.position, jnp.arange(60, 90, dtype=jnp.int32), TARGET)
    np.testing.assert_array_equal(whole[:, 60:90], part)


def test_noise_is_uniform_and_independent() -> None:
    """Over ids, positions, streams and both words of the seed."""
    ids = jnp.arange(50_000, dtype=jnp.int32)

    def draw(low: int, high: int, position: int, stream: int) -> np.ndarray:
        seed = jnp.array([low, high], jnp.uint32)
        return np.asarray(uniform(seed, jnp.int32(position), ids, stream))

    draws = [
        draw(*key) for key in ((1, 2, 3, TARGET), (1, 2, 3, DRAFT), (1, 2, 3, ACCEPT), (1, 2, 4, TARGET))
    ]
    draws += [draw(1, 3, 3, TARGET), draw(2, 2, 3, TARGET)]
    for one in draws:
        assert one.min() > 0 and one.max() < 1
        counts = np.histogram(one, 20, (0, 1))[0]
        # 5 standard deviations of a count of n / 20.
        assert np.abs(counts - ids.size / 20).max() < 5 * (ids.size * 0.05 * 0.95) ** 0.5
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 5 / ids.size**0.5


def test_count_prefix() -> None:
    stands = jnp.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], bool)
    assert count_prefix(stands).tolist() == [2, 0, 4]
    assert count_prefix(jnp.zeros((2, 0), bool)).tolist() == [0, 0]


def test_accept_one_hot() -> None:
    samples = jnp.array([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6]])
    drafts = jnp.array([[4, 5], [4, 7], [7, 5], [-1, -1]])
    tokens, accepted = accept_one_hot(samples, drafts)
    assert accepted.tolist() == [2, 1, 0, 0]
    assert bool(jnp.all(tokens == samples))


def probabilistic(p: list[list[float]], q: list[list[float]], drafts: list[int], count: int = 20_000):
    """`count` independent rounds; p for K + 1 columns, q for K."""
    k = len(drafts)
    target = jnp.tile(jnp.log(jnp.array([p], jnp.float32)), (count, 1, 1))
    draft_logits = jnp.tile(jnp.log(jnp.array([q], jnp.float32)), (count, 1, 1))
    seed = jnp.stack([jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.uint32)], -1)
    sampling = RowSampling(
        temperature=jnp.ones((count, k + 1)),
        top_k=jnp.zeros((count, k + 1), jnp.int32),
        top_p=jnp.ones((count, k + 1)),
        seed=jnp.tile(seed[:, None], (1, k + 1, 1)),
        position=jnp.tile(jnp.arange(k + 1, dtype=jnp.int32), (count, 1)),
    )
    tokens, accepted = accept_probabilistic(
        target, draft_logits, jnp.tile(jnp.array([drafts]), (count, 1)), sampling
    )
    return np.asarray(tokens), np.asarray(accepted)


def test_a_draft_stands_with_p_over_q() -> None:
    p, q = [[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]], [[0.8, 0.1, 0.1]]
    tokens, accepted = probabilistic(p, q, [0])
    assert accepted.mean() == pytest.approx(0.25, abs=0.015)  # 5 standard deviations
    fallen = tokens[accepted == 0, 0]
    assert 0 not in fallen, "max(p - q, 0) has no mass at the draft"
    assert (fallen == 1).mean() == pytest.approx(0.4 / 0.6, abs=0.02)
    assert (tokens[accepted == 1, 0] == 0).all()
    assert (tokens[accepted == 1, 1] == 2).mean() == pytest.approx(0.8, abs=0.03)


def test_a_draft_below_p_always_stands() -> None:
    _, accepted = probabilistic([[0.6, 0.4], [0.5, 0.5]], [[0.5, 0.5]], [0])
    assert (accepted == 1).all()


def test_a_draft_outside_the_target_never_stands() -> None:
    tokens, accepted = probabilistic([[0.0, 1.0], [0.5, 0.5]], [[0.9, 0.1]], [0])
    assert (accepted == 0).all() and (tokens[:, 0] == 1).all()


def test_without_a_draft_the_target_is_sampled() -> None:
    """Also where q, left over from another round, is anything."""
    tokens, accepted = probabilistic([[0.2, 0.8], [0.5, 0.5]], [[0.99, 0.01]], [-1])
    assert (accepted == 0).all()
    assert (tokens[:, 0] == 1).mean() == pytest.approx(0.8, abs=0.015)


def test_equal_distributions_accept_everything() -> None:
    p = [[0.2, 0.5, 0.3]] * 2
    _, accepted = probabilistic([*p, [0.1, 0.1, 0.8]], p, [1, 2])
    assert (accepted == 2).all()


def test_cut_at_stop() -> None:
    tokens = jnp.array([[7, 8, 9]] * 5)
    count = jnp.array([3, 3, 1, 3, 0])
    stop_ids = jnp.array([[8, -1], [9, 7], [8, -1], [-1, -1], [7, -1]])
    count, stopped = cut_at_stop(tokens, count, stop_ids)
    assert count.tolist() == [2, 1, 1, 3, 0]
    assert stopped.tolist() == [True, True, False, False, False]


def test_an_absent_token_is_no_stop_token() -> None:
    """Both are written -1."""
    count, stopped = cut_at_stop(jnp.array([[-1, 3]]), jnp.array([2]), jnp.array([[-1]]))
    assert count.tolist() == [2] and not bool(stopped[0])
