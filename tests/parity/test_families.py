"""Every family: speculative text in a mixed batch, on every layout, is the text of plain decoding alone.

The drafts are rigged to be right on two thirds of the positions, so that every number of accepted drafts
occurs, and recurrent state has to be right after each.
"""

import functools
from pathlib import Path

import numpy as np
import pytest

from mtp_jax.loading import resolve_model
from tests.parity.engines import NEAR_TIE
from tests.parity.rig import Job, greedy, make_engine, rigged_drafts, rigged_rounds, run_jobs, tokens_of
from tests.parity.tap import tapped

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
NAMES += ("qwen4_exp",)
LENGTHS = (1, 3, 16, 17, 40)  # of prompts: below, at and past a chunk of 16
MOST_TOKENS = 18
# stages, tensor, data
LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 2))
IN_CI = (("glm_moe_dsa", 2, 1, 1), ("qwen3_5_moe", 2, 2, 1), ("deepseek_v3", 1, 2, 1), ("qwen4_exp", 2, 1, 1))
CASES = [
    pytest.param(name, *layout, marks=() if (name, *layout) in IN_CI else pytest.mark.slow)
    for layout in LAYOUTS
    for name in NAMES
    if (name, *layout) != ("deepseek_v32", 4, 1, 1)  # it has three layers
]


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(3)
    return tuple(tuple(rng.integers(3, 250, length).tolist()) for length in LENGTHS)


@functools.cache
def reference(name: str) -> tuple[tuple[int, ...], ...]:
    """Plain decoding alone at Z = 1; no two best logits are near enough to be swapped by another order."""
    with tapped() as tap:
        engine = make_engine(resolve_model(GOLDEN / f"tiny_{name}"), num_speculative_tokens=0, max_num_seqs=1)
    texts = []
    for index, prompt in enumerate(prompts()):
        texts.append(tuple(tokens_of(run_jobs(engine, {"alone": Job(prompt, greedy(MOST_TOKENS))})["alone"])))
        for step in range(MOST_TOKENS):
            second, first = np.sort(tap.rows[index + 1, len(prompt) - 1 + step].logits[0])[-2:]
            assert first - second > NEAR_TIE
    return tuple(texts)


@pytest.mark.parametrize(("name", "stages", "tensor", "data"), CASES)
def test_speculative_is_plain(name: str, stages: int, tensor: int, data: int) -> None:
    check_layout(name, stages=stages, tensor=tensor, data=data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "tensor", "data"),
    [
        ("deepseek_v3", 2, 1, 2),
        ("deepseek_v3", 1, 2, 2),
        ("glm4_moe", 2, 2, 2),
        ("qwen3_5_moe", 2, 1, 2),
        ("glm4_moe", 1, 1, 4),
    ],
)
def test_replicas_that_share_experts(name: str, stages: int, tensor: int, data: int) -> None:
    """Their tokens meet at every layer; a replica without requests works for the other one's."""
    check_layout(name, stages=stages, tensor=tensor, data=data, experts_over="data-tensor")


def check_layout(name: str, **layout: int | str) -> None:
    texts = reference(name)
    sequences = [prompt + text for prompt, text in zip(prompts(), texts, strict=True)]
    with rigged_drafts(sequences):
        source = resolve_model(GOLDEN / f"tiny_{name}")
        engine = make_engine(source, num_speculative_tokens=3, max_num_seqs=4, **layout)
    jobs = {
        str(index): Job(prompt, greedy(MOST_TOKENS - index, 3 - index % 2), arrives=2 * index, seed=index)
        for index, prompt in enumerate(prompts())
    }
    # One whose slot is free again before it has ended, and is taken by another.
    jobs["aborted"] = Job(prompts()[3], greedy(MOST_TOKENS), aborts=5, seed=3)
    outputs = run_jobs(engine, jobs)
    for name, job in jobs.items():
        tokens, wanted = tokens_of(outputs[name]), list(texts[job.seed][: job.params.max_tokens])
        assert tokens == wanted[: len(tokens)] if job.aborts else tokens == wanted, f"request {name}"
        if job.aborts is None:
            check_rounds(job, outputs[name][-1].speculation.num_accepted_tokens)


def check_rounds(job: Job, accepted: int) -> None:
    """Drafts were accepted exactly where the rigged ones are right."""
    total = len(job.prompt) + (job.params.max_tokens or 0)
    rounds = rigged_rounds(len(job.prompt), total, job.params.num_speculative_tokens or 0)
    assert accepted == sum(right for _, right in rounds) > 0
