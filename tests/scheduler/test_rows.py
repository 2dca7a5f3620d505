"""Rows: the emptiest group first, lowest row first, and moves that let a bucket shrink."""

from mtp_jax.scheduler.rows import RowTable

BUCKETS = (1, 2, 4)


def test_slots_spread_over_groups():
    rows = RowTable(2, 4)
    assert [rows.place(slot) for slot in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert rows.as_plan(4) == ((0, 2, 4, -1), (1, 3, -1, -1))
    rows.remove(2)
    rows.remove(0)
    assert rows.place(7) == (0, 0)
    assert rows.height == 3


def test_compaction_moves_high_rows_down_within_their_group():
    rows = RowTable(2, 4)
    for slot in range(6):
        rows.place(slot)
    rows.remove(0)
    rows.compact(BUCKETS)
    assert rows.as_plan(4) == ((-1, 2, 4, -1), (1, 3, 5, -1))  # group 1 has three, the bucket stays 4
    rows.remove(3)
    rows.compact(BUCKETS)
    assert rows.as_plan(2) == ((4, 2), (1, 5))
    assert rows.height == 2


def test_compaction_moves_nothing_where_the_bucket_stays():
    rows = RowTable(1, 4)
    for slot in range(4):
        rows.place(slot)
    rows.remove(1)
    rows.compact(BUCKETS)
    assert rows.as_plan(4) == ((0, -1, 2, 3),)


def test_removing_a_slot_without_a_row_is_harmless():
    rows = RowTable(1, 2)
    rows.remove(3)
    assert len(rows) == 0 and rows.height == 0
