"""Single decisions of the scheduler, each on a case small enough to write down."""

import pytest

from mtp_jax.config import EngineConfig
from mtp_jax.scheduler.plan import DispatchPlan, RowResult
from mtp_jax.scheduler.scheduler import Scheduler
from tests.scheduler.harness import EOS, Harness, make_request, make_scheduler

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def make_config(**fields) -> EngineConfig:
    small = {"max_num_seqs": 4, "max_model_len": 64, "page_size": 4, "num_pages": 64, "prefill_chunk": 4}
    return EngineConfig(**{**small, **fields})


def timetable(plan: DispatchPlan) -> list[tuple[int, int] | None]:
    """(start, end) of the chunk that enters at each tick."""
    return [chunk and (chunk.start, chunk.start + len(chunk.token_ids)) for chunk in plan.chunks]


def take(scheduler: Scheduler) -> DispatchPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def result_for(plan: DispatchPlan, slot: int, *token_ids: int) -> RowResult:
    return RowResult(slot, plan.slots[slot].generation, token_ids, 0, 0)


def test_chunks_enter_back_to_back_one_a_tick():
    harness = Harness(make_config(stages=2))
    harness.add(make_request("a", PROMPT, max_tokens=30, ignore_eos=True))
    harness.add(make_request("b", PROMPT[:5], max_tokens=30, ignore_eos=True))
    for _ in range(5):
        harness.step()
    plans = harness.plans
    assert [timetable(plan) for plan in plans] == [
        [(0, 4), (4, 8)],
        [(8, 10), (0, 4)],
        [(4, 5), None],
        [],
        [],
    ]
    slots = [[chunk.slot if chunk else None for chunk in plan.chunks] for plan in plans]
    assert slots == [[0, 0], [0, 1], [1, None], [], []]
    assert [chunk.next_token for plan in plans for chunk in plan.chunks if chunk] == [5, 9, -1, 5, -1]
    assert [plan.has_lane for plan in plans] == [True, True, True, False, False]
    # A slot is in the rows from the plan in which its final chunk enters.
    assert [plan.rows for plan in plans] == [
        ((-1,), (-1,)),
        ((0,), (-1,)),
        ((0,), (1,)),
        ((0,), (1,)),
        ((0,), (1,)),
    ]


def test_a_chunk_in_flight_keeps_the_lane_and_its_width():
    harness = Harness(make_config(stages=4, prefill_chunk=16))
    harness.add(make_request("a", PROMPT[:3], max_tokens=8))
    harness.step()
    harness.add(make_request("b", PROMPT, max_tokens=8))
    harness.step()
    harness.add(make_request("c", PROMPT[:2], max_tokens=8))
    harness.add(make_request("d", PROMPT, max_tokens=8))
    for _ in range(3):
        harness.step()
    table = [(plan.has_lane, plan.chunk_size, len([c for c in plan.chunks if c])) for plan in harness.plans]
    # The chunk of tick 0 leaves at tick 3 of its own dispatch, the one of tick 1 in the next dispatch.
    assert table[:3] == [(True, 4, 1), (True, 16, 1), (True, 16, 2)]
    assert table[3] == (True, 16, 0)
    assert table[4][:2] == (False, 0)


def test_every_tick_of_every_stage_is_useful_in_steady_decode():
    harness = Harness(make_config(stages=4, max_rounds=4))
    for index in range(4):
        harness.add(make_request(str(index), PROMPT[: index + 1], max_tokens=50, ignore_eos=True))
    while any(not s.has_new_token for s in harness.scheduler._running.values()) or not harness.plans:
        harness.step()
    harness.step()
    ring = harness.ring
    before = (ring.useful_ticks, ring.ticks)
    for _ in range(6):
        harness.step()
    assert ring.useful_ticks - before[0] == ring.ticks - before[1] > 0
    assert {plan.rounds for plan in harness.plans[-5:]} == {4}


@pytest.mark.parametrize(
    ("max_tokens", "drafts", "rounds"),
    [(40, 0, 8), (9, 0, 8), (8, 0, 4), (5, 0, 4), (4, 0, 2), (2, 0, 1), (40, 3, 8), (20, 3, 4), (6, 3, 1)],
)
def test_rounds_follow_what_is_left_to_make(max_tokens: int, drafts: int, rounds: int):
    """The first token comes with the prompt, so max_tokens - 1 are left, at K + 1 a round at best."""
    scheduler = make_scheduler(make_config(max_rounds=8, num_speculative_tokens=drafts))
    scheduler.add(make_request("a", PROMPT[:4], max_tokens=max_tokens))
    assert take(scheduler).rounds == 1
    assert take(scheduler).rounds == rounds


