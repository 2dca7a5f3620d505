"""What callers see of an engine: text, stops, aborts, limits, counters. tiny_mimo has a byte tokenizer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.errors import InvalidRequestError
from mtp_jax.loading import resolve_model
from mtp_jax.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from tests.parity.rig import make_engine, renew

MIMO = Path(__file__).parents[1] / "golden" / "tiny_mimo"
PROMPT = (40, 41, 42)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def base() -> Engine:
    return make_engine(resolve_model(MIMO), num_speculative_tokens=2, stages=2)


@pytest.fixture
def engine(base: Engine) -> Engine:
    return renew(base)


def serve(engine: Engine, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[RequestOutput]:
    engine.add_request(EngineRequest("a", tuple(prompt), params))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert engine.stats().kv_cache_usage == 0
    return outputs


def text_of(outputs: Sequence[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_text_is_the_tokens_decoded(engine: Engine) -> None:
    outputs = serve(engine, GREEDY)
    tokens = tokens_of(outputs)
    assert len(tokens) == 30
    assert text_of(outputs) == engine.tokenizer.decode(tokens)
    last = outputs[-1]
    assert last.finish_reason is FinishReason.LENGTH and last.stop_reason is None
    assert last.num_prompt_tokens == 3 and last.num_cached_tokens == 0
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[0].queued_seconds is not None and outputs[0].queued_seconds >= 0
    assert all(output.queued_seconds is None for output in outputs[1:])


def test_stop_string(engine: Engine) -> None:
    """Found inside a round of several tokens or across rounds; nothing from it on is shown."""
    tokens = tokens_of(serve(engine, GREEDY))
    whole = engine.tokenizer.decode(tokens)
    shown = [i for i in range(4, len(whole) - 2) if "\ufffd" not in whole[i : i + 2]]
    for start in shown[:6]:
        stop = whole[start : start + 2]
        outputs = serve(renew(engine), dataclasses.replace(GREEDY, stop=(stop, "\x00never\x00")))
        assert text_of(outputs) == whole[: whole.index(stop)]
        assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason == stop
        found = tokens_of(outputs)
        assert found == tokens[: len(found)]
        assert len(found) < len(tokens)


def test_stop_token(engine: Engine) -> None:
    """It is counted, and is no part of the text."""
    tokens = tokens_of(serve(engine, GREEDY))
    stop = tokens[9]
    first = tokens.index(stop)
    outputs = serve(renew(engine), dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    assert tokens_of(outputs) == tokens[: first + 1]
    assert text_of(outputs) == engine.tokenizer.decode(tokens[:first])
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason == stop


def test_more_stop_tokens_than_the_device_watches_for(engine: Engine) -> None:
    """The host finds the others, a dispatch later."""
    tokens = tokens_of(serve(engine, GREEDY))
    stop = tokens[9]
    unused = [token for token in range(3, 256) if token not in tokens][:12]
    params = dataclasses.replace(GREEDY, stop_token_ids=(*unused, stop))
    assert tokens_of(serve(renew(engine), params)) == tokens[: tokens.index(stop) + 1]


def test_end_of_sequence(engine: Engine) -> None:
    """Enough hot samples meet id 2 before their 90 tokens are over; those that ignore it do not end there."""
    params = SamplingParams(temperature=100.0, max_tokens=90)
    reasons = []
    for seed in range(12):
        engine.add_request(EngineRequest(str(seed), PROMPT, params, seed))
    ended: dict[str, list[int]] = {str(seed): [] for seed in range(12)}
    while engine.has_work():
        for output in engine.step():
            ended[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons.append(output.finish_reason)
    assert FinishReason.STOP in reasons
    for tokens in ended.values():
        assert 2 not in tokens[:-1]
        assert tokens[-1] == 2 or len(tokens) == 90


def test_abort(engine: Engine) -> None:
    """At any moment: waiting, in prefill, decoding; then the id is free again."""
    for steps in range(6):
        engine.add_request(EngineRequest("a", PROMPT, GREEDY))
        for _ in range(steps):
            engine.step()
        assert engine.abort("a")
        assert not engine.abort("a")
        assert engine.stats().kv_cache_usage == 0
    assert not engine.abort("unknown")
    while engine.has_work():
        assert engine.step() == []


def test_abort_leaves_the_others_alone(engine: Engine) -> None:
    alone = tokens_of(serve(engine, GREEDY))
    engine.add_request(EngineRequest("b", PROMPT, GREEDY))
    engine.add_request(EngineRequest("c", (9, 8, 7, 6), GREEDY))
    outputs = engine.step() + engine.step() + engine.step()
    engine.abort("c")
    while engine.has_work():
        outputs += engine.step()
    assert tokens_of([output for output in outputs if output.request_id == "b"]) == alone
    assert all(output.finish_reason is None for output in outputs if output.request_id == "c")


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ((), GREEDY, "prompt"),
        ((1,) * 96, GREEDY, "prompt"),
        ((1,) * 90, GREEDY, "max_tokens"),
        (PROMPT, dataclasses.replace(GREEDY, num_speculative_tokens=3), "num_speculative_tokens"),
    ],
)
def test_refusals(engine: Engine, prompt: tuple[int, ...], params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        engine.add_request(EngineRequest("a", prompt, params))
    assert refused.value.field == field
    assert not engine.has_work()


def test_max_tokens_none_fills_the_context(engine: Engine) -> None:
    outputs = serve(engine, dataclasses.replace(GREEDY, max_tokens=None))
    assert len(tokens_of(outputs)) == 96 - len(PROMPT)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_counters(engine: Engine) -> None:
    prompts = [PROMPT, (9,) * 20, (5, 6)]
    for index, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(str(index), prompt, GREEDY))
    assert engine.stats().num_waiting == 3
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    stats = engine.stats()
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.generation_tokens == len(tokens_of(outputs)) == 90
    assert sum(stats.num_accepted_per_position) == stats.num_accepted_tokens <= stats.num_draft_tokens
    speculation = [output.speculation for output in outputs if output.speculation]
    assert len(speculation) == 3
    assert sum(s.num_accepted_tokens for s in speculation) == stats.num_accepted_tokens
    assert sum(s.num_draft_tokens for s in speculation) == stats.num_draft_tokens
    for each in speculation:
        assert sum(each.acceptance_histogram) == each.num_rounds
        assert (
            sum(j * rounds for j, rounds in enumerate(each.acceptance_histogram)) == each.num_accepted_tokens
        )
    assert stats.num_running == stats.num_waiting == 0
    assert 0 < stats.useful_ticks <= stats.ticks


def test_a_failed_launch_is_told_and_closes(engine: Engine) -> None:
    """The first error comes out, not that of the state that went with it; and the threads end."""
    broken = renew(engine)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    broken.add_request(EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=9)))
    broken.step()
    find = broken.executables.find
    broken.executables.find = lambda bucket: (bucket, fail)  # type: ignore[method-assign,assignment,return-value]
    try:
        with pytest.raises(RuntimeError, match="the device is gone"):
            for _ in range(4):
                broken.step()
        with pytest.raises(RuntimeError, match="the device is gone"):
            broken.close()
    finally:
        broken.executables.find = find  # type: ignore[method-assign]
    broken.close()
    with pytest.raises(RuntimeError):  # nothing is launched any more
        broken._launcher.submit(fail)


@pytest.mark.parametrize("token", [-1, 256, 10**6])
def test_tokens_that_the_model_does_not_have(engine: Engine, token: int) -> None:
    """However they came into the prompt: a tokenizer may know more than the model."""
    assert engine.model_config.vocab_size == 256
    with pytest.raises(InvalidRequestError, match=f"prompt: got 'token id {token}'; expected 0 to 255"):
        engine.add_request(EngineRequest("a", (1, token), dataclasses.replace(GREEDY, presence_penalty=0.1)))
    assert not engine.has_work()
