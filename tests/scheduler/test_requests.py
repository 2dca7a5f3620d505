"""What the scheduler refuses, with errors that say what to change, and how it cuts a completion."""

import pytest

from mtp_jax.config import EngineConfig
from mtp_jax.errors import InvalidRequestError
from mtp_jax.request import EngineRequest
from mtp_jax.scheduler.sequence import make_sequence
from tests.scheduler.harness import make_request, make_scheduler

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=32, page_size=4, num_pages=6, num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (make_request("a", ()), "prompt", r"got 'no tokens'; expected at least one token"),
        (make_request("a", (1,) * 32), "prompt", r"'32 tokens'; expected at most 31 tokens.*context of 32"),
        (
            make_request("a", (1,) * 20, max_tokens=13),
            "max_tokens",
            r"got 13; expected at most 12 after a prompt of 20 tokens in a context of 32",
        ),
        (
            make_request("a", (1,) * 20, max_tokens=5),
            "max_tokens",
            r"got 5; .*fits in 6 KV pages of 4 tokens, and this one needs 7: .*larger --num-pages",
        ),
        (
            make_request("a", (1,) * 24, max_tokens=None),
            "prompt",
            r"'24 tokens'; .*6 KV pages of 4 tokens, and this one needs 7: shorten the prompt",
        ),
        (
            make_request("a", (1,), num_speculative_tokens=3),
            "num_speculative_tokens",
            r"got 3; expected 0 to 2, the drafts a round",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused(request_: EngineRequest, field: str, message: str):
    scheduler = make_scheduler(CONFIG)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        scheduler.add(request_)
    assert caught.value.field == field
    assert not scheduler.has_unfinished


def test_an_id_is_taken_until_its_request_ends():
    scheduler = make_scheduler(CONFIG)
    scheduler.add(make_request("twin", (1, 2)))
    with pytest.raises(InvalidRequestError, match=r"request_id: got 'twin'; expected an id that no"):
        scheduler.add(make_request("twin", (1, 2)))
    assert scheduler.finish("twin")
    assert not scheduler.finish("twin")
    scheduler.add(make_request("twin", (1, 2)))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)


@pytest.mark.parametrize(("num_pages", "max_total"), [(6, 24), (64, 32)])
def test_no_max_tokens_means_the_context_or_the_pool(num_pages: int, max_total: int):
    config = EngineConfig(max_model_len=32, page_size=4, num_pages=num_pages)
    sequence = make_sequence(make_request("a", (1, 2, 3), max_tokens=None), config, (), 0)
    assert sequence.max_total == max_total


@pytest.mark.parametrize(
    ("new", "kept", "reason"),
    [
        ((1, 2), (1, 2), None),
        ((1, 9, 2), (1, 9), "stop"),
        ((1, 2, 3, 4), (1, 2, 3), "length"),
        ((1, 2, 9), (1, 2, 9), "stop"),  # a stop token in the last place is a stop
        ((1, 2, 3, 9), (1, 2, 3), "length"),
        ((7, 1, 2), (7,), "stop"),
    ],
)
def test_cut(new: tuple[int, ...], kept: tuple[int, ...], reason: str | None):
    request = make_request("a", (1, 2), max_tokens=3, stop_token_ids=(7,))
    assert make_sequence(request, CONFIG, (9,), 0).cut(new) == (kept, reason)


def test_the_device_watches_for_eight_stop_tokens_and_the_host_for_all():
    request = make_request("a", (1,), stop_token_ids=tuple(range(20, 32)), max_tokens=8)
    sequence = make_sequence(request, CONFIG, (9, 20), 0)
    assert sequence.view().stop_token_ids == (9, *range(20, 27))
    assert sequence.cut((1, 31, 2)) == ((1, 31), "stop")
    ignoring = make_request("b", (1,), ignore_eos=True)
    assert make_sequence(ignoring, CONFIG, (9,), 0).view().stop_token_ids == ()


def test_view_of_sampling_parameters():
    request = make_request(
        "a", (1, 2), seed=77, temperature=0.5, top_k=-1, top_p=0.9, num_speculative_tokens=1
    )
    view = make_sequence(request, CONFIG, (), 0).view()
    assert (view.seed, view.temperature, view.top_k, view.top_p, view.num_drafts) == (77, 0.5, 0, 0.9, 1)
    assert view.max_total == 2 + 16
