"""Speculative sampling draws from the target's distribution, and a seed fixes the text."""

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np
import pytest

import mtp_jax.engine.head
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.verify import accept_probabilistic
from mtp_jax.request import SamplingParams
from tests.parity.engines import shared_engine
from tests.parity.rig import TINY, Job, RandomSource, make_engine, renew, run_jobs, tokens_of
from tests.parity.tap import Row, Tap, tapped

SMALL = dataclasses.replace(TINY, vocab_size=5, num_hidden_layers=2)
LEAST_P = 1e-3
SETTINGS = {
    "plain": SamplingParams(temperature=1.0, max_tokens=48),
    "top_k": SamplingParams(temperature=0.8, top_k=3, max_tokens=48),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8, max_tokens=48),
    "both": SamplingParams(temperature=1.0, top_k=4, top_p=0.9, max_tokens=48),
}
KINDS = ("greedy", "probabilistic")
PROMPT = (3, 1, 4, 1, 2)
REQUESTS = 400
LEAST_DRAWS = 60


def chi_square_tail(x: float, df: int) -> float:
    """P(X >= x) of a chi-square variable: the regularised upper incomplete gamma function Q(df / 2, x / 2).

    By Q(a + 1, z) = Q(a, z) + z^a e^-z / Gamma(a + 1) from Q(1/2, z) = erfc(sqrt z) or Q(1, z) = e^-z.
    """
    z = x / 2
    a, q = (0.5, math.erfc(math.sqrt(z))) if df % 2 else (1.0, math.exp(-z))
    while a < df / 2 - 0.25:
        q += math.exp(a * math.log(z) - z - math.lgamma(a + 1)) if z > 0 else 0.0
        a += 1
    return q


@pytest.mark.parametrize(("x", "df"), [(3.841, 1), (5.991, 2), (18.307, 10), (19.675, 11), (124.342, 100)])
def test_chi_square_tail(x: float, df: int) -> None:
    """The 5 % points of the usual tables."""
    assert chi_square_tail(x, df) == pytest.approx(0.05, abs=2e-4)


def target_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What a token should be drawn from: temperature, then top-k, then top-p, in float64."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = list(order[: params.top_k] if params.top_k else order)
    if params.top_p < 1:
        mass, total, nucleus = 0.0, p[kept].sum(), []
        for token in kept:
            nucleus.append(token)
            mass += p[token] / total
            if mass >= params.top_p:
                break
        kept = nucleus
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()


def pooled_p_value(draws: Iterable[tuple[int, np.ndarray]]) -> tuple[float, int]:
    """Chi-square test of tokens that were drawn from a known distribution each. Returns (p, draws).

    The deviations onehot - p sum up to a martingale, so their sum D over its covariance C, D^T C^+ D, is
    chi-square with rank(C) degrees of freedom; for equal distributions this is Pearson's statistic.
    """
    deviation, covariance, count = 0.0, 0.0, 0
    for token, p in draws:
        assert p[token] > 0, "a token that top-k or top-p leave out"
        deviation = deviation + np.eye(len(p))[token] - p
        covariance = covariance + np.diag(p) - np.outer(p, p)
        count += 1
    assert count >= LEAST_DRAWS, f"{count} draws say little"
    statistic = deviation @ np.linalg.pinv(covariance, rcond=1e-9) @ deviation
    return chi_square_tail(float(statistic), int(np.linalg.matrix_rank(covariance, tol=1e-6))), count


@dataclasses.dataclass(frozen=True)
class Seen:
    """One row and what its request asked for."""

    row: Row
    params: SamplingParams
    after_rejection: bool  # the round before it had rejected a draft

    @property
    def offered(self) -> int:
        return int((self.row.drafts >= 0).sum())

    @property
    def rejected(self) -> bool:
        return self.row.accepted < self.offered

    def draw(self, column: int) -> tuple[int, np.ndarray]:
        return int(self.row.tokens[column]), target_distribution(self.row.logits[column], self.params)

    def replacement(self, probabilistic: bool) -> tuple[int, np.ndarray]:
        """The token in place of the first rejected draft, and its distribution given that draft."""
        column = self.row.accepted
        token, p = self.draw(column)
        if probabilistic:
            q = np.exp(self.row.draft_logits[column].astype(np.float64))
            rest = np.maximum(p - q / q.sum(), 0)
        else:
            rest = np.where(np.arange(len(p)) == self.row.drafts[column], 0, p)
        return token, rest / rest.sum()


def collect(engine: Engine, tap: Tap, names: Iterable[str]) -> dict[str, list[Seen]]:
    """Serves many requests under each setting, and sorts the verified rows by it."""
    tap.clear()
    names = tuple(names)
    jobs = {str(i): Job(PROMPT, SETTINGS[names[i % len(names)]], seed=1000 + i) for i in range(REQUESTS)}
    outputs = run_jobs(engine, jobs)
    rows = tap.rows
    seen: dict[str, list[Seen]] = {name: [] for name in names}
    for index in range(REQUESTS):
        name, tokens = names[index % len(names)], tokens_of(outputs[str(index)])
        start, known, rejected = len(PROMPT) - 1, 0, False
        while known < len(tokens):
            row = rows[index + 1, start]
            emitted = row.tokens[: row.accepted + 1].tolist()
            assert tokens[known : known + len(emitted)] == emitted[: len(tokens) - known]
            here = Seen(row, SETTINGS[name], rejected)
            seen[name].append(here)
            rejected = here.rejected
            start, known = start + len(emitted), known + len(emitted)
    return seen


