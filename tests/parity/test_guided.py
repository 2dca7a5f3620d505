"""Grammars under speculation: the text is that of plain decoding with a mask for every token.

The model is scripted, so that the wanted text is worked out in plain Python, one token and one mask at a
time (`tests/text/test_grammar.py` says that masks are right). The grammars are of finite languages: what
comes out is looked up in them.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mtp_jax.engine import guided
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import InvalidRequestError
from mtp_jax.request import EngineRequest, FinishReason, GrammarSpec, RequestOutput, SamplingParams
from mtp_jax.text.grammar import GrammarCompiler, Matcher, choice
from tests.parity.rig import Job, run_jobs, tokens_of
from tests.parity.scripted_model import (
    EOS,
    HEADS,
    PIECES,
    VOCAB,
    ScriptedTokenizer,
    bad_word_ids,
    chain,
    shaped,
)
from tests.parity.test_scripted import engine_of

SLOW = pytest.mark.slow
CASES = [(1, 3, "good"), (1, 3, "bad"), (1, 3, "alternate"), (2, 3, "alternate"), (1, 0, "good")]
SLOW_CASES = [c for c in itertools.product((1, 2), (0, 1, 3), HEADS) if c not in CASES]
MATRIX = pytest.mark.parametrize(
    ("stages", "k", "head"), [*CASES, *(pytest.param(*case, marks=SLOW) for case in SLOW_CASES)]
)

Language = frozenset[bytes]
COUNT = [PIECES[token].decode() for token in chain("count")]


def of_texts(*texts: str) -> tuple[GrammarSpec, Language]:
    return choice(texts), frozenset(text.encode() for text in texts)


def repeated(words: Sequence[str], least: int, most: int) -> tuple[GrammarSpec, Language]:
    """Words in any order, `least` to `most` of them."""
    texts = ("".join(t) for n in range(least, most + 1) for t in itertools.product(words, repeat=n))
    pattern = f"({'|'.join(words)}){{{least},{most}}}"
    return GrammarSpec("regex", pattern), frozenset(text.encode() for text in texts)


GRAMMARS: dict[str, tuple[GrammarSpec, Language]] = {
    # The script goes on as it likes for six tokens, and then must leave its way.
    "long choice": of_texts("".join(COUNT[1:7]) + " red", "".join(COUNT[1:7]) + " blue", " nine"),
    "never the script": of_texts(" blue red", " green green green red", " nine one"),
    "words": repeated([" one", " two", " three"], 2, 5),
    "characters": of_texts("aé€", "aé€z", "zé😀a", "a."),
    "one token": of_texts("a"),
    "ebnf": (
        GrammarSpec("ebnf", 'start: " one" (" two" " three" | " six") tail?\ntail: " red" | " red green"'),
        frozenset(a + b for a in (b" one two three", b" one six") for b in (b"", b" red", b" red green")),
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "cut off": {"max_tokens": 3},
    "ignored eos": {"ignore_eos": True},  # which a grammar does not let anybody do
    "min_tokens": {"min_tokens": 4},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "nothing left": {"allowed_token_ids": (chain("loop")[0],)},  # nearly always: then the grammar alone holds
    "bad words": {"bad_words": ("two three",)},
    "stop token": {"stop_token_ids": (chain("count")[2],)},
    "stop string": {"stop": (" thr",)},
    "logprobs": {"logprobs": 3},
}


COMPILER = GrammarCompiler(ScriptedTokenizer(), VOCAB, [EOS])


def masked(text: list[int], num_prompt: int, params: SamplingParams, matcher: Matcher) -> np.ndarray:
    """Logits [V] of the next token, float64; -inf where it may not come."""
    own = dataclasses.replace(params, ignore_eos=False)
    may = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:VOCAB] > 0
    for logits in (shaped(text, num_prompt, own, bad_word_ids(params)), shaped(text, 0, SamplingParams())):
        held = np.where(may, logits, -np.inf)
        if held.max() > -np.inf:
            break
    return held


def greedy(prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], bool]:
    """Plain decoding; and whether it came to where no token can follow, as this vocabulary lacks letters."""
    assert params.structured_outputs is not None
    matcher = COMPILER.compile(params.structured_outputs).matcher()
    emitted: list[int] = []
    while len(emitted) < (params.max_tokens or 60):
        logits = masked([*prompt, *emitted], len(prompt), params, matcher)
        if matcher.failed:
            return emitted, True
        emitted.append(int(np.argmax(logits)))
        matcher.accept(emitted[-1:])
        data = b"".join(PIECES[token] for token in emitted)
        if emitted[-1] in (EOS, *params.stop_token_ids) or any(s.encode() in data for s in params.stop):
            break
    return emitted, False


def check_greedy(job: Job, outputs: Sequence[RequestOutput], name: str) -> None:
    tokens, is_lost = greedy(job.prompt, job.params)
    assert tokens_of(outputs) == tokens, name
    assert (outputs[-1].error is not None) == is_lost == (outputs[-1].finish_reason == FinishReason.ABORT), (
        name
    )


def jobs_of(k: int, **values: Any) -> dict[str, tuple[Job, Language]]:
    """Every grammar with everything else, from several prompts, each with a number of drafts of its own."""
    jobs = {}
    for index, (name, other) in enumerate(itertools.product(GRAMMARS, OTHERS)):
        spec, language = GRAMMARS[name]
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 20} | OTHERS[other] | values
        own = None if index % 3 == 0 else index % (k + 1)
        params = SamplingParams(structured_outputs=spec, num_speculative_tokens=own, **asked)
        prompt = chain("count")[: 1 + index % 3]
        job = Job(tuple(prompt), params, arrives=index // 2, seed=index)
        jobs[f"{name}, {other}"] = (job, language)
    return jobs


def data_of(outputs: Sequence[RequestOutput]) -> bytes:
    return b"".join(PIECES[token] for token in tokens_of(outputs) if token != EOS)


@MATRIX
def test_greedy_text(stages: int, k: int, head: str) -> None:
    """Beside requests that have no grammar, and that are as they would be alone."""
    engine, wanted = engine_of(stages, k, head), jobs_of(k)
    free = Job(tuple(chain("count")[:2]), SamplingParams(temperature=0, max_tokens=40))
    outputs = run_jobs(engine, {name: job for name, (job, _) in wanted.items()} | {"free": free})
    for name, (job, _) in wanted.items():
        check_greedy(job, outputs[name], name)
    assert tokens_of(outputs["free"]) == [*chain("count")[2:], *chain("count")][:40]


@pytest.mark.parametrize(
    ("stages", "k", "head"),
    [(1, 3, "alternate"), (2, 3, "alternate"), *(pytest.param(*case, marks=SLOW) for case in SLOW_CASES)],
)
def test_seeded_text(stages: int, k: int, head: str) -> None:
    """A seed gives the text that it gives without drafts and neighbours; it never leaves the language."""
    engine, wanted = engine_of(stages, k, head), jobs_of(k, temperature=1.3, top_k=40)
    outputs = run_jobs(engine, {name: job for name, (job, _) in wanted.items()})
    plain = run_jobs(engine_of(1, 0, "good"), {n: without_drafts(job) for n, (job, _) in wanted.items()})
    for name, (job, language) in wanted.items():
        assert tokens_of(outputs[name]) == tokens_of(plain[name]), name
        data = data_of(outputs[name])
        assert any(whole.startswith(data) for whole in language), name
        if (
            outputs[name][-1].finish_reason == FinishReason.STOP
            and not job.params.stop + job.params.stop_token_ids
        ):
            assert data in language, name


def without_drafts(job: Job) -> Job:
    return dataclasses.replace(job, params=dataclasses.replace(job.params, num_speculative_tokens=0))


def test_drafts_stand_where_the_grammar_agrees() -> None:
    """Speculation goes on under a grammar: a good head's drafts along the script are accepted."""
    spec, _ = GRAMMARS["long choice"]
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=spec)
    outputs = run_jobs(engine_of(1, 3, "good"), {"a": Job(tuple(chain("count")[:1]), params)})["a"]
    stats = outputs[-1].speculation
    assert stats is not None and stats.num_accepted_tokens >= 4
    assert data_of(outputs) in GRAMMARS["long choice"][1]


