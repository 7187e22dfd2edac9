"""The sizer: grows while it pays, backs off on OOM, comes back without repeating a failure."""

from __future__ import annotations

import itertools
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from brim.sizing.constants import FORGIVING_BATCHES, QUIET_BATCHES
from brim.sizing.live import LiveSizer
from tests.trials import ran, ran_out, ran_short


def feed(sizer: LiveSizer, batches: int, *, overhead: float = 0.1, per_unit: float = 0.01) -> list[int]:
    """Run full batches whose time is affine in their cost; the caps they ran at."""
    caps = []
    for _ in range(batches):
        caps.append(sizer.size)
        ran(sizer, sizer.size, overhead + per_unit * sizer.size)
    return caps


def test_it_grows_while_that_pays_and_settles_at_the_knee() -> None:
    sizer = LiveSizer(first=2)
    caps = feed(sizer, 60)
    assert caps[0] == 2
    assert sizer.settled
    # at 256 a doubling brings 1.9 %, which is less than the 3 % that make it worthwhile
    assert sizer.size == 256
    assert max(caps) == 512


def test_small_gains_of_several_doublings_can_be_compared_together() -> None:
    """A rate that rises by 2.5 % with each doubling, up to a ceiling of 256."""
    for looks_far, cap in ((False, 8), (True, 256)):
        sizer = LiveSizer(first=8, ceiling=256, compares_far=looks_far)
        for _ in range(40):
            ran(sizer, sizer.size, sizer.size / 1.025 ** math.log2(sizer.size))
        assert sizer.settled
        assert sizer.size == cap


def test_a_far_trial_keeps_a_reserve_and_is_undone_without_a_gain() -> None:
    sizer = LiveSizer(first=8, compares_far=True, limit_bytes=1000)
    caps = []
    for _ in range(40):
        caps.append(sizer.size)
        ran(sizer, sizer.size, sizer.size / 100, peak_bytes=sizer.size)
    assert max(caps) == 850
    assert caps.count(850) == 2
    assert (sizer.settled, sizer.size) == (True, 8)


def test_it_leaps_while_a_batch_takes_as_long_as_a_smaller_one() -> None:
    sizer = LiveSizer(first=2)
    caps = feed(sizer, 5, overhead=1.0, per_unit=1e-6)
    assert caps == [2, 4, 16, 64, 256]  # two small ones first


def test_it_does_not_leap_when_time_rises_with_size() -> None:
    sizer = LiveSizer(first=2)
    caps = feed(sizer, 12, overhead=0.01, per_unit=0.01)
    assert max(b / a for a, b in itertools.pairwise(caps)) <= 2


def test_a_flat_rate_keeps_the_first_cap() -> None:
    sizer = LiveSizer(first=4)
    feed(sizer, 20, overhead=0.0)
    assert sizer.size == 4


def test_batches_overlap_once_the_climb_has_ended() -> None:
    sizer = LiveSizer(first=2)
    assert not sizer.overlaps
    feed(sizer, 60)
    assert sizer.overlaps


def test_a_drifting_rate_is_not_attributed_to_a_larger_size() -> None:
    sizer = LiveSizer(first=64)
    speed = 1.0
    for _ in range(200):
        speed *= 1.02  # items get cheaper from batch to batch
        ran(sizer, sizer.size, sizer.size / (100 * speed))
    assert sizer.size <= 128  # a comparison of now with then would have doubled for ever


def test_much_cheaper_items_are_a_reason_to_search_again() -> None:
    sizer = LiveSizer(first=2)

    def seconds(cap: int, costliest: int) -> float:
        return (0.01 if costliest > 100 else 1.0) + 0.01 * cap  # for short items the constant part matters

    def run(costliest: int) -> int:
        for _ in range(80):
            ran(sizer, sizer.size, seconds(sizer.size, costliest), costliest=costliest)
        return sizer.size

    long = run(1000)
    assert run(900) == long  # not much cheaper: nothing moves
    assert run(90) >= 4 * long


