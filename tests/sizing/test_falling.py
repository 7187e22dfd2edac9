"""A whole function at a falling size: the next one by bytes, what has run never passed over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from brim.sizing.falling import FallingSizer
from brim.sizing.sizer import Trial

GIB = 2**30


def failed(size: int, *, needed: int | None = None, progress: float | None = None) -> Trial:
    return Trial(size=size, verdict="oom", needed_bytes=needed, progress=progress)


def test_without_any_bytes_a_size_halves() -> None:
    sizer = FallingSizer(first=128)
    sizes = [sizer.next_size()]
    while sizes[-1] > 0:
        sizer.record(failed(sizes[-1]))
        sizes.append(sizer.next_size())
    assert sizes == [128, 64, 32, 16, 8, 4, 2, 1, 0]


def test_bytes_far_above_the_limit_leap_to_what_can_fit() -> None:
    sizer = FallingSizer(first=1024)
    sizer.begin(limit_bytes=10 * GIB, resident_bytes=2 * GIB)
    sizer.record(failed(1024, needed=130 * GIB))
    assert sizer.next_size() == 64  # 1024 x 8 / 128


def test_a_late_failure_falls_a_little() -> None:
    sizer = FallingSizer(first=100)
    sizer.record(failed(100, progress=1.0))
    assert sizer.next_size() == 90
    sizer.record(failed(90, progress=0.7))
    assert sizer.next_size() == 62


def test_a_smaller_size_that_fails_at_the_same_place_falls_by_the_bytes_needed_there() -> None:
    sizer = FallingSizer(first=1000)
    sizer.begin(limit_bytes=10 * GIB)
    sizer.record(failed(1000, needed=30 * GIB, progress=0.1))
    assert sizer.next_size() == 333
    sizer.record(failed(333, needed=11 * GIB, progress=0.1))
    assert sizer.next_size() == 299  # a tenth less, not half


def test_a_smaller_size_that_fails_at_an_unknown_place_has_come_further_than_the_larger_one() -> None:
    sizer = FallingSizer(first=100)
    sizer.record(failed(100, progress=0.6))
    sizer.record(failed(60))
    assert sizer.next_size() == 54  # not half


def test_a_later_call_falls_to_what_the_bytes_of_a_size_that_ran_allow() -> None:
    sizer = FallingSizer(first=100)
    sizer.begin(limit_bytes=10 * GIB)
    sizer.record(Trial(size=100, peak_bytes=9 * GIB))
    sizer.begin(limit_bytes=5 * GIB)  # others have taken the rest
    sizer.record(failed(100))
    assert sizer.next_size() == 53  # 0.97 x 5 of 9


def test_bytes_that_are_wrong_twice_do_not_decide_how_far_a_size_falls() -> None:
    """A later call may be for longer texts: what ran before says nothing of it."""
    sizer = FallingSizer(first=100)
    sizer.begin(limit_bytes=10 * GIB)
    sizer.record(Trial(size=100, peak_bytes=GIB))
    sizer.begin_call()
    sizes = []
    for _ in range(4):
        sizer.record(failed(sizer.next_size()))
        sizes.append(sizer.next_size())
    assert sizes == [90, 45, 22, 11]


def test_a_higher_start_is_taken_only_if_asked_and_only_as_far_as_bytes_allow() -> None:
    plain, asked = FallingSizer(first=16), FallingSizer(first=16, ceiling=1000)
    for sizer in (plain, asked):
        sizer.begin(limit_bytes=10 * GIB, resident_bytes=GIB)
        sizer.begin_call()
        assert sizer.next_size() == 16  # nothing has run
        sizer.record(Trial(size=16, peak_bytes=2 * GIB))
        sizer.begin_call()
    assert plain.next_size() == 16
    assert asked.next_size() == 139  # 16 x 8.7 / 1


def test_a_higher_start_that_fails_returns_no_lower_than_what_has_run() -> None:
    sizer = FallingSizer(first=16, ceiling=20)
    sizer.begin(limit_bytes=10 * GIB)
    sizer.record(Trial(size=16, peak_bytes=4 * GIB))
    sizer.begin_call()
    assert sizer.next_size() == 20
    sizer.record(failed(20))
    assert 16 <= sizer.next_size() < 20


@given(
    st.integers(1, 4096),
    st.integers(1, 64 * GIB),
    st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1)), min_size=20, max_size=20),
)
def test_sizes_always_fall_and_end(first: int, limit: int, failures: list[tuple[int, float]]) -> None:
    sizer = FallingSizer(first=first)
    sizer.begin(limit_bytes=limit)
    tries = 0
    while (size := sizer.next_size()) > 0:
        needed, progress = failures[tries % len(failures)]
        sizer.record(failed(size, needed=needed, progress=progress))
        assert sizer.next_size() < size
        tries += 1
    assert tries <= 80
