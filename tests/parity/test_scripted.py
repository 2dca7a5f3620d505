"""Every behaviour of a request is that of plain decoding, wherever in a run of several tokens it falls.

The model is scripted (`scripted_model`), so the wanted text is worked out in plain Python: no engine is
trusted to say what is right. Requests differ in their number of drafts, up to the engine's K.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from mtp_jax.engine.buckets import Report, Sampling
from mtp_jax.engine.engine import Engine
from mtp_jax.request import RequestOutput, SamplingParams
from tests.parity.rig import Job, make_engine, renew, run_jobs, tokens_of
from tests.parity.scripted_model import (
    EOS,
    HEADS,
    PIECES,
    VOCAB,
    ScriptedSource,
    bad_word_ids,
    chain,
    do_everything,
    greedy_text,
    scripted_engine,
    shaped,
    table,
)
from tests.parity.test_sampling import pooled_p_value

K = 3
SLOW = pytest.mark.slow
# The matrix: stages, the engine's K, head. CI has each value of each; K = 0 and 1 are also requests' own.
CASES = [(1, 0, "good"), (1, 3, "good"), (1, 3, "bad"), (1, 3, "alternate"), (2, 3, "alternate")]
SLOW_CASES = [c for c in itertools.product((1, 2), (0, 1, 3), HEADS) if c not in CASES]
MATRIX = pytest.mark.parametrize(
    ("stages", "k", "head"), [*CASES, *(pytest.param(*case, marks=SLOW) for case in SLOW_CASES)]
)
LOGPROB_ERROR = 2e-4  # fp32 products of 71 terms with logits up to 5, against float64


@functools.cache
def compiled(stages: int, k: int) -> Engine:
    return scripted_engine(stages, k)


def engine_of(stages: int, k: int, head: str, **host: int | bool) -> Engine:
    """A fresh engine with this head."""
    return do_everything(renew(compiled(stages, k), ScriptedSource(head) if k else None, **host))


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12} | values))


def text_of(outputs: Iterable[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def with_drafts(jobs: Mapping[str, Job], k: int) -> dict[str, Job]:
    """Each request once with the server's K, and once with its own, K - 1, K - 2, ... in turn."""
    made = {}
    for index, (name, job) in enumerate(jobs.items()):
        made[name] = job
        if k:
            own = dataclasses.replace(job.params, num_speculative_tokens=index % k)
            made[f"{name}, K = {index % k}"] = dataclasses.replace(job, params=own)
    return made


def check_greedy(engine: Engine, jobs: Mapping[str, Job]) -> dict[str, list[RequestOutput]]:
    """Runs jobs together; every text, id, finish and log-probability must be the expected one."""
    outputs = run_jobs(engine, jobs)
    for name, job in jobs.items():
        wanted, got = greedy_text(job.prompt, job.params), outputs[name]
        assert tuple(tokens_of(got)) == wanted.token_ids, name
        assert text_of(got) == wanted.text, name
        assert got[-1].finish_reason == wanted.finish_reason, name
        assert got[-1].stop_reason == wanted.stop_reason, name
        assert all(output.finish_reason is None for output in got[:-1]), name
        check_logprobs(job, got, wanted.token_ids)
    return outputs


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def check_logprobs(job: Job, got: list[RequestOutput], tokens: tuple[int, ...]) -> None:
    """The model's own distribution, whatever the request does to it; one entry a token."""
    entries = [entry for output in got for entry in output.logprobs]
    wanted = job.params.logprobs
    if wanted is None:
        assert not entries
        return
    assert [entry.token_id for entry in entries] == list(tokens)
    for output in got:
        assert len(output.logprobs) == len(output.token_ids)
    text = [*job.prompt, *tokens]
    for index, entry in enumerate(entries):
        check_entry(entry, log_softmax(table()[text[len(job.prompt) - 1 + index]]), wanted)


def check_entry(entry, expected: np.ndarray, count: int) -> None:
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=LOGPROB_ERROR)
    best = np.argsort(-expected, kind="stable")[:count]
    assert [other.token_id for other in entry.top] == best.tolist()
    assert entry.data == PIECES[entry.token_id] and all(o.data == PIECES[o.token_id] for o in entry.top)
    assert [other.logprob for other in entry.top] == pytest.approx(expected[best].tolist(), abs=LOGPROB_ERROR)


