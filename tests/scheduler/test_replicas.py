"""Which replica a request goes to, and what its neighbours there can do to it."""

import hypothesis
import pytest
from hypothesis import strategies as st

from mtp_jax.config import EngineConfig
from mtp_jax.scheduler.pages import ROOT
from mtp_jax.scheduler.replicas import Replicas
from tests.scheduler.harness import Harness, make_request
from tests.scheduler.ring_simulator import reference
from tests.scheduler.test_workloads import prompt_of_family

PROMPT = tuple(range(1, 11))


def make_config(**fields) -> EngineConfig:
    small = {"data": 2, "max_num_seqs": 8, "max_model_len": 64, "page_size": 4, "num_pages": 64}
    return EngineConfig(**{**small, "prefill_chunk": 8, **fields})


def homes(harness: Harness) -> dict[str, int]:
    """The replica of each running request."""
    replicas = harness.scheduler._replicas
    return {s.request_id: replicas.of(s.slot) for s in harness.scheduler._running.values()}


def add(harness: Harness, name: str, prompt: tuple[int, ...] = PROMPT, **params) -> int:
    """Adds a request and lets it start; returns its replica."""
    harness.add(make_request(name, prompt, **{"max_tokens": 30, "ignore_eos": True, **params}))
    harness.step()
    return homes(harness)[name]