@pytest.mark.parametrize(("stages", "k"), [(1, 3), (2, 3)])
def test_preemption(stages: int, k: int) -> None:
    """Requests that give up their pages go on where they were."""
    spec, _ = GRAMMARS["words"]
    engine = engine_of(stages, k, "alternate", num_pages=16)
    free = SamplingParams(temperature=0, max_tokens=44)
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=spec, presence_penalty=0.1)
    jobs = {f"free {i}": Job(tuple(chain("count")[i : i + 4]), free) for i in range(2)}
    jobs |= {f"guided {i}": Job(tuple(chain("count")[: 3 + i]), params, arrives=2 + i) for i in range(5)}
    outputs = run_jobs(engine, jobs)
    assert engine.stats().num_preemptions > 0
    for name, job in jobs.items():
        if name.startswith("guided"):
            check_greedy(job, outputs[name], name)


def test_aborts_and_the_same_name_again() -> None:
    """At every moment; the name is free at once, and begins its grammar anew."""
    spec, _ = GRAMMARS["words"]
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=spec)
    prompt = tuple(chain("count")[:2])
    engine = engine_of(1, 3, "alternate")
    for moment in range(6):
        engine.add_request(EngineRequest("a", prompt, params))
        for _ in range(moment):
            engine.step()
        engine.abort("a")
        check_greedy(Job(prompt, params), finish(engine, EngineRequest("a", prompt, params)), str(moment))
    assert not engine._grammars._live