def jobs_of(cases: Mapping[str, tuple[tuple[int, ...], SamplingParams]], k: int) -> dict[str, Job]:
    """They arrive one a step, so that rounds and prompts of different requests meet."""
    jobs = with_drafts({name: Job(prompt, p) for name, (prompt, p) in cases.items()}, k)
    return {name: dataclasses.replace(job, arrives=i // 3) for i, (name, job) in enumerate(jobs.items())}


# Ends


@MATRIX
def test_ends(stages: int, k: int, head: str) -> None:
    """max_tokens 1 to 8, end-of-sequence and stop tokens at every place of a run, and the context's edge."""
    end, count = chain("end"), chain("count")
    cases = {}
    for length in range(1, 9):
        cases[f"max_tokens {length}"] = (count[2:4], params(max_tokens=length, logprobs=2))
    for offset in range(len(end) - 1):
        cases[f"eos after {len(end) - 1 - offset}"] = (end[: offset + 1], params(logprobs=0))
        cases[f"ignored eos {offset}"] = (end[offset : offset + 1], params(ignore_eos=True))
    for offset in range(8):
        stop = (count[3 + offset], count[20])
        cases[f"stop token {offset}"] = (count[:3], params(stop_token_ids=stop, logprobs=1))
        cases[f"kept stop token {offset}"] = (
            count[:3],
            params(stop_token_ids=stop, include_stop_str_in_output=True),
        )
    for room in range(1, 9):
        prompt = tuple(np.resize(count, 64 - room))
        cases[f"context edge {room}"] = (prompt, params(max_tokens=None))
    jobs = jobs_of({name: (tuple(map(int, p)), q) for name, (p, q) in cases.items()}, k)
    check_greedy(engine_of(stages, k, head), jobs)


@MATRIX
def test_stop_strings_and_characters(stages: int, k: int, head: str) -> None:
    """Stop strings and characters that begin and end at every place of a run, and false starts."""
    stops, characters = chain("stops"), chain("bytes")
    cases = {}
    for offset in range(len(stops)):
        for index, stop in enumerate((("STOP",), ("OPS",), ("abaST", "ba"), ("PST", "yO"), ("OP-S",))):
            keep = bool((offset + index) % 2)
            asked = params(stop=stop, include_stop_str_in_output=keep, logprobs=0 if index == 0 else None)
            cases[f"{stop} from {offset}"] = ((stops[offset],), asked)
    for offset in range(len(characters)):
        cases[f"characters from {offset}"] = ((characters[offset],), params(max_tokens=9 + offset % 4))
        cases[f"euro from {offset}"] = (
            (characters[offset],),
            params(max_tokens=9, stop=("\u20ac", "\U0001f600")),
        )
        cases[f"replaced from {offset}"] = ((characters[offset],), params(max_tokens=5, stop=("\ufffd",)))
    check_greedy(engine_of(stages, k, head), jobs_of(cases, k))


# Shaping


def shaping_cases() -> dict[str, tuple[tuple[int, ...], SamplingParams]]:
    loop, count, end = chain("loop"), chain("count"), chain("end")
    cases: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    for penalty in (-0.5, 0.7, 2.0):
        cases[f"presence {penalty}"] = ((loop[0],), params(presence_penalty=penalty, max_tokens=24))
        cases[f"frequency {penalty}"] = (
            (loop[1],),
            params(frequency_penalty=penalty, max_tokens=24, logprobs=3),
        )
    for penalty in (0.8, 1.5, 3.0):
        prompt = (*count[4:9], loop[2])
        cases[f"repetition {penalty}"] = (
            prompt,
            params(repetition_penalty=penalty, max_tokens=24, logprobs=20),
        )
    mixed = params(presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1, max_tokens=24)
    cases["all penalties"] = (tuple(loop), mixed)
    cases["bias"] = ((loop[0],), params(logit_bias={loop[2]: 5, loop[1]: -100, EOS: -100}, max_tokens=9))
    cases["forced"] = ((loop[0],), params(logit_bias={7: 100}, max_tokens=9, logprobs=1))
    allowed = (loop[0], loop[2], count[5], count[9])
    cases["allowed"] = ((loop[0],), params(allowed_token_ids=allowed, max_tokens=9))
    cases["allowed, bias"] = (
        (loop[0],),
        params(allowed_token_ids=allowed, logit_bias={loop[1]: 100}, max_tokens=9),
    )
    cases["banned"] = (
        (loop[0],),
        params(banned_token_ids=(loop[1], EOS), logit_bias={loop[1]: 100}, max_tokens=9, logprobs=2),
    )
    cases["allowed, banned"] = (
        (loop[0],),
        params(allowed_token_ids=allowed, banned_token_ids=(loop[0], 3), max_tokens=9),
    )
    cases["bad words"] = ((count[0],), params(bad_words=("four five", "six"), max_tokens=16))
    cases["bad first words"] = ((count[2],), params(bad_words=("five six seven",), max_tokens=16))
    for least in range(7):
        cases[f"min_tokens {least}"] = (tuple(end[:3]), params(min_tokens=least, logprobs=0))
        stop = {"stop_token_ids": (count[4],), "stop": ("seven",)}
        cases[f"min_tokens {least}, stops"] = ((count[1],), params(min_tokens=least, **stop))
    cases["plain neighbour"] = ((count[0],), params(max_tokens=20))
    return cases


@MATRIX
def test_shaping(stages: int, k: int, head: str) -> None:
    """Penalties, bias, masks, bad words and min_tokens: against arithmetic in float64, row by row."""
    cases = shaping_cases()
    for prompt, asked in cases.values():  # with such gaps float32 cannot choose otherwise
        assert least_gap(prompt, asked) > 1e-3
    check_greedy(engine_of(stages, k, head), jobs_of(cases, k))


def least_gap(prompt: tuple[int, ...], asked: SamplingParams) -> float:
    text, gaps, words = list(prompt), [], bad_word_ids(asked)
    for token in greedy_text(prompt, asked).token_ids:
        best = np.sort(shaped(text, len(prompt), asked, words))[-2:]
        gaps.append(best[1] - best[0])
        text.append(token)
    return min(gaps)


def test_the_cases_tell_something() -> None:
    """Every parameter changes the text that the script has."""
    for name, (prompt, asked) in shaping_cases().items():
        plain = params(max_tokens=asked.max_tokens, stop=asked.stop, stop_token_ids=asked.stop_token_ids)
        changes = greedy_text(prompt, asked) != greedy_text(prompt, plain)
        neutral = name in ("plain neighbour", "presence -0.5", "frequency -0.5", "repetition 0.8")
        assert changes or neutral or name.startswith("min_tokens"), name


@pytest.mark.parametrize("head", ["alternate"])
def test_preemption_keeps_counts(head: str) -> None:
    """A request that gives its pages back and is computed again goes on counting where it was."""
    engine = engine_of(1, K, head, num_pages=24)
    cases = {str(i): case for i, case in enumerate(shaping_cases().values()) if case[1].max_tokens == 24}
    jobs = {name: Job(prompt, asked) for name, (prompt, asked) in cases.items()}
    check_greedy(engine, jobs)
    assert engine.stats().num_preemptions > 0


# Prompts


@MATRIX
def test_prompt_logprobs(stages: int, k: int, head: str) -> None:
    """Over several chunks, beside others, and with the prefix cache full of the same prompt."""
    prompt = tuple(int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 45))
    engine = engine_of(stages, k, head)
    asked = params(prompt_logprobs=4, logprobs=0, max_tokens=3)
    jobs = {"first": Job(prompt, params(max_tokens=3))}
    jobs |= {
        str(size): Job(prompt[:size], asked, arrives=4 + size // 9) for size in (1, 2, 15, 16, 17, 33, 45)
    }
    outputs = check_greedy(engine, jobs)
    for name, job in jobs.items():
        entries = outputs[name][0].prompt_logprobs
        if name == "first":
            assert not entries
            continue
        assert [entry.token_id for entry in entries] == list(job.prompt[1:])
        for before, entry in zip(job.prompt, entries, strict=False):
            check_entry(entry, log_softmax(table()[before]), 4)
        assert not any(output.prompt_logprobs for output in outputs[name][1:])


# Sampling


def sampling_cases() -> dict[str, SamplingParams]:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    return {
        "min_p": params(temperature=1.5, min_p=0.3, max_tokens=20),
        "min_p, top_k": params(temperature=2.0, min_p=0.2, top_k=5, max_tokens=20),
        "penalties": params(temperature=0.7, max_tokens=20, **penalties),
        "penalties, top_p": params(temperature=1.0, top_p=0.8, max_tokens=20, **penalties),
        "bias": params(temperature=1.0, logit_bias={3: 2.5, 4: -3}, min_tokens=8, max_tokens=20),
        "bad words": params(temperature=0.5, bad_words=("two three", "four"), max_tokens=20),
    }


def target(text: list[int], num_prompt: int, asked: SamplingParams, words: list[list[int]]) -> np.ndarray:
    """The distribution of the next token: shaped, temperature, min-p, top-k, top-p."""
    logits = shaped(text, num_prompt, asked, words) / (asked.temperature or 1)
    if asked.temperature == 0:
        p = np.exp(logits - logits.max())
        return p / p.sum()
    p = np.exp(logits - logits.max())
    p[p < asked.min_p * p.max()] = 0
    if asked.top_k:
        p[np.argsort(-p)[asked.top_k :]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    over = np.cumsum(p[order]) - p[order] >= asked.top_p
    p[order[over]] = 0
    return p / p.sum()


@functools.cache
def sampled(stages: int, k: int, head: str) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """Tokens, text and finish of many seeded requests of each case."""
    jobs = {}
    for index in range(96):
        for name, asked in sampling_cases().items():
            asked = dataclasses.replace(asked, logprobs=1 if index % 4 == 0 else None)
            jobs[f"{name} {index}"] = Job((index % VOCAB,), asked, seed=index)
    outputs = run_jobs(engine_of(stages, k, head), jobs)
    return {name: (tuple(tokens_of(o)), text_of(o), str(o[-1].finish_reason)) for name, o in outputs.items()}


def test_sampled_distributions() -> None:
    """Every token of every case, pooled by case, against the exact distribution (chi-square)."""
    found = sampled(1, K, "alternate")
    values = {}
    for case, asked in sampling_cases().items():
        draws, words = [], bad_word_ids(asked)
        for index in range(96):
            text = [index % VOCAB]
            for token in found[f"{case} {index}"][0]:
                draws.append((token, target(text, 1, asked, words)))
                text.append(token)
        values[case], count = pooled_p_value(draws)
        assert count > 500
    print({case: f"{p:.3f}" for case, p in values.items()})
    assert min(values.values()) > 1e-3, values


@pytest.mark.parametrize(
    ("stages", "k", "head"),
    [(1, 3, "alternate"), (2, 3, "alternate"), *(pytest.param(*case, marks=SLOW) for case in SLOW_CASES)],
)
def test_a_seed_gives_the_plain_text(stages: int, k: int, head: str) -> None:
    """Shaped and sampled text is that of plain decoding under the same seed, token for token."""
    assert sampled(stages, k, head) == sampled(1, 0, "good")


# Kinds of steps


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=SLOW)])
def test_processed_logprobs(stages: int) -> None:
    """Of what was sampled from: after bias, penalties, temperature and every cut."""
    engine = scripted_engine(stages, K, logprobs_mode="processed")
    engine = do_everything(renew(engine, ScriptedSource("alternate")))
    jobs = {}
    for index, asked in enumerate(
        (*sampling_cases().values(), shaping_cases()["all penalties"][1], params())
    ):
        jobs[str(index)] = Job((index,), dataclasses.replace(asked, logprobs=5), seed=index)
    outputs = run_jobs(engine, jobs)
    for name, job in jobs.items():
        text = list(job.prompt)
        for entry in (entry for output in outputs[name] for entry in output.logprobs):
            p = target(text, 1, job.params, bad_word_ids(job.params))
            best = [token for token in np.argsort(-p, kind="stable")[:5] if p[token] > 0]
            assert entry.logprob == pytest.approx(np.log(p[entry.token_id]), abs=LOGPROB_ERROR)
            assert [other.token_id for other in entry.top] == best
            assert [o.logprob for o in entry.top] == pytest.approx(
                np.log(p[best]).tolist(), abs=LOGPROB_ERROR
            )
            text.append(entry.token_id)
        assert text[1:] == tokens_of(outputs[name])


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_kinds_that_the_engine_chooses(static: bool) -> None:
    """Each request on the steps that its kind alone asks for, and together with the others."""
    engine = make_engine(ScriptedSource(), max_model_len=64, num_speculative_tokens=K, static_sampling=static)
    loop = chain("loop")
    kinds = {
        "plain": params(),
        "logprobs": params(logprobs=2),
        "shaped": params(presence_penalty=0.7),
        "both": params(presence_penalty=0.7, logprobs=2),
    }
    jobs = {name: Job((loop[0],), asked) for name, asked in kinds.items()}
    for name, job in jobs.items():
        check_greedy(renew(engine, ScriptedSource("alternate")), {name: job})
    prompts = Job((*loop, *loop), params(prompt_logprobs=1, logprobs=1))
    check_greedy(renew(engine, ScriptedSource("alternate")), {"prompts": prompts})
    check_greedy(renew(engine, ScriptedSource("alternate")), jobs | {"prompts": prompts})
    compiled_kinds = {(b.sampling, b.report) for b in engine.executables.compile_seconds}
    lowest = Sampling.GREEDY if static else Sampling.ANY
    assert {(lowest, Report.NOTHING), (lowest, Report.TOKENS), (lowest, Report.PROMPTS)} <= compiled_kinds
    assert {(Sampling.SHAPED, Report.NOTHING), (Sampling.SHAPED, Report.TOKENS)} <= compiled_kinds
