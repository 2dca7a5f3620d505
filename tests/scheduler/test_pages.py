"""The page pool and the keys of the prefix cache, without a scheduler."""

import pytest

from mtp_jax.scheduler.pages import ROOT, PagePool

TEXT = (5, 6, 7, 8, 9, 10, 11, 12, 13)


def make_pool(num_pages: int = 4, *, caching: bool = True) -> PagePool:
    return PagePool(num_pages, 4, enable_prefix_caching=caching)


def register_text(pool: PagePool, tokens: tuple[int, ...], pages: list[int]) -> list[int]:
    """Registers `pages` as the whole pages of `tokens`; returns the serials."""
    serials, parent = [], ROOT
    for index, page in enumerate(pages):
        start = 4 * index
        parent = pool.register(parent, tokens[start : start + 4], tokens[start + 4], page)
        serials.append(parent)
    return serials


def test_a_page_matches_only_before_the_same_next_token():
    pool = make_pool()
    pages = pool.allocate(1)
    register_text(pool, TEXT, pages)
    assert pool.match((5, 6, 7, 8, 9)) == pages
    assert pool.match((5, 6, 7, 8, 0)) == []  # same page of tokens, but the MTP layer saw a 9 after it
    assert pool.match((5, 6, 7, 8)) == []  # nothing would be left to compute


def test_a_page_matches_only_after_the_same_pages():
    pool = make_pool()
    register_text(pool, TEXT, pool.allocate(2))
    other = (0, 0, 0, 0, *TEXT[4:])
    assert len(pool.match(TEXT)) == 2
    assert pool.match(other) == []


def test_match_leaves_at_least_one_token():
    pool = make_pool()
    pages = pool.allocate(2)
    register_text(pool, TEXT, pages)
    lengths = {length: len(pool.match(TEXT[:length])) for length in range(1, 10)}
    assert lengths == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1, 7: 1, 8: 1, 9: 2}


def test_second_computation_of_a_page_stays_private():
    pool = make_pool()
    first, second = pool.allocate(2)
    serial = pool.register(ROOT, TEXT[:4], 9, first)
    assert pool.register(ROOT, TEXT[:4], 9, second) == serial
    assert pool.match(TEXT[:5]) == [first]
    pool.release([first])
    pool.release([second])
    assert not pool.is_registered(second)
    assert pool.num_available == 4


def test_idle_pages_are_evicted_oldest_first_and_children_before_parents():
    pool = make_pool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    other = (1, 2, 3, 4, 1, 2, 3, 4, 1)
    register_text(pool, TEXT, old)
    register_text(pool, other, new)
    pool.release(old)
    pool.release(new)
    assert pool.num_held == 0 and pool.num_available == 4
    sizes = []
    for _ in range(4):
        pool.allocate(1)
        sizes.append((len(pool.match(TEXT)), len(pool.match(other))))
    assert sizes == [(1, 2), (0, 2), (0, 1), (0, 0)]


def test_a_match_protects_its_pages_from_eviction():
    pool = make_pool(4)
    pages = pool.allocate(2)
    register_text(pool, TEXT, pages)
    pool.release(pages)
    pool.share(pages)
    assert pool.num_available == 2
    assert not set(pool.allocate(2)) & set(pages)
    assert pool.match(TEXT) == pages


def test_children_of_an_evicted_parent_never_match_another_text():
    """A page id that comes back as a parent must not revive the children of its former content."""
    pool = make_pool(3)
    parent, child = pool.allocate(2)
    register_text(pool, TEXT, [parent, child])
    pool.release([parent])  # the holder of a twin of `parent` keeps the child alone
    (spare,) = pool.allocate(1)
    (again,) = pool.allocate(1)
    assert again == parent
    pool.register(ROOT, (0, 0, 0, 0), 9, again)
    assert pool.match((0, 0, 0, 0, *TEXT[4:])) == [again]
    assert pool.match(TEXT) == []
    pool.release([spare])


def test_caching_off_matches_nothing():
    pool = make_pool(caching=False)
    register_text(pool, TEXT, pool.allocate(1))
    assert pool.match(TEXT) == []


def test_pages_are_never_released_twice_or_overdrawn():
    pool = make_pool(2)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 pages asked of 0"):
        pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages[:1])
    with pytest.raises(AssertionError, match="is private"):
        pool.share(pages)