def test_one_round_a_dispatch_while_somebody_waits():
    config = make_config(max_num_seqs=1, max_rounds=8)
    harness = Harness(config)
    harness.add(make_request("a", PROMPT[:4], max_tokens=40, ignore_eos=True))
    harness.add(make_request("b", PROMPT[:4], max_tokens=1))
    for _ in range(6):
        harness.step()
    assert harness.scheduler.num_waiting == 1
    assert {plan.rounds for plan in harness.plans} == {1}
    harness.abort("b")
    harness.step()
    assert harness.plans[-1].rounds == 8


def test_fewer_rounds_before_anybody_is_preempted():
    config = make_config(num_pages=14, max_rounds=4, prefill_chunk=16, enable_prefix_caching=False)
    harness = Harness(config)
    for name in "ab":
        harness.add(make_request(name, PROMPT, seed=ord(name), max_tokens=30, ignore_eos=True))
    while not harness.scheduler.num_preemptions:
        harness.step()
    rounds = [plan.rounds for plan in harness.plans if not plan.has_lane]
    assert rounds == sorted(rounds, reverse=True) and (rounds[0], rounds[-1]) == (4, 1)
    harness.finish_all()


def test_nothing_is_dispatched_for_requests_that_outstanding_plans_finish():
    scheduler = make_scheduler(make_config())
    assert scheduler.schedule() is None
    scheduler.add(make_request("a", PROMPT[:4], max_tokens=1))
    plan = take(scheduler)
    assert scheduler.schedule() is None
    assert scheduler.has_unfinished
    (update,) = scheduler.update(plan, [result_for(plan, 0, 5)])
    assert (update.token_ids, update.finish_reason, update.is_first) == ((5,), "length", True)
    assert not scheduler.has_unfinished and scheduler.pages_used == 0


def test_a_shrinking_row_bucket_waits_for_the_flights_of_the_plan_before():
    harness = Harness(make_config(max_num_seqs=8))
    for index in range(4):
        harness.add(make_request(str(index), PROMPT[:2], max_tokens=60, ignore_eos=True))
    for _ in range(8):
        harness.step()
    assert harness.plans[-1].rows == ((0, 1, 2, 3),)
    harness.abort("0")
    harness.abort("2")
    harness.step()
    harness.step()
    before, after = harness.plans[-2:]
    assert (before.num_rows, before.rows) == (4, ((3, 1, -1, -1),))
    assert (after.num_rows, after.rows) == (2, ((3, 1),))
    harness.finish_all()


def test_width_covers_the_pages_of_the_longest_request():
    harness = Harness(make_config(num_speculative_tokens=1))
    harness.add(make_request("a", PROMPT[:2], max_tokens=60, ignore_eos=True))
    harness.step()
    # 2 tokens and 2K + 2 reserved are 6, that is 2 pages of 4.
    assert (harness.plans[-1].width, len(harness.plans[-1].slots[0].pages)) == (2, 2)
    widths = []
    while harness.step():
        widths.append(harness.plans[-1].width)
    assert sorted(set(widths)) == [2, 4, 8, 16]
    assert widths == sorted(widths)


