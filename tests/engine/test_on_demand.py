"""Kinds of steps that are compiled when somebody asks: who waits for them, and who does not."""

import dataclasses
import threading
from collections.abc import Iterator

import pytest

from mtp_jax.engine.buckets import Bucket, Report, Sampling
from mtp_jax.engine.build import construct
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.on_demand import PLAIN, kind_of, union
from mtp_jax.errors import NotCompiledError
from mtp_jax.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from mtp_jax.server.errors import as_api_error
from tests.parity.rig import blueprint, tokens_of
from tests.parity.scripted_model import ScriptedSource, chain, greedy_text

PROMPT = (chain("loop")[0],)
SHAPED = SamplingParams(temperature=0, max_tokens=12, presence_penalty=0.7)
FREE = SamplingParams(temperature=0, max_tokens=40)


class Gate:
    """Lets the background compiler have steps of special kinds only once it is open."""

    def __init__(self, engine: Engine):
        self.engine, self.open, self.fails = engine, threading.Event(), False
        self._compile = engine.executables.compile
        engine.executables.compile = self.compile  # type: ignore[method-assign]

    def compile(self, bucket: Bucket):
        if (bucket.sampling, bucket.report) != PLAIN and not self.engine.executables.is_ready(bucket):
            assert threading.current_thread().name == "mtp-jax-compile", "a live request waits for a compiler"
            assert self.open.wait(120)
            if self.fails:
                raise RuntimeError("a compiler's mistake")
        return self._compile(bucket)


@pytest.fixture
def gate() -> Iterator[Gate]:
    drawn = blueprint(ScriptedSource(), max_model_len=64, num_speculative_tokens=0)
    options = dataclasses.replace(drawn.options, background_compile=True)
    made = Gate(construct(dataclasses.replace(drawn, options=options)))
    yield made
    made.open.set()
    made.engine.close()


def run(engine: Engine, outputs: dict[str, list[RequestOutput]], steps: int | None = None) -> None:
    """So many steps, or until nothing is left to do."""
    while engine.has_work() if steps is None else steps > 0:
        steps = None if steps is None else steps - 1
        for output in engine.step():
            outputs[output.request_id].append(output)


def test_nobody_else_waits(gate: Gate) -> None:
    """A request whose kind is missing is held; its neighbour goes on, and so does one that comes later."""
    engine, outputs = gate.engine, {"plain": [], "shaped": [], "later": []}
    engine.add_request(EngineRequest("plain", PROMPT, FREE))
    run(engine, outputs, 3)
    engine.add_request(EngineRequest("shaped", PROMPT, SHAPED))
    engine.add_request(EngineRequest("later", PROMPT, dataclasses.replace(FREE, max_tokens=5)))
    run(engine, outputs, 20)
    assert outputs["later"][-1].finish_reason and len(tokens_of(outputs["plain"])) > 15
    assert not outputs["shaped"] and engine.stats().num_waiting == 1
    gate.open.set()
    run(engine, outputs)
    assert tuple(tokens_of(outputs["shaped"])) == greedy_text(PROMPT, SHAPED).token_ids
    assert tuple(tokens_of(outputs["plain"])) == greedy_text(PROMPT, FREE).token_ids


def test_a_kind_is_asked_for_together_with_the_live_ones(gate: Gate) -> None:
    """A shaped request and one that wants log-probabilities need a step that can do both."""
    engine, outputs = gate.engine, {"shaped": [], "logprobs": [], "prompt": []}
    gate.open.set()
    asked = SamplingParams(temperature=0, max_tokens=30, logprobs=2)
    engine.add_request(EngineRequest("shaped", PROMPT, dataclasses.replace(SHAPED, max_tokens=50)))
    while not outputs["shaped"]:
        run(engine, outputs, 1)
    engine.add_request(EngineRequest("logprobs", PROMPT, asked))
    engine.add_request(EngineRequest("prompt", PROMPT * 3, dataclasses.replace(asked, prompt_logprobs=1)))
    run(engine, outputs)
    for name, params in (("shaped", dataclasses.replace(SHAPED, max_tokens=50)), ("logprobs", asked)):
        assert tuple(tokens_of(outputs[name])) == greedy_text(PROMPT, params).token_ids
    assert len(outputs["prompt"][0].prompt_logprobs) == 2
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs["logprobs"])


def test_nobody_waits_for_larger_ones_either() -> None:
    """One comes alone, others join it, and plans grow: no step compiles what a live request then needs."""
    drawn = blueprint(ScriptedSource(), max_model_len=64, num_speculative_tokens=0, min_rows=1, max_rounds=2)
    options = dataclasses.replace(drawn.options, background_compile=True)
    made = Gate(construct(dataclasses.replace(drawn, options=options)))  # it asserts who compiles
    made.open.set()
    engine, outputs = made.engine, {name: [] for name in ("shaped", "plain", "more")}
    engine.add_request(EngineRequest("shaped", PROMPT, dataclasses.replace(SHAPED, max_tokens=50)))
    while not outputs["shaped"]:
        run(engine, outputs, 1)
    engine.add_request(EngineRequest("plain", PROMPT, FREE))
    engine.add_request(EngineRequest("more", PROMPT, SHAPED))
    run(engine, outputs)
    assert tuple(tokens_of(outputs["plain"])) == greedy_text(PROMPT, FREE).token_ids
    assert tuple(tokens_of(outputs["more"])) == greedy_text(PROMPT, SHAPED).token_ids
    engine.close()


def test_a_held_request_can_be_aborted(gate: Gate) -> None:
    engine = gate.engine
    engine.add_request(EngineRequest("shaped", PROMPT, SHAPED))
    assert engine.step() == [] and engine.has_work()
    assert engine.abort("shaped") and not engine.abort("shaped")
    assert not engine.has_work()


def test_a_compiler_s_mistake_ends_the_request_alone(gate: Gate) -> None:
    engine, outputs = gate.engine, {"shaped": [], "plain": []}
    gate.fails = True
    gate.open.set()
    engine.add_request(EngineRequest("shaped", PROMPT, SHAPED))
    run(engine, outputs)
    assert [output.finish_reason for output in outputs["shaped"]] == [FinishReason.ABORT]
    assert isinstance(outputs["shaped"][0].error, NotCompiledError)
    assert as_api_error(outputs["shaped"][0].error).status == 500
    engine.add_request(EngineRequest("plain", PROMPT, FREE))
    run(engine, outputs)
    assert tuple(tokens_of(outputs["plain"])) == greedy_text(PROMPT, FREE).token_ids


def test_kinds() -> None:
    assert kind_of(FREE) == PLAIN
    assert kind_of(SamplingParams(min_p=0.1, temperature=0)) == PLAIN, "greedy rows have no use for it"
    assert kind_of(SamplingParams(min_p=0.1)) == (Sampling.SHAPED, Report.NOTHING)
    assert kind_of(SamplingParams(logprobs=0)) == (Sampling.ANY, Report.TOKENS)
    kinds = [kind_of(SHAPED), kind_of(SamplingParams(prompt_logprobs=0))]
    assert union(kinds) == (Sampling.SHAPED, Report.PROMPTS)
    assert union([]) == PLAIN
