"""Sizes that were not traced come out as if they had been, request by request."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.forecasting.allocator import AllocatorSettings, replay
from brim.forecasting.extrapolate import SizeModel, _window
from brim.forecasting.overheads import AllocatorTimeline, Environment, make_timeline
from tests.forecasting.synthetic_traces import MIB, Writer, training_trace

AMPERE = Environment(compute_capability=(8, 0), torch_version=(2, 11))


def timeline(size: int, **trace) -> AllocatorTimeline:
    return make_timeline(training_trace(size, **trace), AMPERE)


def model(*sizes: int, **trace) -> SizeModel:
    return SizeModel({size: timeline(size, **trace) for size in sizes})


@given(
    layers=st.integers(1, 5), per_item=st.integers(1, 3_000_000), size=st.integers(1, 80), low=st.integers(1, 3),
    factor=st.integers(2, 6),
)  # fmt: skip
@settings(max_examples=60)
def test_any_size_is_as_if_it_had_been_traced(layers: int, per_item: int, size: int, low: int, factor: int) -> None:
    shape = {"layers": layers, "per_item": per_item}
    extrapolated = model(low, low * factor, **shape).replayed(size)
    traced = SizeModel({size: timeline(size, **shape)}).replayed(size)
    assert extrapolated == traced


@pytest.mark.parametrize("pairs", [4, 96, 5000])
def test_bytes_that_grow_with_every_pair_are_met_by_three_sizes(pairs: int) -> None:
    two = model(2, 8, pairs=pairs)
    assert two.grows_faster_than_a_line == (pairs * 2 * 8 > 4096)  # below that the parabola is a rounding
    three = model(2, 8, 32, pairs=pairs)
    assert not three.grows_faster_than_a_line
    for size in (3, 20, 100, 1000):
        traced = SizeModel({size: timeline(size, pairs=pairs)}).replayed(size)
        assert three.replayed(size) == traced


def test_lines_need_no_third_size() -> None:
    assert not model(2, 8).grows_faster_than_a_line


@given(st.integers(1, 400))
@settings(max_examples=25)
def test_a_forecast_never_falls_when_the_size_grows(size: int) -> None:
    sized = _shared_model()
    here, next_one = sized.peaks(size), sized.peaks(size + 1)
    assert next_one.reserved_bytes >= here.reserved_bytes
    assert next_one.allocated_bytes >= here.allocated_bytes


_models: list[SizeModel] = []


def _shared_model() -> SizeModel:
    if not _models:
        _models.append(model(2, 8, layers=4))
    return _models[0]


def test_the_reserved_peak_itself_does_fall_at_some_size() -> None:
    """Else the window would have nothing to do."""
    raw = [_shared_model().replayed(size).reserved_bytes for size in range(1, 60)]
    assert raw != sorted(raw)


@given(st.integers(1, 100_000))
def test_a_window_ends_at_its_size_or_just_above_and_is_short(size: int) -> None:
    window = _window(size)
    assert 0 < len(window) <= 60
    assert size <= window[-1] <= size * 1.032 + 1
    assert window[0] == 1
    assert max(after / before for before, after in itertools.pairwise(window) if before >= 8) <= 1.5 if size > 9 else 1


@given(st.integers(1, 300))
@settings(max_examples=20)
def test_parts_sum_to_what_is_allocated(size: int) -> None:
    peaks = _shared_model().peaks(size)
    assert sum(peaks.parts.values()) == peaks.allocated_bytes <= peaks.reserved_bytes
    assert min(peaks.parts.values()) >= 0


def test_the_largest_size_within_a_limit_is_the_last_that_stays_within() -> None:
    sized = _shared_model()
    for limit in (100 * MIB, 333 * MIB, 2000 * MIB):
        largest = sized.largest_within(limit, smallest=1, largest=10_000)
        assert sized.peaks(largest).reserved_bytes <= limit < sized.peaks(largest + 1).reserved_bytes


def fragmenting(size: int) -> AllocatorTimeline:
    """Two steps, each with a block for a while and then a larger one: cached, the first is of no use to the second."""
    writer, starts = Writer(), []
    for _ in range(2):
        starts.append(len(writer.events))
        writer.give_back(writer.take(20 * MIB * size))
        writer.give_back(writer.take(30 * MIB * size))
    return make_timeline(writer.trace(size, starts), AMPERE)


def test_under_a_limit_more_runs_than_reserved_bytes_say() -> None:
    sized = SizeModel({size: fragmenting(size) for size in (1, 4)})
    assert sized.replayed(2).reserved_bytes == 2 * 50 * MIB
    assert sized.runs_within(2, 100 * MIB)
    assert sized.runs_within(2, 60 * MIB)  # after the first step the larger block serves both
    assert not sized.runs_within(2, 59 * MIB)


def test_a_replay_that_stayed_below_a_limit_is_not_made_again_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = {size: fragmenting(size) for size in (1, 4)}
    limits = [share * MIB for share in (59, 60, 99, 100, 101)]
    replayed = SizeModel(traced)
    assert replayed.replayed(2).reserved_bytes == 100 * MIB
    made: list[int | None] = []

    def counted(blocks: Any, requests: Any, settings: Any, **more: Any) -> Any:
        made.append(settings.limit_bytes)
        return replay(blocks, requests, settings, **more)

    monkeypatch.setattr("brim.forecasting.extrapolate.replay", counted)
    known = [replayed.runs_within(2, limit) for limit in limits]
    assert made == limits[:3]
    assert known == [SizeModel(traced).runs_within(2, limit) for limit in limits]


def test_what_gives_back_its_cache_in_every_step_does_not_count_as_running() -> None:
    writer, starts = Writer(), []
    for _ in range(2):
        starts.append(len(writer.events))
        long = writer.take(30 * MIB)
        writer.give_back(long, writer.take(20 * MIB))
        writer.give_back(writer.take(40 * MIB))
    sized = SizeModel({1: make_timeline(writer.trace(1, starts), AMPERE)})
    assert sized.replayed(1).reserved_bytes == 90 * MIB
    assert sized.replayed(1).allocated_bytes == 50 * MIB
    assert sized.runs_within(1, 90 * MIB)
    assert not sized.runs_within(1, 50 * MIB)  # it would run, with a retry for each of the larger blocks


def test_what_cannot_be_replayed_runs_where_its_reserved_bytes_fit() -> None:
    sized = SizeModel({1: timeline(1, layers=2), 4: timeline(4, layers=3)})
    assert not sized.simulated
    reserved = sized.replayed(8).reserved_bytes
    assert sized.runs_within(8, reserved)
    assert not sized.runs_within(8, reserved - 1)


def test_the_largest_size_is_bounded_and_0_when_nothing_fits() -> None:
    sized = _shared_model()
    assert sized.largest_within(10**15, smallest=1, largest=77) == 77
    assert sized.largest_within(10**15, smallest=5, largest=5) == 5
    assert sized.largest_within(MIB, smallest=1, largest=77) == 0


def test_a_limit_between_a_power_of_two_and_the_bound_is_found() -> None:
    sized = model(2, 8, layers=4)
    limit = sized.peaks(70).reserved_bytes
    assert 66 <= sized.largest_within(limit, smallest=1, largest=77) <= 77
    assert sized.largest_within(limit // 2, smallest=1, largest=77) < 40


def _odd_trace(size: int) -> AllocatorTimeline:
    """Takes one block more at size 2 than elsewhere."""
    writer = Writer()
    writer.take(5 * MIB, "weights", "")
    kept = writer.take(size * MIB)
    if size == 2:
        writer.give_back(writer.take(100, "temporary"))
    writer.give_back(kept)
    return make_timeline(writer.trace(size), AMPERE)


def test_a_trace_that_does_not_match_the_others_is_left_out_of_the_curves() -> None:
    sized = SizeModel({size: _odd_trace(size) for size in (2, 8, 32)})
    assert sized.simulated
    assert sized.replayed(100) == SizeModel({100: _odd_trace(100)}).replayed(100)
    assert sized.replayed(2) == SizeModel({2: _odd_trace(2)}).replayed(2)


def test_traces_that_do_not_match_at_all_are_fitted_through_their_peaks() -> None:
    sized = SizeModel({size: _odd_trace(size) for size in (2, 8)})
    assert not sized.simulated
    fitted = sized.replayed(20)
    assert abs(fitted.allocated_bytes - 25 * MIB) < MIB
    assert sum(fitted.parts.values()) == fitted.allocated_bytes
    assert fitted.parts["weights"] == 5 * MIB
    worst = max(sized.replayed(size).reserved_bytes / sized.replayed(size).allocated_bytes for size in (2, 8))
    assert fitted.reserved_bytes >= fitted.allocated_bytes * worst


def test_expandable_segments_reserve_less() -> None:
    timelines = {size: timeline(size) for size in (2, 8)}
    usual = SizeModel(timelines).replayed(40)
    expandable = SizeModel(timelines, AllocatorSettings(expandable_segments=True)).replayed(40)
    assert expandable.reserved_bytes < usual.reserved_bytes


def test_a_private_pool_keeps_its_segments_apart() -> None:
    def reserved(pool: int) -> int:
        writer = Writer()
        writer.give_back(writer.take(40 * MIB))
        writer.take(30 * MIB, pool=pool)
        return SizeModel({4: make_timeline(writer.trace(4), AMPERE)}).replayed(4).reserved_bytes

    assert (reserved(0), reserved(1)) == (40 * MIB, 70 * MIB)


def test_timelines_of_two_sizes_differ_only_in_bytes() -> None:
    assert timeline(2).like(timeline(9))
    assert not timeline(2).like(timeline(2, layers=5))
    assert not timeline(2).like(dataclasses.replace(timeline(2), requests=timeline(2).requests[::-1]))