def test_pages_of_an_outstanding_plan_are_not_needed_twice():
    """The reservation counts what each outstanding plan may add: 1 for the exit, R(K + 1) after it."""
    scheduler = make_scheduler(make_config(num_speculative_tokens=1, page_size=4))
    scheduler.add(make_request("a", PROMPT[:2], max_tokens=60))
    pages = []
    for _ in range(4):
        plan = take(scheduler)
        pages.append(len(plan.slots[0].pages))
    # Tokens to cover: 2 known + 1 first + 2 a plan after that + 2K + 1 for the last rebuild.
    assert pages == [-(-(2 + 1 + 2 * after + 3) // 4) for after in range(4)]


def test_generations_are_new_for_every_stay_in_a_slot():
    scheduler = make_scheduler(make_config(max_num_seqs=1))
    seen = []
    for name in "abc":
        scheduler.add(make_request(name, PROMPT[:2]))
        seen.append(take(scheduler).slots[0].generation)
        assert scheduler.finish(name)
    assert seen == [1, 2, 3]


def test_results_of_a_request_that_left_are_ignored():
    scheduler = make_scheduler(make_config(max_num_seqs=1))
    scheduler.add(make_request("a", PROMPT[:2]))
    old = take(scheduler)
    stale = result_for(old, 0, 5)
    scheduler.finish("a")
    scheduler.add(make_request("b", PROMPT[:2]))
    new = take(scheduler)
    assert scheduler.update(old, [stale]) == []
    (update,) = scheduler.update(new, [result_for(new, 0, 6)])
    assert (update.request_id, update.token_ids) == ("b", (6,))


def test_stop_token_ends_a_request_and_the_rest_of_the_round_is_cut():
    scheduler = make_scheduler(make_config(num_speculative_tokens=3))
    scheduler.add(make_request("a", PROMPT[:2]))
    plan = take(scheduler)
    results = [result_for(plan, 0, 5), result_for(plan, 0, 6, EOS, 7), result_for(plan, 0, 8)]
    updates = scheduler.update(plan, results)
    assert [(u.token_ids, u.finish_reason, u.stop_token, u.is_first) for u in updates] == [
        ((5,), None, None, True),
        ((6, EOS), "stop", EOS, False),
    ]
    assert not scheduler.has_unfinished


def test_plans_must_come_back_in_order():
    scheduler = make_scheduler(make_config())
    scheduler.add(make_request("a", PROMPT))
    take(scheduler)
    second = take(scheduler)
    with pytest.raises(AssertionError, match="plan 1 came back before plan 0"):
        scheduler.update(second, [])


def test_a_repeated_prompt_is_answered_by_the_cache():
    harness = Harness(make_config(prefill_chunk=16))
    harness.add(make_request("a", PROMPT, max_tokens=4, ignore_eos=True))
    harness.finish_all()
    harness.add(make_request("b", PROMPT, max_tokens=4, ignore_eos=True))
    harness.step()
    assert harness.scheduler.num_cached_tokens("b") == 8
    assert [chunk.start for chunk in harness.plans[-1].chunks if chunk] == [8]
    assert (harness.scheduler.prefix_queries, harness.scheduler.prefix_hits) == (20, 8)
    harness.finish_all()
    assert harness.scheduler.num_cached_tokens("b") == 8  # ended by the last update
    with pytest.raises(KeyError):
        harness.scheduler.num_cached_tokens("a")


def test_a_conversation_continues_from_the_completion():
    """Pages that decoding filled are matched too."""
    harness = Harness(make_config(num_speculative_tokens=2, prefill_chunk=16))
    harness.add(make_request("a", PROMPT, max_tokens=13, ignore_eos=True))
    harness.finish_all()
    harness.add(make_request("b", (*PROMPT, *harness.tokens["a"], 1, 2), max_tokens=4))
    harness.step()
    assert harness.scheduler.num_cached_tokens("b") in (16, 20)
    harness.finish_all()


@pytest.mark.parametrize("stages", [1, 2])
def test_pages_are_matched_only_once_their_chunk_was_read_back(stages: int):
    harness = Harness(make_config(stages=stages, prefill_chunk=16))
    harness.add(make_request("a", PROMPT, max_tokens=20, ignore_eos=True))
    harness.dispatch()
    harness.add(make_request("b", PROMPT, max_tokens=20, ignore_eos=True))
    harness.dispatch()
    assert harness.scheduler.num_cached_tokens("b") == 0
    harness.read_back()
    harness.add(make_request("c", PROMPT, max_tokens=20, ignore_eos=True))
    harness.dispatch()
    assert harness.scheduler.num_cached_tokens("c") == 8
    harness.finish_all()


def test_pages_of_a_long_prompt_are_matched_before_all_of_it_is_computed():
    harness = Harness(make_config(prefill_chunk=4))
    harness.add(make_request("a", PROMPT * 4, max_tokens=4))
    for _ in range(4):
        harness.step()  # four chunks entered, three were read back
    harness.add(make_request("b", PROMPT * 2, max_tokens=4))
    harness.step()
    assert harness.scheduler.num_cached_tokens("b") == 12
    harness.finish_all()


def test_pages_computed_after_a_match_belong_to_the_whole_prompt():
    harness = Harness(make_config(prefill_chunk=16))
    long = PROMPT * 2
    for name, prompt, cached in (("a", PROMPT, 0), ("b", long, 8), ("c", long[8:], 0), ("d", long, 16)):
        harness.add(make_request(name, prompt, max_tokens=2, ignore_eos=True))
        harness.step()
        assert harness.scheduler.num_cached_tokens(name) == cached
        harness.finish_all()


def test_a_preempted_request_is_cached_anew_from_its_first_page():
    harness = Harness(make_config(num_pages=8, prefill_chunk=16))
    for name, tokens in (("a", PROMPT), ("b", PROMPT[::-1])):
        harness.add(make_request(name, tokens, max_tokens=20, ignore_eos=True))
    while not harness.scheduler.num_preemptions:
        harness.step()
    harness.finish_all()  # `a` took the pages of `b` in the meantime
    assert [chunk.start for plan in harness.plans for chunk in plan.chunks if chunk][-1] == 0
    harness.add(make_request("c", PROMPT[::-1], max_tokens=2))
    harness.step()
    assert harness.scheduler.num_cached_tokens("c") == 8
    harness.finish_all()


def test_completions_of_one_prompt_wait_for_its_pages():
    harness = Harness(make_config(prefill_chunk=4))
    harness.add(make_request("0", PROMPT, seed=0, max_tokens=6, ignore_eos=True))
    for index in (1, 2):
        harness.add(make_request(str(index), PROMPT, seed=index, shares="0", max_tokens=6, ignore_eos=True))
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 2)
    while harness.scheduler.num_waiting:
        harness.step()
    assert [harness.scheduler.num_cached_tokens(str(index)) for index in range(3)] == [0, 8, 8]
    harness.finish_all()
    assert sum(len(c.token_ids) for plan in harness.plans for c in plan.chunks if c) == 10 + 2 + 2


def test_a_completion_does_not_wait_for_a_request_that_is_gone_or_without_a_cache():
    for caching, named in ((True, "gone"), (False, "0")):
        scheduler = make_scheduler(make_config(enable_prefix_caching=caching))
        scheduler.add(make_request("0", PROMPT))
        scheduler.add(make_request("1", PROMPT, shares=named))
        take(scheduler)
        assert scheduler.num_running == 2


def test_the_head_of_the_queue_is_never_overtaken():
    harness = Harness(make_config(num_pages=8))
    harness.add(make_request("long", PROMPT, max_tokens=20, ignore_eos=True))
    harness.step()
    harness.add(make_request("longer", PROMPT * 2, max_tokens=4))
    harness.add(make_request("short", PROMPT[:1], max_tokens=1))
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 2)
    harness.finish_all()