def p_values(rows: list[Seen], probabilistic: bool) -> dict[str, tuple[float, int]]:
    """(p, draws) of every kind of token that a round can emit."""
    reached = {
        "all": [seen.draw(c) for seen in rows for c in range(seen.row.accepted + 1)],
        "first of a round": [seen.draw(0) for seen in rows],
        "after an accepted draft": [seen.draw(1) for seen in rows if seen.row.accepted >= 1],
        "after a rejection": [seen.draw(0) for seen in rows if seen.after_rejection],
        "bonus": [seen.draw(3) for seen in rows if seen.row.accepted == 3],
        "replacement": [seen.replacement(probabilistic) for seen in rows if seen.rejected],
    }
    return {kind: pooled_p_value(draws) for kind, draws in reached.items()}


@functools.cache
def tapped_engine(kind: str) -> tuple[Engine, Tap]:
    with tapped() as tap:
        sizes = {"num_speculative_tokens": 3, "max_num_seqs": 40, "num_pages": 1000, "max_model_len": 64}
        return make_engine(RandomSource(SMALL, head_scale=0.5), draft_sampling=kind, **sizes), tap


@pytest.mark.parametrize("kind", KINDS)
def test_distribution(kind: str) -> None:
    """Every kind of token that a round can emit, under every setting, against float64 arithmetic."""
    engine, tap = tapped_engine(kind)
    by_setting = collect(renew(engine), tap, SETTINGS)
    found = p_values([row for rows in by_setting.values() for row in rows], kind == "probabilistic")
    for name, rows in by_setting.items():
        found[name] = pooled_p_value([seen.draw(c) for seen in rows for c in range(seen.row.accepted + 1)])
    print(kind, {what: f"p {p:.3f} of {count}" for what, (p, count) in found.items()})
    assert min(p for p, _ in found.values()) > LEAST_P, found


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing rejected drafts from p instead of max(p - q, 0) is the classic mistake."""

    def from_target(target, draft_logits, drafts, rows):
        tokens, accepted = accept_probabilistic(target, draft_logits, drafts, rows)
        plain, _ = accept_probabilistic(target, draft_logits, drafts * 0 - 1, rows)
        column = np.arange(tokens.shape[1])
        return mtp_jax.engine.head.jnp.where(column < accepted[:, None], tokens, plain), accepted

    monkeypatch.setattr(mtp_jax.engine.head, "accept_probabilistic", from_target)
    with tapped() as tap:
        sizes = {"num_speculative_tokens": 3, "max_num_seqs": 40, "num_pages": 1000, "max_model_len": 64}
        source = RandomSource(SMALL, head_scale=0.5)
        engine = make_engine(source, draft_sampling="probabilistic", **sizes)
    rows = collect(engine, tap, ["plain"])["plain"]
    p, count = pooled_p_value([seen.draw(0) for seen in rows])
    print(f"wrong rule: p {p:.1e} of {count}")
    assert p < 1e-6


# Seeds


def seeded_jobs() -> dict[str, Job]:
    jobs = {}
    rng = np.random.default_rng(2)
    for index in range(9):
        kind = list(SETTINGS.values())[index % 4]
        params = dataclasses.replace(kind, max_tokens=20, ignore_eos=True)
        prompt = tuple(rng.integers(0, TINY.vocab_size, 3 + 5 * index).tolist())
        jobs[str(index)] = Job(prompt, params, arrives=index // 2, seed=(index << 40) - 77 * index - 5)
    return jobs


def texts(engine: Engine, jobs: dict[str, Job]) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run_jobs(renew(engine), jobs).items()}


@functools.cache
def alone(kind: str) -> dict[str, list[int]]:
    engine = shared_engine(1, 3, kind=kind)
    result = {}
    for name, job in seeded_jobs().items():
        result |= texts(engine, {name: dataclasses.replace(job, arrives=0)})
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_seed_fixes_the_text(stages: int, kind: str) -> None:
    assert texts(shared_engine(stages, 3, kind=kind), seeded_jobs()) == alone(kind)


def test_one_hot_drafts_change_no_text() -> None:
    """Speculation with greedy drafts gives the very text of plain sampling."""
    assert texts(shared_engine(1, 0), seeded_jobs()) == alone("greedy")


def test_seeds_differ() -> None:
    """Also in the upper half of the 64 bits."""
    jobs = {str(seed): Job(PROMPT, SETTINGS["plain"], seed=seed) for seed in (0, 1, 1 << 32, -1)}
    found = texts(shared_engine(1, 0), jobs)
    assert len({tuple(tokens) for tokens in found.values()}) == 4