def test_requests_spread_where_nothing_is_cached() -> None:
    harness = Harness(make_config())
    assert [add(harness, str(i), (20 + i, 30 + i)) for i in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    harness.finish_all()


def test_of_equally_busy_replicas_the_one_with_more_pages() -> None:
    harness = Harness(make_config())
    assert add(harness, "long", tuple(range(100, 130))) == 0
    assert add(harness, "short", (7, 8)) == 1
    assert add(harness, "third", (9, 8)) == 1
    harness.finish_all()


def test_a_prefix_draws_a_request_to_its_replica() -> None:
    harness = Harness(make_config())
    assert add(harness, "busy", (50, 51, 52)) == 0
    assert add(harness, "first", max_tokens=1) == 1
    while "first" not in harness.reasons:
        harness.step()
    # The replica of "first" is the emptier one; with one request more it is the fuller one.
    assert add(harness, "other", (60, 61)) == 1
    assert add(harness, "neighbour", (70, 71)) == 1, "more pages"
    assert add(harness, "again") == 1
    assert harness.scheduler.num_cached_tokens("again") == 8
    harness.finish_all()


def test_the_longest_prefix_wins() -> None:
    """Both replicas have a page of the prompt, one has two."""
    replicas = Replicas(make_config())
    for pool, pages in zip(replicas.pools, (1, 2), strict=True):
        parent, held = ROOT, pool.allocate(pages)
        for index, page in enumerate(held):
            first = 4 * index
            parent = pool.register(parent, PROMPT[first : first + 4], PROMPT[first + 4], page)
        pool.release(held)
    place = replicas.choose(list(PROMPT), 12, match=True)
    assert place is not None and (place.replica, len(place.matched), place.missing) == (1, 2, 1)
    blind = replicas.choose(list(PROMPT), 12, match=False)
    assert blind is not None and (blind.replica, blind.matched, blind.missing) == (0, [], 3)


def test_a_popular_prefix_does_not_fill_one_replica() -> None:
    """8 slots a replica: up to two requests more than in the other one for the sake of a prefix."""
    harness = Harness(make_config(max_num_seqs=16))
    assert add(harness, "first", max_tokens=1) == 0
    while "first" not in harness.reasons:
        harness.step()
    for index in range(12):
        add(harness, str(index), max_tokens=40)
        counts = [list(homes(harness).values()).count(replica) for replica in (0, 1)]
        assert counts[0] - counts[1] <= 3
    assert counts == [7, 5] or counts == [6, 6]
    # The other replica computed the prompt itself once, and has it from then on.
    assert harness.scheduler.prefix_hits >= 10 * 8
    harness.finish_all()


def test_full_slots_send_a_request_elsewhere_whatever_is_cached() -> None:
    harness = Harness(make_config(max_num_seqs=2))
    assert add(harness, "first", max_tokens=1) == 0
    while "first" not in harness.reasons:
        harness.step()
    assert add(harness, "second") == 0
    assert add(harness, "third") == 1
    harness.add(make_request("fourth", PROMPT, max_tokens=5))
    harness.step()
    assert "fourth" not in homes(harness) and harness.scheduler.num_waiting == 1
    harness.finish_all()


def test_every_replica_fills_its_own_lane() -> None:
    """Prompts of both replicas enter at the same ticks, and rows lie in their own replica's groups."""
    harness = Harness(make_config(stages=2, prefill_chunk=4))
    for index in range(2):
        prompt = (*PROMPT[:-1], 50 + index)
        harness.add(make_request(str(index), prompt, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        harness.step()
    lanes = [[chunk and (chunk.slot, chunk.start) for chunk in plan.chunks] for plan in harness.plans]
    assert lanes[:2] == [[(0, 0), (0, 4), (4, 0), (4, 4)], [(0, 8), None, (4, 8), None]]
    assert [len(plan.chunks) for plan in harness.plans[2:]] == [0] * 2
    assert harness.plans[-1].rows == ((0,), (-1,), (4,), (-1,))
    harness.finish_all()


def test_a_request_takes_pages_from_its_own_replica_only() -> None:
    """One replica is short of pages and preempts the later of its two; the other goes on undisturbed."""
    harness = Harness(make_config(num_pages=13, max_num_seqs=4, enable_prefix_caching=False))
    assert add(harness, "a", PROMPT) == 0
    assert add(harness, "b", tuple(range(30, 50))) == 1
    assert add(harness, "c", PROMPT[1:]) == 0
    while harness.scheduler.num_preemptions == 0:
        assert harness.step()
    assert set(homes(harness)) >= {"a", "b"}, "not the one that arrived last of all, but of its replica"
    assert homes(harness).get("c", 1) == 1
    harness.finish_all()


def test_what_does_not_fit_one_replica_is_refused() -> None:
    """Twice the pages are there, and of no use: a request lies in one replica."""
    harness = Harness(make_config(num_pages=8))
    with pytest.raises(ValueError, match="8 KV pages of 4 tokens"):
        harness.add(make_request("long", PROMPT, max_tokens=30))
    harness.add(make_request("fits", PROMPT, max_tokens=22))
    harness.finish_all()


def test_all_replicas_work_in_steady_decode() -> None:
    harness = Harness(make_config(stages=2, max_rounds=4))
    for index in range(4):
        harness.add(make_request(str(index), PROMPT[: 3 + index], max_tokens=50, ignore_eos=True))
    for _ in range(8):
        harness.step()
    ring = harness.ring
    before = (ring.useful_ticks, ring.ticks)
    for _ in range(4):
        harness.step()
    assert ring.useful_ticks - before[0] == ring.ticks - before[1] > 0
    harness.finish_all()


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    data=st.integers(2, 4),
    slots=st.integers(1, 4),
    num_pages=st.sampled_from((8, 12, 40)),
    seed=st.integers(0, 99),
)
def test_crowds_are_served_in_order_and_evenly(data: int, slots: int, num_pages: int, seed: int) -> None:
    """Whoever comes first starts first (the harness checks it), and no replica idles while somebody waits."""
    config = make_config(data=data, max_num_seqs=data * slots, num_pages=num_pages, max_model_len=32)
    harness = Harness(config, seed=seed)
    for index in range(3 * data * slots):
        # Unlike beginnings: nothing but slots and pages decides.
        prompt = (index + 20, *reference((seed, index), index, 11, 1 + (seed + 5 * index) % 12))
        harness.add(make_request(str(index), prompt, seed=index, max_tokens=1 + (index * seed) % 17))
    replicas = harness.scheduler._replicas
    while (plan := harness.dispatch()) is not None or harness.outstanding:
        if plan is not None and harness.scheduler.num_waiting and num_pages == 40:  # enough for all slots
            assert {replicas.running(i) for i in range(data)} == {slots}
        if plan is None or len(harness.outstanding) >= harness.depth:
            harness.read_back()
    harness.finish_all()


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.data())
def test_cached_prefixes_are_found_in_whichever_replica_they_are(data: st.DataObject) -> None:
    """One request at a time, so all are empty: each finds the longest prefix that any of them has."""
    config = make_config(data=data.draw(st.integers(2, 3)), max_num_seqs=12, num_pages=64)
    harness = Harness(config)
    said: list[tuple[int, ...]] = []
    for index in range(data.draw(st.integers(2, 8))):
        length = data.draw(st.integers(2, 20))
        prompt = prompt_of_family(data.draw(st.integers(0, 2)), length, data.draw(st.integers(0, 2)))
        pools = harness.scheduler._replicas.pools
        best = max(4 * len(pool.match(prompt)) for pool in pools)
        before = harness.scheduler.prefix_hits
        harness.add(make_request(str(index), prompt, seed=index, max_tokens=data.draw(st.integers(1, 9))))
        harness.finish_all()
        assert harness.scheduler.prefix_hits - before == best
        said.append(prompt)
    assert len(harness.admitted) == len(said)