def test_a_known_cap_is_the_start_and_may_grow_for_cheaper_items() -> None:
    sizer = LiveSizer(first=64, known=True)
    assert sizer.settled
    assert sizer.overlaps
    for _ in range(10):
        ran(sizer, 64, 1.0, costliest=500)
    assert sizer.size == 64
    ran(sizer, 64, 1.0, costliest=200)
    assert sizer.phase == "comparing"


def test_a_given_size_is_never_compared_with_others() -> None:
    sizer = LiveSizer(first=64, ceiling=64, grows=False)
    for costliest in (500, 100, 10):
        ran(sizer, 64, 1.0, costliest=costliest)
    assert sizer.size == 64
    assert sizer.settled


def test_the_ceiling_is_never_passed() -> None:
    sizer = LiveSizer(first=2, ceiling=50)
    assert max(feed(sizer, 60)) == 50


def test_the_byte_model_stops_the_growth_before_the_limit() -> None:
    sizer = LiveSizer(first=2, limit_bytes=1_000)
    for _ in range(40):
        assert 100 + 10 * sizer.size <= 1_000
        ran(sizer, sizer.size, 1.0, peak_bytes=100 + 10 * sizer.size)
    assert sizer.size >= 80


def test_a_failure_halves_the_cap_and_the_failed_cost_is_not_repeated() -> None:
    sizer = LiveSizer(first=64, grows=False)
    ran_out(sizer, 64)
    assert sizer.size == 32
    caps = feed(sizer, FORGIVING_BATCHES - 1)
    assert max(caps) < 64
    assert max(caps) > 48  # it did grow back towards it


def test_it_waits_for_quiet_before_it_grows_back() -> None:
    sizer = LiveSizer(first=64, grows=False)
    ran_out(sizer, 64)
    caps = feed(sizer, QUIET_BATCHES)
    assert set(caps) == {32}
    assert sizer.size > 32


def test_a_long_quiet_stretch_lets_it_return_to_the_ceiling_step_by_step() -> None:
    sizer = LiveSizer(first=64, ceiling=64, grows=False)
    ran_out(sizer, 64)
    caps = feed(sizer, 10 * FORGIVING_BATCHES)
    assert sizer.size == 64
    first_return = caps.index(64)
    assert first_return > FORGIVING_BATCHES
    assert max(caps[:first_return]) < 64


def test_an_item_that_fits_nowhere_does_not_make_the_others_run_alone() -> None:
    sizer = LiveSizer(first=8, ceiling=8, grows=False)
    for size in (8, 4, 2):
        ran_out(sizer, size)
    sizer.blame_item()
    assert sizer.size == 8
    for size in (8, 4, 2):  # the next one, too: it is not an exception
        ran_out(sizer, size)
    sizer.blame_item()
    assert sizer.size == 1
    ran(sizer, 1, 1.0)
    ran_out(sizer, 1)
    sizer.blame_item()
    assert sizer.size == 1


def test_a_small_last_batch_does_not_move_the_cap() -> None:
    sizer = LiveSizer(first=64)
    ran(sizer, 3, 10.0)
    assert sizer.size == 64
    assert not sizer.settled


@given(st.lists(st.one_of(st.just("oom"), st.floats(0.001, 10.0)), max_size=200), st.integers(1, 1000))
def test_the_cap_is_always_a_positive_whole_number(events: list[str | float], first: int) -> None:
    sizer = LiveSizer(first=first, ceiling=5_000)
    for event in events:
        before = sizer.size
        if event == "oom":
            ran_out(sizer, sizer.size)
            assert sizer.size < before or before == 1
        else:
            ran(sizer, sizer.size, float(event))
        assert isinstance(sizer.size, int)
        assert 1 <= sizer.size <= 5_000


