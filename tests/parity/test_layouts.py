"""The same tokens on every layout, greedy and sampled, whether heads divide or not."""

import dataclasses
import functools

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.request import SamplingParams
from tests.parity.rig import TINY, Job, RandomSource, greedy, make_engine, run_jobs, tokens_of

# 4 query and 2 KV heads, 97 ids; and 9 and 3 heads, as the default model has, which no even number divides.
MODELS = {"even": TINY, "odd": dataclasses.replace(TINY, num_attention_heads=9, num_key_value_heads=3)}
# stages, tensor, data; more of replicas is in test_replicas.py
LAYOUTS = ((1, 2, 1), (2, 2, 1), (1, 4, 1), (4, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 2))
IN_CI = (("even", 2, 2, 1), ("odd", 1, 2, 1))
LENGTHS = (1, 4, 16, 21)
MOST_TOKENS = 12
CASES = [
    pytest.param(model, *layout, marks=() if (model, *layout) in IN_CI else pytest.mark.slow)
    for model in MODELS
    for layout in LAYOUTS
]


def engine_of(model: str, stages: int, tensor: int, data: int) -> Engine:
    sizes = {"num_speculative_tokens": 3, "max_num_seqs": 8}
    return make_engine(RandomSource(MODELS[model]), stages=stages, tensor=tensor, data=data, **sizes)


def jobs() -> dict[str, Job]:
    """Greedy, seeded, and cut to the likeliest tokens; of unlike lengths and numbers of drafts."""
    rng, made = np.random.default_rng(5), {}
    for index, length in enumerate(LENGTHS):
        prompt = tuple(rng.integers(0, TINY.vocab_size, length).tolist())
        made[f"greedy {length}"] = Job(prompt, greedy(MOST_TOKENS, index), arrives=index)
        some = {"max_tokens": MOST_TOKENS, "ignore_eos": True, "num_speculative_tokens": 3 - index}
        for name, cut in (("sampled", {}), ("cut", {"top_k": 9, "top_p": 0.9})):
            params = SamplingParams(temperature=0.8, **some, **cut)
            made[f"{name} {length}"] = Job(prompt, params, arrives=2 * index, seed=index + 1)
    return made


@functools.cache
def expected(model: str) -> dict[str, list[int]]:
    outputs = run_jobs(engine_of(model, 1, 1, 1), jobs())
    return {name: tokens_of(told) for name, told in outputs.items()}


@pytest.mark.parametrize(("model", "stages", "tensor", "data"), CASES)
def test_the_same_tokens(model: str, stages: int, tensor: int, data: int) -> None:
    outputs = run_jobs(engine_of(model, stages, tensor, data), jobs())
    assert {name: tokens_of(told) for name, told in outputs.items()} == expected(model)
