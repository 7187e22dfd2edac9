"""How large a pool is: by what the first chunk took, and smaller after each failure."""

from __future__ import annotations

from brim.sizing.constants import MOST_CHUNK_HALVINGS, MOST_POOL_FAILURES, POOL_AFTER_FAILURE, POOL_LIMIT_FRACTION
from brim.sizing.pool import PoolNeeds, PoolSizer

LIMIT = 100_000


def sizer(slots: int = 1000, rows: int = 20) -> PoolSizer:
    return PoolSizer(PoolNeeds(slots=(slots,) * rows, row_bytes=1), limit_bytes=LIMIT, resident_bytes=10_000)


def test_slots_are_what_reading_leaves() -> None:
    found = sizer(slots=10_000)
    found.record(slots=100, slot_bytes=1, peak_bytes=30_100)
    assert found.size.slots == int(POOL_LIMIT_FRACTION * LIMIT) - 30_000 - found.rows
    assert not found.crowded
    assert not found.hopeless


def test_chunks_that_leave_too_little_are_halved_and_measured_again() -> None:
    found = sizer(slots=10_000)
    found.record(slots=100, slot_bytes=1, peak_bytes=80_100)
    assert found.crowded
    found.halve_chunks()
    assert not found.measured
    assert found.first_size(100).halvings == 1
    found.record(slots=100, slot_bytes=1, peak_bytes=45_100)
    assert not found.crowded


def test_chunks_are_not_halved_where_all_that_is_wanted_fits() -> None:
    found = sizer(slots=100)
    found.record(slots=100, slot_bytes=1, peak_bytes=80_100)
    assert not found.crowded


def test_chunks_are_halved_a_few_times_only() -> None:
    found = sizer(slots=10_000)
    for _ in range(MOST_CHUNK_HALVINGS):
        found.record(slots=100, slot_bytes=1, peak_bytes=95_100)
        assert found.crowded
        found.halve_chunks()
    found.record(slots=100, slot_bytes=1, peak_bytes=95_100)
    assert not found.crowded
    assert found.hopeless


def test_a_failure_before_anything_was_measured_makes_chunks_smaller_but_not_the_pool() -> None:
    found = sizer(slots=10_000)
    found.record_failure()
    found.record(slots=100, slot_bytes=1, peak_bytes=30_100)
    assert found.size.halvings == 1
    assert found.size.slots == int(POOL_LIMIT_FRACTION * LIMIT) - 30_000 - found.rows
    found.record_failure()
    assert not found.measured
    found.record(slots=100, slot_bytes=1, peak_bytes=30_100)
    assert found.size.halvings == 2
    assert found.size.slots == int(POOL_AFTER_FAILURE * POOL_LIMIT_FRACTION * LIMIT) - 30_000 - found.rows


def test_after_many_failures_there_is_no_hope() -> None:
    found = sizer()
    for _ in range(MOST_POOL_FAILURES):
        assert not found.hopeless
        found.record_failure()
    assert found.hopeless