def test_preemption_takes_the_latest_arrival_and_keeps_its_tokens():
    harness = Harness(make_config(num_pages=9, enable_prefix_caching=False, prefill_chunk=16))
    for name in "ab":
        harness.add(make_request(name, PROMPT, seed=ord(name), max_tokens=20, ignore_eos=True))
    while not harness.scheduler.num_preemptions:
        harness.step()
    (waiting,) = harness.scheduler._waiting
    assert waiting.request_id == "b" and waiting.tokens == [*PROMPT, *harness.tokens["b"]]
    harness.finish_all()
    recomputed = [c for plan in harness.plans for c in plan.chunks if c and c.start + len(c.token_ids) > 10]
    assert recomputed and all(chunk.generation > 2 for chunk in recomputed)
    assert [u.request_id for u in harness.updates if u.is_first] == ["a", "b", "b"]


def test_a_request_about_to_end_is_waited_for_rather_than_preempted():
    """`a` wants a fifth page when `b` is certain to end with the outstanding plan: it waits for that plan."""
    harness = Harness(make_config(num_pages=7, enable_prefix_caching=False, prefill_chunk=16))
    harness.add(make_request("a", PROMPT, max_tokens=14, ignore_eos=True))
    harness.add(make_request("b", PROMPT[:8], seed=1, max_tokens=4, ignore_eos=True))
    harness.dispatch()
    while harness.dispatch():
        harness.read_back()
    assert (harness.scheduler.num_running, harness.scheduler.pages_used) == (2, 7)
    harness.read_back()
    assert harness.reasons == {"b": "length"}
    assert harness.dispatch() is not None
    harness.finish_all()
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_returns_everything_at_any_moment(steps: int):
    harness = Harness(make_config(stages=2, num_speculative_tokens=1))
    harness.add(make_request("a", PROMPT, max_tokens=50, ignore_eos=True))
    for _ in range(steps):
        harness.step()
    harness.abort("a")
    assert harness.scheduler.pages_used == 0 and not harness.scheduler.has_unfinished
    harness.finish_all()
    harness.add(make_request("b", PROMPT, max_tokens=5))
    harness.finish_all()
