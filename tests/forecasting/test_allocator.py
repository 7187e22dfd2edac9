"""The simulated allocator follows torch's rules, and keeps its invariants whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.forecasting.allocator import (
    FREE,
    AllocatorSettings,
    OutOfSimulatedMemoryError,
    make_allocator,
    replay,
    round_request,
)

KIB, MIB = 2**10, 2**20

Requests = list[tuple[int, int]]


def run(*requests: int, **settings) -> tuple[int, int]:
    """Allocate all of them; peak allocated and reserved."""
    result = replay(range(len(requests)), requests, AllocatorSettings(**settings))
    return result.peak_allocated_bytes, result.peak_reserved_bytes


@pytest.mark.parametrize(("request_bytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)])
def test_requests_round_up_to_512_bytes(request_bytes: int, rounded: int) -> None:
    assert round_request(request_bytes) == rounded
    assert run(request_bytes)[0] == rounded


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [
        (100, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB), (31 * MIB, 32 * MIB),
    ],
)  # fmt: skip
def test_a_request_gets_the_segment_of_its_class(request_bytes: int, segment: int) -> None:
    assert run(request_bytes)[1] == segment


def test_small_requests_share_a_segment() -> None:
    assert run(*[512 * KIB] * 4) == (2 * MIB, 2 * MIB)
    assert run(*[512 * KIB] * 5) == (5 * 512 * KIB, 4 * MIB)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    # 12 MiB are reserved for 11.5: the half that is left over goes with it, and counts as allocated.
    assert run(11 * MIB + 512 * KIB) == (12 * MIB, 12 * MIB)
    assert run(3 * MIB, 3 * MIB) == (6 * MIB, 20 * MIB)
    # A free 20 MiB block gives 18.5 MiB and keeps the rest; 19 MiB take it whole.
    after = replay([0, 0, 1], [9 * MIB, FREE, 19 * MIB])
    assert after.granted == (9 * MIB, 0, 20 * MIB)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    blocks = [0, 1, 2, 0, 1, 2, 3]
    requests = [40 * MIB, 30 * MIB, 50 * MIB, FREE, FREE, FREE, 29 * MIB]
    assert replay(blocks, requests).peak_reserved_bytes == 120 * MIB
    assert replay([*blocks, 4], [*requests, 50 * MIB]).peak_reserved_bytes == 120 * MIB
    assert replay([*blocks, 4], [*requests, 51 * MIB]).peak_reserved_bytes == 172 * MIB


def test_neighbours_merge_when_both_are_free() -> None:
    blocks, requests = [0, 1, 0, 1, 2], [4 * MIB, 4 * MIB, FREE, FREE, 18 * MIB]
    assert replay(blocks, requests).peak_reserved_bytes == 20 * MIB
    apart = replay([0, 1, 0, 2], [4 * MIB, 4 * MIB, FREE, 14 * MIB])
    assert apart.peak_reserved_bytes == 34 * MIB  # 12 and 4 MiB are free, not 16 in one piece


def test_cached_memory_is_given_back_and_the_request_tried_again() -> None:
    limited = replay([0, 0, 1], [30 * MIB, FREE, 40 * MIB], AllocatorSettings(limit_bytes=60 * MIB))
    assert (limited.fits, limited.retries, limited.peak_reserved_bytes) == (True, 1, 40 * MIB)
    free = replay([0, 0, 1], [30 * MIB, FREE, 40 * MIB])
    assert (free.retries, free.peak_reserved_bytes) == (0, 70 * MIB)


def test_a_split_segment_cannot_be_given_back() -> None:
    blocks, requests = [0, 0, 1, 2], [30 * MIB, FREE, 12 * MIB, 40 * MIB]
    stuck = replay(blocks, requests, AllocatorSettings(limit_bytes=60 * MIB))
    assert not stuck.fits
    assert stuck.retries == 1
    expandable = replay(blocks, requests, AllocatorSettings(limit_bytes=60 * MIB, expandable_segments=True))
    assert expandable.fits


def test_what_the_limit_refuses_after_all_is_out_of_memory() -> None:
    allocator = make_allocator(AllocatorSettings(limit_bytes=10 * MIB))
    with pytest.raises(OutOfSimulatedMemoryError):
        allocator.allocate(1, 11 * MIB)
    assert allocator.retries == 1
    assert allocator.allocate(2, 9 * MIB // 10) > 0  # it can still be used


def test_expandable_segments_reserve_pages_and_waste_less() -> None:
    assert run(21 * MIB, expandable_segments=True) == (21 * MIB, 40 * MIB)
    growing = [100 * MIB, 120 * MIB, 140 * MIB]
    blocks = [index for index in range(3) for _ in range(2)]
    requests = [value for request in growing for value in (request, FREE)]
    assert replay(blocks, requests).peak_reserved_bytes == 360 * MIB
    expandable = replay(blocks, requests, AllocatorSettings(expandable_segments=True))
    assert expandable.peak_reserved_bytes == 140 * MIB


def test_a_request_for_nothing_takes_nothing() -> None:
    result = replay([0, 1, 0, 1], [0, 512, FREE, FREE])
    assert result.peak_allocated_bytes == 512
    assert result.granted[0] == 0


def test_the_request_that_reached_the_peak_is_named() -> None:
    result = replay([0, 1, 0, 2], [5 * MIB, 3 * MIB, FREE, MIB])
    assert result.peak_index == 1
    assert replay([], []).peak_index == -1


@st.composite
def request_lists(draw: st.DrawFn) -> Requests:
    """Blocks taken and given back in any order, with sizes around the borders of every class."""
    sizes = st.one_of(
        st.integers(1, 4 * KIB), st.integers(MIB - 1024, MIB + 1024), st.integers(MIB, 12 * MIB),
        st.integers(8 * MIB, 100 * MIB),
    )  # fmt: skip
    live: list[int] = []
    requests: Requests = []
    for name in range(draw(st.integers(1, 60))):
        while live and draw(st.integers(0, 2)) == 0:
            requests.append((live.pop(draw(st.integers(0, len(live) - 1))), FREE))
        requests.append((name, draw(sizes)))
        live.append(name)
    return requests


either = st.booleans()


@given(request_lists(), either)
def test_reserved_covers_allocated_and_allocated_covers_the_requests(requests: Requests, expandable: bool) -> None:
    allocator = make_allocator(AllocatorSettings(expandable_segments=expandable))
    live: dict[int, int] = {}
    for name, size in requests:
        if size == FREE:
            allocator.free(name)
            del live[name]
        else:
            assert allocator.allocate(name, size) >= size
            live[name] = size
        assert allocator.reserved_bytes >= allocator.allocated_bytes >= sum(live.values())
        assert allocator.free_bytes == allocator.reserved_bytes - allocator.allocated_bytes
        assert allocator.peak_reserved_bytes >= allocator.reserved_bytes


@given(request_lists(), either)
def test_freeing_everything_leaves_whole_segments_that_can_be_given_back(requests: Requests, expandable: bool) -> None:
    allocator = make_allocator(AllocatorSettings(expandable_segments=expandable))
    live: set[int] = set()
    for name, size in requests:
        if size == FREE:
            allocator.free(name)
            live.discard(name)
        else:
            allocator.allocate(name, size)
            live.add(name)
    for name in live:
        allocator.free(name)
    assert allocator.allocated_bytes == 0
    assert allocator.free_bytes == allocator.reserved_bytes
    allocator.release_cached()
    assert allocator.reserved_bytes == 0
    assert allocator.free_bytes == 0


@given(request_lists(), either)
def test_a_limit_is_never_exceeded_and_a_wide_one_changes_nothing(requests: Requests, expandable: bool) -> None:
    blocks, sizes = zip(*requests, strict=True)
    free = replay(blocks, sizes, AllocatorSettings(expandable_segments=expandable))
    enough = 2 * free.peak_reserved_bytes + 20 * MIB
    wide = replay(blocks, sizes, AllocatorSettings(limit_bytes=enough, expandable_segments=expandable))
    assert wide == free
    tight_limit = free.peak_reserved_bytes - 1
    tight = replay(blocks, sizes, AllocatorSettings(limit_bytes=tight_limit, expandable_segments=expandable))
    assert tight.peak_reserved_bytes <= tight_limit
    assert tight.retries >= 1


@given(request_lists(), either)
def test_the_same_requests_give_the_same_answer(requests: Requests, expandable: bool) -> None:
    blocks, sizes = zip(*requests, strict=True)
    settings = AllocatorSettings(expandable_segments=expandable)
    assert replay(blocks, sizes, settings) == replay(blocks, sizes, settings)


def test_new_segments_lie_below_older_ones() -> None:
    # Two free blocks of 40 MiB, the older above: the newer one is taken first, so the older can be released whole.
    allocator = make_allocator()
    for name in (1, 2):
        allocator.allocate(name, 40 * MIB)
    for name in (1, 2):
        allocator.free(name)
    allocator.allocate(3, 30 * MIB)
    allocator.free(3)
    allocator.allocate(4, 40 * MIB)
    older = allocator.allocate(5, 40 * MIB)
    assert older == 40 * MIB
    addresses = [allocator._used[name][0].address for name in (4, 5)]
    assert addresses == sorted(addresses)
    assert addresses == [-128 * MIB, -64 * MIB]  # stretches of whole 32 MiB


def test_the_rest_of_an_address_range_serves_smaller_segments() -> None:
    allocator = make_allocator()
    for name, size in enumerate((20, 10, 14), start=1):  # 20 of 32 MiB, then 10 of the 12 left over; 14 do not fit
        allocator.allocate(name, size * MIB)
    assert [allocator._used[name][0].address // MIB for name in (1, 2, 3)] == [-32, -12, -64]


def test_released_addresses_are_taken_again() -> None:
    allocator = make_allocator()
    for name in (1, 2, 3):
        allocator.allocate(name, 32 * MIB)
    for name in (1, 2):
        allocator.free(name)
    allocator.release_cached()
    assert allocator.reserved_bytes == 32 * MIB
    allocator.allocate(4, 64 * MIB)  # both gaps, merged
    assert allocator._used[4][0].address == -64 * MIB