def test_towards_a_given_size_it_rises_at_once_as_far_as_the_bytes_allow() -> None:
    sizer = LiveSizer(first=8, ceiling=64, grows=False, limit_bytes=1000)
    assert not sizer.overlaps
    ran(sizer, 8, 1.0, peak_bytes=200)  # 25 each, if nothing is resident: 38 fit into 97 % of the limit
    assert sizer.size == 38
    ran(sizer, 38, 1.0, peak_bytes=650)  # 15 each, and 80 are resident: the whole ceiling will not fit
    assert sizer.size == 59
    assert not sizer.settled
    ran(sizer, 59, 1.0, peak_bytes=965)
    assert sizer.settled
    assert sizer.overlaps


def test_without_bytes_it_rises_twofold_and_ends_at_the_size_given() -> None:
    sizer = LiveSizer(first=12, ceiling=64, grows=False)
    caps = feed(sizer, 5)
    assert caps == [12, 24, 48, 64, 64]
    assert sizer.settled


def test_after_a_failed_rise_growth_stays_below_the_failure() -> None:
    sizer = LiveSizer(first=16, ceiling=64, grows=False)
    ran(sizer, 16, 1.0)
    assert sizer.size == 32
    ran_out(sizer, 32)
    caps = feed(sizer, 6 * QUIET_BATCHES)
    assert caps[0] == 16
    assert 16 < max(caps) < 32


def test_a_size_found_for_something_similar_is_compared_with_twice_as_much() -> None:
    fast = LiveSizer(first=256, likely=True)
    assert fast.phase == "comparing"
    feed(fast, 6)
    assert fast.settled
    assert fast.size == 256  # a doubling brings 1.9 %
    slow = LiveSizer(first=16, likely=True)
    feed(slow, 40)
    assert slow.size == 256


