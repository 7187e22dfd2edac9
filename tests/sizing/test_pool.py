"""How large a pool is: by bytes, under ceilings, after failures of its own and of others."""

from __future__ import annotations

from typing import Any

import pytest

from brim.sizing.constants import MOST_CHUNK_HALVINGS, MOST_POOL_FAILURES
from brim.sizing.pool import PoolNeeds, PoolSizer

LIMIT = 1_000_000
ITEMS = 100


def sizer(*, slots: int = 160, limit: int = LIMIT, **options: Any) -> PoolSizer:
    needs = PoolNeeds(
        slots=(slots,) * ITEMS, row_bytes=options.pop("row_bytes", 10), step_rows=options.pop("step_rows", None)
    )
    ceilings = {"most_rows": None, "most_slots": None, **options}
    return PoolSizer(needs, limit_bytes=limit, resident_bytes=100_000, **ceilings)


def measured(one: PoolSizer, *, slot_bytes: int = 20, beside: int = 50_000) -> PoolSizer:
    one.record(slots=200, slot_bytes=slot_bytes, peak_bytes=100_000 + beside + 200 * slot_bytes)
    return one


def test_all_items_have_room_where_memory_allows_it() -> None:
    found = measured(sizer()).size
    assert (found.rows, found.slots) == (ITEMS, 160 * ITEMS)


def test_slots_are_what_the_limit_leaves_beside_weights_chunks_and_rows() -> None:
    found = measured(sizer(), slot_bytes=100).size
    assert found.slots < 160 * ITEMS
    used = 100_000 + 50_000 + ITEMS * 10 + found.slots * 100
    assert 0.85 * LIMIT < used <= LIMIT


@pytest.mark.parametrize("ceiling", [1, 7])
def test_a_ceiling_on_rows_is_kept_and_takes_their_room_only(ceiling: int) -> None:
    found = measured(sizer(most_rows=ceiling)).size
    assert (found.rows, found.slots) == (ceiling, 160 * ceiling)


def test_a_ceiling_on_slots_leaves_room_for_the_costliest() -> None:
    assert measured(sizer(most_slots=400)).size.slots == 400
    assert measured(sizer(most_slots=1)).size.slots == 160


def test_steps_of_a_fixed_number_of_rows_take_their_memory_however_few_items_there_are() -> None:
    few, fixed = (measured(sizer(most_rows=2, slots=50_000, step_rows=rows, row_bytes=1000)) for rows in (None, 64))
    assert (few.size.rows, fixed.size.rows) == (2, 2)
    assert few.size.slots - fixed.size.slots == pytest.approx((64 - 2) * 1000 / 20, abs=1)


def test_every_failure_leaves_less_until_it_is_hopeless() -> None:
    one = measured(sizer(), slot_bytes=100)
    sizes = []
    while not one.hopeless:
        sizes.append(one.size.slots)
        one.record_failure()
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) <= MOST_POOL_FAILURES


def test_a_failure_leaves_three_quarters_of_the_room_beside_the_weights() -> None:
    """Not of the limit: weights may take more than that of it."""
    needs = PoolNeeds(slots=(160,) * ITEMS, row_bytes=1)
    one = PoolSizer(needs, limit_bytes=LIMIT, resident_bytes=800_000)
    one.record(slots=200, slot_bytes=20, peak_bytes=800_000 + 200 * 20)
    before = one.size.slots
    one.record_failure()
    assert not one.hopeless
    assert one.size.slots == pytest.approx(0.75 * before, rel=0.01)


def test_an_item_that_does_not_fit_is_hopeless() -> None:
    assert measured(sizer(slots=50_000), slot_bytes=100).hopeless


class TestOthers:
    def test_room_returns_when_they_are_gone(self) -> None:
        one = measured(sizer(), slot_bytes=100)
        before = one.size
        one.record_failure(LIMIT // 2)
        assert one.disturbed
        assert one.size.slots < before.slots
        assert not one.return_after_others(LIMIT // 2)
        assert one.return_after_others(LIMIT)
        assert (one.disturbed, one.size) == (False, before)

    def test_its_own_failures_stay(self) -> None:
        one = measured(sizer(), slot_bytes=100)
        one.record_failure(LIMIT)
        one.record_failure(LIMIT // 2)
        assert one.return_after_others(LIMIT)
        assert one.failures == 1
        assert not one.return_after_others(LIMIT)

    @pytest.mark.parametrize("left", [None, LIMIT])
    def test_where_nobody_else_is_seen_nothing_is_expected_back(self, left: int | None) -> None:
        one = measured(sizer())
        one.record_failure(left)
        assert not one.disturbed

    def test_each_return_takes_twice_as_many_readings(self) -> None:
        one = measured(sizer())
        counts = []
        for _ in range(4):
            one.record_failure(0)
            counts.append(next(count for count in range(1, 100) if one.return_after_others(LIMIT)))
        assert counts == [1, 2, 4, 8]


class TestChunks:
    def test_those_that_leave_too_little_are_halved_and_measured_again(self) -> None:
        one = measured(sizer(), slot_bytes=100, beside=700_000)
        assert one.crowded
        one.halve_chunks()
        assert not one.measured
        assert one.first_size(100).halvings == 1
        assert not measured(one, slot_bytes=100, beside=350_000).crowded
        assert one.failures == 0

    def test_nothing_is_halved_where_all_that_is_wanted_fits(self) -> None:
        assert not measured(sizer(slots=16), beside=700_000).crowded

    def test_they_are_halved_a_few_times_only(self) -> None:
        one = sizer()
        for _ in range(MOST_CHUNK_HALVINGS):
            assert measured(one, slot_bytes=100, beside=850_000).crowded
            one.halve_chunks()
        assert not measured(one, slot_bytes=100, beside=850_000).crowded
        assert one.hopeless

    def test_a_first_chunk_that_fails_is_halved_and_the_pool_is_as_large(self) -> None:
        usual, failed = measured(sizer(), slot_bytes=100), sizer()
        failed.record_failure()
        assert measured(failed, slot_bytes=100).size.slots == usual.size.slots
        assert failed.size.halvings == 1
        failed.record_failure()
        assert failed.size.slots < usual.size.slots
