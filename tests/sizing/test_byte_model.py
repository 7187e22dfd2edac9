"""The byte model tells curves apart from a few points, and its safe answer is safe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.sizing.byte_model import ByteModel
from tests.fake_curves import Curve, affine, quadratic


def model_of(points: dict[int, int], **settings: float) -> ByteModel:
    model = ByteModel(**settings)
    for size, size_bytes in points.items():
        model.observe(size, size_bytes)
    return model


def test_without_points_nothing_is_known() -> None:
    model = ByteModel(base_bytes=100)
    assert model.shape == "unknown"
    assert model.bytes_at(8) is None
    assert model.largest_within(10**9) is None
    assert model.surely_within(10**9) == 0


def test_affine_points_give_the_line_and_its_root() -> None:
    model = model_of({1: 1_010, 4: 1_040, 9: 1_090})
    assert model.shape == "affine"
    assert model.straight
    assert model.bytes_at(100) == 2_000
    assert [model.largest_within(limit) for limit in (1_999, 2_000, 2_009, 2_010)] == [99, 100, 100, 101]


def test_two_points_are_taken_for_a_line() -> None:
    model = model_of({2: 120, 5: 150})
    assert (model.shape, model.bytes_at(10), model.largest_within(199)) == ("affine", 200, 9)


def test_quadratic_points_give_the_parabola_and_its_root() -> None:
    model = model_of({n: 500 + 3 * n + 7 * n * n for n in (1, 6, 20)})
    assert model.shape == "quadratic"
    assert not model.straight
    assert model.bytes_at(50) == 500 + 150 + 7 * 2_500
    assert model.largest_within(500 + 150 + 7 * 2_500) == 50
    assert model.largest_within(500 + 150 + 7 * 2_500 - 1) == 49


def test_flat_points_promise_no_largest_size() -> None:
    model = model_of({1: 700, 64: 700})
    assert (model.shape, model.largest_within(10**6), model.bytes_at(200)) == ("flat", None, 700)


@pytest.mark.parametrize("tread", [2, 32, 100])
def test_repeated_bytes_are_a_staircase_and_narrow_its_tread(tread: int) -> None:
    sizes = (1, tread, 3 * tread, 3 * tread + 1, 5 * tread)
    model = model_of({n: 900 + 50 * -(-n // tread) for n in sizes})
    assert model.shape == "staircase"
    stairs = model.staircase(900 + 50 * 11, fits_below=100_000)
    assert stairs is not None
    assert (stairs.rise, stairs.allowed_steps) == (50, 11)
    assert stairs.smallest_tread <= tread <= stairs.largest_tread


def test_a_failing_size_narrows_the_tread_from_above() -> None:
    model = model_of({1: 100, 4: 100, 9: 120})
    wide = model.staircase(139, fits_below=1_000)
    narrow = model.staircase(139, fits_below=15)
    assert wide is not None
    assert narrow is not None
    assert narrow.largest_tread < wide.largest_tread
    assert narrow.largest_tread * narrow.allowed_steps < 15


def test_bytes_that_no_stairs_explain_are_no_staircase() -> None:
    line = model_of({1: 100, 2: 110, 3: 120})
    irregular = model_of({1: 100, 2: 100, 3: 10_000, 4: 10_001})
    assert line.staircase(1_000, fits_below=50) is None
    assert irregular.staircase(10**6, fits_below=50) is None


def test_a_second_measurement_of_a_size_keeps_the_larger_figure() -> None:
    model = model_of({4: 100})
    model.observe(4, 90)
    model.observe(4, 110)
    model.observe(4, 105)
    assert model.points == [(4, 110)]


def test_a_changed_slope_is_followed_after_one_point_beyond_it() -> None:
    def bytes_at(size: int) -> int:
        return 10 * min(size, 50) + 2 * max(size - 50, 0)

    model = model_of({n: bytes_at(n) for n in (1, 10, 60, 80)})
    assert model.bytes_at(100) == bytes_at(100)
    assert model.largest_within(bytes_at(100)) == 100


def test_noise_hides_a_bend_that_is_smaller_than_itself() -> None:
    points = {1: 100_000, 8: 107_300, 16: 116_000}  # 170 bytes off the line: 0.2 %
    assert model_of(points).shape == "quadratic"
    noisy = model_of(points, noise=0.01)
    assert noisy.shape == "affine"
    assert noisy.straight
    assert noisy.staircase(10**6, fits_below=100) is None


def test_noise_does_not_hide_a_real_parabola() -> None:
    points = {n: round((500 + 7 * n * n) * (1.003 if n % 2 else 0.997)) for n in (1, 20, 61)}
    model = model_of(points, noise=0.01)
    assert model.shape == "quadratic"
    assert model.largest_within(500 + 7 * 100**2) == pytest.approx(100, rel=0.02)


@given(st.one_of(affine(), quadratic()), st.data())
def test_the_sure_size_never_overshoots(curve: Curve, data: st.DataObject) -> None:
    true = curve.largest(bound=10**6)
    sizes = data.draw(st.lists(st.integers(1, max(true, 1)), min_size=1, max_size=4, unique=True))
    model = model_of({n: curve.bytes_at(n) for n in sizes}, base_bytes=curve.base)
    sure = model.surely_within(curve.limit)
    assert sure <= true or curve.bytes_at(sure) <= curve.limit


@given(affine(), st.data())
def test_two_points_of_a_line_give_its_largest_size_exactly(curve: Curve, data: st.DataObject) -> None:
    first, second = data.draw(st.lists(st.integers(1, 4_096), min_size=2, max_size=2, unique=True))
    model = model_of({n: curve.bytes_at(n) for n in (first, second)})
    assert model.largest_within(curve.limit) == curve.largest(bound=10**12)


@given(quadratic())
def test_three_points_of_a_parabola_give_its_largest_size_to_within_one(curve: Curve) -> None:
    model = model_of({n: curve.bytes_at(n) for n in (1, 8, 64)})
    found = model.largest_within(curve.limit)
    assert found is not None
    assert abs(found - curve.largest(bound=10**6)) <= 1


@pytest.mark.parametrize("seen", [150, 590])
def test_a_forecast_that_the_first_size_refutes_is_forgotten(seen: int) -> None:
    model = ByteModel()
    model.expect(lambda size: 100 + 10 * size, base_bytes=100, most_off=2.0)
    assert model.largest_within(500) == 40
    model.observe(20, seen)  # 300 was forecast
    assert model.largest_within(500) is None
    assert model.bytes_at(40) == 100 + 2 * (seen - 100)  # in a line through what was seen


def test_a_forecast_that_is_a_little_off_is_corrected() -> None:
    model = ByteModel()
    model.expect(lambda size: 100 + 10 * size, base_bytes=100, most_off=2.0)
    model.observe(20, 400)  # half as much again
    assert model.largest_within(700) == 40


def test_a_rise_within_noise_does_not_change_the_slope() -> None:
    # An allocator that is short of memory reserves hardly more at the larger size (mvit_v2_s at 15 and 16, in MiB).
    points = {1: 2_002, 15: 23_394, 16: 23_398}
    assert model_of(points, noise=0.01).largest_within(24_576) == 16
    assert model_of(points).largest_within(24_576) == 310  # to a meter that counts exactly it is a slope
