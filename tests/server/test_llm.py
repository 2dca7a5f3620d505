"""`LLM`, the offline front end, over the real engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_jax.engine import guided
from mtp_jax.errors import InvalidRequestError, InvalidValueError
from mtp_jax.llm import LLM
from mtp_jax.request import SamplingParams
from mtp_jax.text.grammar import json_object

MODEL = Path(__file__).parents[1] / "golden" / "tiny_mimo"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, num_speculative_tokens=2, max_num_seqs=4, num_pages=48, use_tqdm=False) as made:
        yield made


def test_every_shape_of_prompt_keeps_its_order(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("stone")
    prompts = ["stone", ids, {"prompt": "stone"}, {"prompt_token_ids": ids}, "a river"]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)  # pyright: ignore
    assert [result.prompt for result in results] == ["stone", None, "stone", None, "a river"]
    assert len({result.outputs[0].token_ids for result in results[:4]}) == 1
    assert results[4].outputs[0].token_ids != results[0].outputs[0].token_ids
    for one in ("stone", ids, {"prompt": "stone"}):
        again = llm.generate(one, GREEDY, use_tqdm=False)  # pyright: ignore
        assert len(again) == 1 and again[0].outputs[0].token_ids == results[0].outputs[0].token_ids


def test_outputs(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)]
    first, second = llm.generate(["stone", "sea"], params, use_tqdm=False)
    (output,) = first.outputs
    assert output.finish_reason == "length" and len(output.token_ids) == 6
    assert output.acceptance.num_rounds > 0 and output.acceptance.num_draft_tokens > 0
    assert output.text == llm.get_tokenizer().decode(output.token_ids)
    assert [each.index for each in second.outputs] == [0, 1, 2]
    assert len({each.token_ids for each in second.outputs}) > 1
    assert first.request_id != second.request_id


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, GREEDY, use_tqdm=False)
    two = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in two] == [one[0].outputs[0].token_ids] * 2


def test_refusals_leave_nothing_behind(llm: LLM) -> None:
    refused = [
        (["stone", [7] * 200], GREEDY, "prompt"),
        ([[7, 10**6]], GREEDY, "prompt_token_ids"),
        ([{"text": "x"}], GREEDY, "prompt"),
        (["a", "b"], [GREEDY], "sampling_params"),
        (["a"], SamplingParams(max_tokens=500), "max_tokens"),
    ]
    for prompts, params, field in refused:
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(prompts, params, use_tqdm=False)  # pyright: ignore
        assert caught.value.field == field
    llm.generate("stone", GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a_completion_that_fails_takes_no_other_with_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grammar takes too long, say."""
    monkeypatch.setattr(guided, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(guided, "SLOW_SECONDS", 0.0)
    params = [SamplingParams(max_tokens=6, structured_outputs=json_object()), GREEDY]
    (failed,), (other,) = (
        result.outputs for result in llm.generate(["stone", "sea"], params, use_tqdm=False)
    )
    assert failed.finish_reason == "abort" and isinstance(failed.error, InvalidRequestError)
    assert other.error is None and len(other.token_ids) == 6
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_bad_options() -> None:
    with pytest.raises(InvalidValueError, match="page_sise"):
        LLM(MODEL, page_sise=4)
    for gib in (float("inf"), float("nan"), 0.0):
        with pytest.raises(InvalidValueError, match=r"kv_cache_gib: got .*finite"):
            LLM(MODEL, kv_cache_gib=gib)
    with pytest.raises(InvalidValueError, match="--model"):
        LLM("/nowhere")
    with pytest.raises(InvalidValueError, match="stages"):
        LLM(MODEL, stages=100)


def test_a_closed_llm_says_so() -> None:
    made = LLM.__new__(LLM)
    made._engine = None
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.generate("x")