def test_only_equal_shares_of_a_window_are_tried() -> None:
    """A window of 96 is cut into equal parts in the end: 64 and a rest of 32 would never be run."""
    seen = set()
    sizer = LiveSizer(first=2, ceiling=96, shares_of=96, compares_far=True)
    for _ in range(60):
        seen.add(sizer.size)
        ran(sizer, sizer.size, 0.1 + 0.01 * sizer.size)
    assert seen <= {-(-96 // parts) for parts in range(1, 97)}
    assert sizer.settled


@given(window=st.integers(1, 500), fast=st.floats(0.001, 1.0), steady=st.booleans())
def test_shares_never_keep_it_from_settling(window: int, fast: float, steady: bool) -> None:
    sizer = LiveSizer(first=min(2, window), ceiling=window, shares_of=window, compares_far=True, steady=steady)
    for _ in range(200):
        assert 1 <= sizer.size <= window
        ran(sizer, sizer.size, fast + 0.01 * sizer.size)
    assert sizer.settled
    assert sizer.size in {-(-window // parts) for parts in range(1, window + 1)} | {min(2, window)}


def test_a_size_that_ran_short_of_memory_is_not_come_back_to() -> None:
    sizer = LiveSizer(first=16, ceiling=96, known=True)
    ran_short(sizer, 16)
    assert sizer.size == 14
    for _ in range(5 * FORGIVING_BATCHES):
        ran(sizer, 14, 0.1)
    assert sizer.size == 14
    assert sizer.settled


def test_after_one_batch_growth_is_bounded_by_a_line() -> None:
    """As a value of a knob starts: at a size found before, with one batch of its own to judge by."""
    sizer = LiveSizer(first=22_638, likely=True, limit_bytes=12_288)
    sizer.evidence.bytes.base_bytes = 2_100
    ran(sizer, 22_638, 1.0, 9_606)
    assert 22_638 < sizer.size < 30_000  # twice as much ran out of memory
    unknown = LiveSizer(first=22_638, likely=True, limit_bytes=12_288)
    ran(unknown, 22_638, 1.0, 9_606)
    assert unknown.size == 45_276


def test_it_does_not_grow_back_to_what_the_bytes_say_will_not_fit() -> None:
    sizer = LiveSizer(first=36_630, known=True, limit_bytes=12_288)
    sizer.evidence.bytes.base_bytes = 2_100
    ran_out(sizer, 36_630)
    for _ in range(FORGIVING_BATCHES - 1):
        ran(sizer, sizer.size, 1.0, round(2_100 + sizer.size * 0.4))
    assert 18_315 < sizer.size <= (0.97 * 12_288 - 2_100) / 0.4


def test_where_rates_are_steady_every_size_is_passed_once() -> None:
    """The same knee as elsewhere, without going back to what has been seen."""
    sizer = LiveSizer(first=2, steady=True)
    caps = feed(sizer, 20)
    sizes = [cap for cap, _ in itertools.groupby(caps)]
    assert sizes == [2, 4, 16, 32, 64, 128, 256, 512, 256]
    assert caps.count(512) == 2  # twice looked at, before it is given up
    assert sizer.settled


def test_a_climb_that_ends_below_the_last_size_is_kept() -> None:
    sizer = LiveSizer(first=8, steady=True)
    for _ in range(6):
        ran(sizer, sizer.size, 1.0 if sizer.size <= 16 else sizer.size / 16)
    assert (sizer.settled, sizer.size) == (True, 16)


def test_a_rate_seen_while_the_host_was_busy_refuses_nothing() -> None:
    """Twice the size looks no faster at first, but by then this size is faster than it was: it is looked at again."""
    sizer = LiveSizer(first=16, ceiling=32, likely=True, steady=True)
    ran(sizer, 16, 0.30)
    ran(sizer, 32, 0.60)
    ran(sizer, 32, 0.60)
    while not sizer.settled and sizer.size == 32:
        ran(sizer, 32, 0.60)
    assert (sizer.size, sizer.settled) == (16, False)
    ran(sizer, 16, 0.24)
    assert sizer.size == 32
    ran(sizer, 32, 0.45)
    assert (sizer.size, sizer.settled) == (32, True)


def test_early_in_a_run_a_larger_size_gets_more_trials() -> None:
    """Pauses of the host fall on any batch: two in a row are no reason to stay small for the whole run."""
    quick = LiveSizer(first=4, ceiling=16, likely=True, steady=True)
    for seconds in (0.05, 0.25, 0.25, 0.08):
        ran(quick, quick.size, seconds)
    assert quick.kept == 8
    slow = LiveSizer(first=4, ceiling=16, likely=True, steady=True)
    for seconds in (5.0, 25.0, 25.0, 5.0):
        ran(slow, slow.size, seconds)
    assert (slow.kept, slow.settled) == (4, True)


def test_what_a_small_batch_takes_after_a_large_one_is_not_its_own() -> None:
    """The allocator still holds what the large one took: taken for the small one's, it would forbid all growth."""
    sizer = LiveSizer(first=32, likely=True, limit_bytes=132)
    sizer.evidence.observe_bytes(4, 6)
    sizer.evidence.observe_bytes(32, 46)
    sizer.evidence.observe_bytes(14, 46)  # the rest of a window
    ran(sizer, 32, 1.0, 46)
    assert sizer.evidence.bytes.points == [(4, 6), (32, 46)]
    assert sizer.size == 64
    sizer.evidence.cache_given_back()
    sizer.evidence.observe_bytes(14, 20)
    assert (14, 20) in sizer.evidence.bytes.points


def test_a_trial_that_fails_costs_nothing_of_what_is_known_to_run() -> None:
    sizer = LiveSizer(first=30, likely=True, ceiling=55)
    ran(sizer, 30, 1.0)
    assert sizer.size == 55
    ran_out(sizer, 55)
    assert sizer.size == 30
    for _ in range(QUIET_BATCHES):
        ran(sizer, 30, 1.0)
    assert sizer.size == 42, "half-way to what failed"
    ran_out(sizer, 42)
    assert sizer.size == 30
    ran_out(sizer, 30)
    assert sizer.size == 15


def test_a_size_that_has_run_before_it_fails_is_halved() -> None:
    sizer = LiveSizer(first=64, known=True)
    ran_out(sizer, 64)
    for _ in range(QUIET_BATCHES):
        ran(sizer, sizer.size, 1.0)
    assert sizer.size == 48
    ran(sizer, 48, 1.0)
    ran_out(sizer, 48)
    assert sizer.size == 24


def test_a_size_on_trial_comes_down_to_what_the_bytes_allow_by_now() -> None:
    sizer = LiveSizer(first=32, ceiling=128, shares_of=128, likely=True)
    ran(sizer, 32, 1.0)
    assert sizer.size == 64
    sizer.keep_within(80)
    assert sizer.size == 64
    sizer.keep_within(48)
    assert sizer.size == 43, "a third of the window"
    sizer.keep_within(40)
    assert (sizer.settled, sizer.size) == (True, 32), "nothing is left to be tried"


# ------------------------------------------------------------------------------------------------- other processes

LIMIT = 1000


def taken_by_others(sizer: LiveSizer, left_bytes: int) -> None:
    """Batches fail down to one, while other processes leave so much."""
    while sizer.size > 1:
        sizer.note_others(left_bytes)
        ran_out(sizer, sizer.size)


def test_the_size_returns_once_other_processes_free_memory() -> None:
    sizer = LiveSizer(first=512, ceiling=512, grows=False, limit_bytes=LIMIT)
    taken_by_others(sizer, 10)
    assert (sizer.size, sizer.disturbed) == (1, True)
    assert not sizer.return_after_others(500)  # half of it is not enough
    assert sizer.size == 1
    assert sizer.return_after_others(LIMIT)
    assert (sizer.size, sizer.disturbed) == (512, False)
    assert set(feed(sizer, 100)) == {512}


def test_a_failure_of_its_own_keeps_its_caution_whatever_others_do_later() -> None:
    for left in (LIMIT, None):  # they leave all that sizes are chosen for, or that cannot be read
        sizer = LiveSizer(first=512, ceiling=512, grows=False, limit_bytes=LIMIT)
        sizer.note_others(left)
        ran_out(sizer, 512)
        assert not sizer.disturbed
        assert not sizer.return_after_others(2 * LIMIT)
        assert sizer.size == 256
        assert max(feed(sizer, FORGIVING_BATCHES - 1)) < 512


def test_a_size_that_fails_again_after_its_return_is_halved_and_marked() -> None:
    sizer = LiveSizer(first=512, ceiling=512, grows=False, limit_bytes=LIMIT)
    taken_by_others(sizer, 10)
    sizer.return_after_others(LIMIT)
    sizer.note_others(LIMIT)
    ran_out(sizer, 512)
    assert sizer.size == 256
    assert not sizer.disturbed


def test_others_that_come_and_go_are_believed_more_and_more_slowly() -> None:
    sizer = LiveSizer(first=512, ceiling=512, grows=False, limit_bytes=LIMIT)
    readings = []
    for _ in range(5):
        taken_by_others(sizer, 10)
        readings.append(next(n for n in itertools.count(1) if sizer.return_after_others(LIMIT)))
    assert readings == [1, 2, 4, 8, 16]


def test_a_search_that_others_have_disturbed_continues_where_it_was() -> None:
    calm, disturbed = LiveSizer(first=2, limit_bytes=10**9), LiveSizer(first=2, limit_bytes=10**9)
    for sizer in (calm, disturbed):
        feed(sizer, 4)
    taken_by_others(disturbed, 10)
    restored = LiveSizer(first=2, limit_bytes=10**9)
    restored.restore(json.loads(json.dumps(disturbed.to_json(), allow_nan=False)))
    assert restored.return_after_others(10**9)
    assert (restored.size, restored.phase) == (calm.size, calm.phase)
    assert feed(restored, 60)[-1] == feed(calm, 60)[-1]
