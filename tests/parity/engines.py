"""Engines that several test modules share, each compiled once a test run. Run `renew` of one, not itself."""

import functools

import numpy as np

from mtp_jax.engine.engine import Engine
from tests.parity.rig import TINY, Job, RandomSource, greedy, make_engine, rigged_drafts, run_jobs, tokens_of
from tests.parity.tap import Tap, tapped

NEAR_TIE = 1e-4  # two best logits this close may swap in another summation order
MOST_TOKENS = 24
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 23, 33, 48, 66)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Unlike lengths; every second one begins like the longest, for whole pages."""
    rng = np.random.default_rng(11)
    longest = rng.integers(0, TINY.vocab_size, PROMPT_LENGTHS[-1])
    drawn = []
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = rng.integers(0, TINY.vocab_size, length)
        if index % 2:
            shared = min(length - 1, 4 * index)
            prompt[:shared] = longest[:shared]
        drawn.append(tuple(prompt.tolist()))
    return tuple(drawn)


@functools.cache
def plain_engine() -> tuple[Engine, Tap]:
    """K = 0 at Z = 1, its logits tapped."""
    with tapped() as tap:
        return make_engine(RandomSource(TINY), num_speculative_tokens=0, enable_prefix_caching=False), tap


@functools.cache
def reference() -> tuple[tuple[tuple[int, ...], ...], int]:
    """Plain decoding alone at Z = 1: continuations of `prompts`, and the number of near-ties in them."""
    engine, tap = plain_engine()
    texts, ties = [], 0
    for index, prompt in enumerate(prompts()):
        outputs = run_jobs(engine, {"alone": Job(prompt, greedy(MOST_TOKENS))})
        texts.append(tuple(tokens_of(outputs["alone"])))
        for step, token in enumerate(texts[-1]):
            row = tap.rows[index + 1, len(prompt) - 1 + step].logits[0]
            best = np.sort(row)[-2:]
            assert row[token] == best[1]
            ties += bool(best[1] - best[0] < NEAR_TIE)
    return tuple(texts), ties


@functools.cache
def shared_engine(
    stages: int,
    k: int,
    chunk: int = 16,
    kind: str = "greedy",
    rounds: int = 1,
    tensor: int = 1,
    data: int = 1,
) -> Engine:
    """With K > 0 and greedy drafts, requests of seeds 0, 1, ... get rigged drafts for `prompts`."""
    if (stages, k, chunk, rounds, tensor, data) == (1, 0, 16, 1, 1, 1):
        return plain_engine()[0]
    values = {"stages": stages, "num_speculative_tokens": k, "prefill_chunk": chunk, "draft_sampling": kind}
    values |= {"max_rounds": rounds, "tensor": tensor, "data": data}
    if k == 0 or kind != "greedy":
        return make_engine(RandomSource(TINY), **values)
    sequences = [prompt + text for prompt, text in zip(prompts(), reference()[0], strict=True)]
    with rigged_drafts(sequences):
        return make_engine(RandomSource(TINY), **values)