def finish(engine: Engine, request: EngineRequest) -> list[RequestOutput]:
    engine.add_request(request)
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return [output for output in outputs if output.request_id == request.request_id]


@pytest.mark.parametrize(
    "spec",
    [GrammarSpec("regex", "(a"), GrammarSpec("ebnf", "start: nobody"), GrammarSpec("json", '{"type": 3}')],
)
def test_a_grammar_that_is_none_is_refused(spec: GrammarSpec) -> None:
    engine = engine_of(1, 3, "good")
    params = SamplingParams(structured_outputs=spec)
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        engine.add_request(EngineRequest("bad", (1,), params))
    assert not engine.has_work() and not engine._grammars._live
    free = SamplingParams(temperature=0, max_tokens=2)
    assert tokens_of(finish(engine, EngineRequest("bad", (0,), free))) == [1, 2]


LIBRARY_S_OWN = 'start: x " three"\nx[max_tokens=4]: /[a-z ]*/'


def test_a_grammar_s_own_limit_of_tokens_hurts_nobody() -> None:
    """The library cannot go back over such rules, and drafts stand and fall along them."""
    params = SamplingParams(
        temperature=0, max_tokens=9, structured_outputs=GrammarSpec("ebnf", LIBRARY_S_OWN)
    )
    free, prompt = SamplingParams(temperature=0, max_tokens=12), tuple(chain("count")[:1])
    for k, head in ((0, "good"), (3, "good"), (3, "alternate")):
        outputs = run_jobs(engine_of(1, k, head), {"own": Job(prompt, params), "free": Job(prompt, free)})
        check_greedy(Job(prompt, params), outputs["own"], head)
        assert tokens_of(outputs["free"]) == chain("count")[1:13]


def test_masks_that_take_too_long_end_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the time of a dispatch those that are slow give up, with an error; others go on."""
    spec, _ = GRAMMARS["words"]
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=spec)
    free = SamplingParams(temperature=0, max_tokens=12)
    engine, prompt = engine_of(1, 3, "good"), tuple(chain("count")[:1])
    monkeypatch.setattr(guided, "MASK_SECONDS", 0.0)
    outputs = run_jobs(engine, {"quick": Job(prompt, params)})["quick"]
    check_greedy(Job(prompt, params), outputs, "nothing is slow")
    monkeypatch.setattr(guided, "SLOW_SECONDS", 0.0)
    told = run_jobs(engine, {"slow": Job(prompt, params), "free": Job(prompt, free)})
    assert told["slow"][-1].finish_reason == FinishReason.ABORT and told["slow"][-1].error
    assert tokens_of(told["free"]) == chain("count")[1:13]


def test_what_ends_a_text_ends_it_even_if_nothing_could_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is exceeded behind the last token is no mistake; one before it is."""
    params = SamplingParams(temperature=0, max_tokens=4, structured_outputs=GRAMMARS["long choice"][0])
    engine, prompt = engine_of(1, 0, "good"), tuple(chain("count")[:1])
    whole = finish(engine, EngineRequest("a", prompt, params))
    for last in (3, 4):
        engine.add_request(EngineRequest("a", prompt, params))
        matcher = engine._grammars._live["a"].matcher
        accept = matcher.accept

        def and_fail(tokens: Sequence[int], matcher=matcher, accept=accept, last=last) -> None:
            accept(tokens)
            matcher.count = getattr(matcher, "count", 0) + len(tokens)
            if matcher.count >= last:
                matcher.give_up()

        monkeypatch.setattr(matcher, "accept", and_fail)
        outputs: list[RequestOutput] = []
        while engine.has_work():
            outputs += engine.step()
        if last == 4:
            assert tokens_of(outputs) == tokens_of(whole) and outputs[-1].error is None
        else:
            assert outputs[-1].finish_reason == FinishReason.ABORT and outputs[-1].error


def test_a_grammar_that_cannot_be_followed_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error, and nobody else's: a step of the parser may exceed its limits."""
    spec, _ = GRAMMARS["words"]
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=spec)
    engine, prompt = engine_of(1, 3, "good"), (0,)
    engine.add_request(EngineRequest("lost", prompt, params))
    engine.add_request(EngineRequest("other", prompt, params))
    lost = engine._grammars._live["lost"].matcher
    monkeypatch.setattr(type(lost), "failed", property(lambda self: self is lost))
    outputs: dict[str, list[RequestOutput]] = {"lost": [], "other": []}
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    (last,) = outputs["lost"]
    assert last.finish_reason == FinishReason.ABORT and last.error and not last.token_ids
    check_greedy(Job(prompt, params), outputs["other"], "other")
    assert engine.stats().kv_cache_usage == 0
