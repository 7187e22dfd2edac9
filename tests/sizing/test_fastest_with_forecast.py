"""A search that starts from a forecast: fewer probes when it is right, the same answer when it is not."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.forecasting.forecast import forecast_curve
from brim.records import Probe
from brim.settings.find_settings import SearchSettings
from brim.sizing.byte_model import ByteModel
from brim.sizing.fastest import FastestSizer
from brim.sizing.priors import ForecastCurve
from brim.sizing.sizer import Evidence, SizeGrid, Trial
from brim.workloads.callables import CallableWorkload
from tests.fake_curves import Curve, FakeDevice, context_of, searched

LAST = 65_536


@dataclasses.dataclass(frozen=True)
class Card:
    """Bytes and step time in lines over the size."""

    constant: int
    slope: int
    largest: int
    fixed_seconds: float
    item_seconds: float

    def bytes_at(self, size: int) -> int:
        return self.constant + self.slope * size

    def device(self) -> FakeDevice:
        limit = self.bytes_at(self.largest)
        curve = Curve(self.bytes_at, limit, self.constant, str(self))
        return FakeDevice(curve, step_seconds=lambda n: self.fixed_seconds + self.item_seconds * n)

    def forecast(self, factor: float):
        """What grows with the size is off by the factor."""
        return lambda size: round(self.constant + factor * self.slope * size)

    def whole_forecast(self, factor: float, *, runs_to: float = 1.0) -> ForecastCurve:
        """The same for all that a forecast says; under a limit, sizes run that are so many times as large."""
        reserved_at = self.forecast(factor)
        return ForecastCurve(
            reserved_at=reserved_at,
            allocated_at=reserved_at,
            runs_within=lambda size, limit: reserved_at(round(size / runs_to)) <= limit,
        )


@st.composite
def cards(draw: st.DrawFn) -> Card:
    largest = draw(st.integers(1, 20_000))
    item_seconds = draw(st.floats(1e-5, 1e-2)) * min(1, 400 / largest)
    knee = draw(st.floats(0.01, 5_000).map(lambda size: min(size, 4 / item_seconds)))
    return Card(draw(st.integers(0, 10**10)), draw(st.integers(10**3, 10**8)), largest, knee * item_seconds,
                item_seconds)  # fmt: skip


def run(card: Card, factor: float | None, headroom: float = 0.0) -> tuple[FakeDevice, FastestSizer]:
    device = card.device()
    prior = None if factor is None else card.forecast(factor)
    model = ByteModel(base_bytes=card.constant, noise=0.01 if headroom else 0.0, prior=prior)
    grid = SizeGrid(last=LAST)
    search = FastestSizer(Evidence(model, limit_bytes=device.curve.limit), grid=grid, usable=1 - headroom)
    while not search.settled:
        size = search.next_size()
        assert size not in device.asked
        search.record(Trial.of_probe(device(size)))
        assert len(device.asked) <= 20
    return device, search


def best_rate(device: FakeDevice, largest: int) -> float:
    return largest / device.step_seconds(largest)


@settings(max_examples=200)
@given(cards(), st.sampled_from([1.0, 0.9, 1.1, 0.5, 2.0, 0.25, 4.0]))
def test_the_answer_is_near_the_best_rate_however_far_off_the_forecast_is(card: Card, factor: float) -> None:
    device, search = run(card, factor)
    chosen = search.chosen()
    assert chosen is not None
    assert chosen.rate >= 0.95 * best_rate(device, card.largest)
    assert len(device.asked) <= 10


@settings(max_examples=200)
@given(cards().filter(lambda card: card.largest >= 4), st.floats(0.93, 1.07))
def test_a_good_forecast_makes_no_failure_and_few_probes(card: Card, factor: float) -> None:
    device, _ = run(card, factor, headroom=0.03)
    assert device.ooms == 0
    assert len(device.asked) <= 8  # where a step takes seconds, sizes grow slowly


def test_a_good_forecast_saves_probes() -> None:
    typical = [
        Card(4 * 10**8, 9 * 10**7, 250, 0.01, 0.0017), Card(3 * 10**8, 12 * 10**8, 20, 0.05, 0.004),
        Card(2 * 10**8, 5 * 10**6, 4_900, 0.003, 0.0001), Card(6 * 10**8, 5 * 10**7, 500, 0.4, 0.001),
    ]  # fmt: skip
    with_it = [len(run(card, 1.0)[0].asked) for card in typical]
    without = [len(run(card, None)[0].asked) for card in typical]
    assert sum(with_it) < sum(without)
    assert sum(with_it) / len(with_it) <= 4


def test_a_forecast_of_too_little_that_fails_at_once_is_forgotten() -> None:
    card = Card(0, 10**7, 40, 0.01, 0.001)
    device, search = run(card, 1 / 64)
    assert device.asked[0] > card.largest  # it ran out of memory
    assert device.asked[1] == 1
    assert search.largest >= 0.5 * card.largest


def test_a_forecast_that_missed_what_every_size_takes_does_not_scale_what_grows() -> None:
    card = Card(6 * 10**9, 10**6, 2_000, 0.5, 0.001)
    device = card.device()
    without_workspace = dataclasses.replace(card, constant=0).whole_forecast(0.05)
    found = searched(context_of(dataclasses.replace(device.curve, base=0)), SearchSettings(), device, without_workspace)
    assert device.asked[0] > card.largest  # it ran out of memory
    assert found.chosen.samples_per_second is not None
    assert found.chosen.samples_per_second >= 0.9 * best_rate(device, card.largest)


def test_bytes_that_do_not_grow_are_searched_to_the_bound() -> None:
    flat = Curve(lambda _: 1000, 2000, 1000, "flat")
    search = FastestSizer(
        Evidence(ByteModel(base_bytes=1000, prior=lambda _: 1000), limit_bytes=2000),
        grid=SizeGrid(last=64),
        usable=1 - 0.0,
    )
    device = FakeDevice(flat)
    while not search.settled:
        size = search.next_size()
        search.record(Trial.of_probe(device(size)))
    assert search.largest == 64


@pytest.mark.parametrize("asked", [{"objective": "largest"}, {"batch_size": 8}, {"batch_size": 8, "fixed": True}])
def test_other_searches_than_for_the_fastest_do_as_without(asked: dict) -> None:
    card = Card(10**8, 10**7, 40, 0.01, 0.001)
    sizes = []
    for forecast in (None, card.whole_forecast(2.0)):
        device = card.device()
        searched(context_of(device.curve), SearchSettings(**asked), device, forecast)
        sizes.append(device.asked)
    assert sizes[0] == sizes[1]


def test_a_byte_model_believes_its_prior_until_two_sizes_are_seen() -> None:
    model = ByteModel(base_bytes=100, prior=lambda size: 100 + 10 * size)
    assert model.bytes_at(5) == 150
    assert model.largest_within(200) == 10
    model.observe(4, 180)  # twice what grows
    assert model.prior_error() == 2.0
    assert model.bytes_at(5) == 200
    assert model.largest_within(200) == 5
    model.observe(8, 220)
    assert model.bytes_at(5) == 190


def test_no_forecast_is_made_for_another_device_than_cuda() -> None:
    workload = CallableWorkload(step=lambda x: x * 2, make_batch=lambda n: torch.ones(n, 4), device="cpu")
    assert forecast_curve(workload) == (None, ())


def test_a_step_that_cannot_be_traced_costs_a_note_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("numpy was here\nand more")

    workload = CallableWorkload(step=lambda x: x, make_batch=lambda n: torch.ones(n, 4), device="cuda")
    monkeypatch.setattr("brim.forecasting.forecast.gpu_of_device", fail)
    forecast, notes = forecast_curve(workload)
    assert forecast is None
    assert notes == ("searched without a forecast, since the step cannot be traced: numpy was here",)


def test_a_traced_workload_gives_bytes_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.forecasting.gpus import find_gpu

    workload = CallableWorkload(step=lambda x: (x * 2).sum(), make_batch=lambda n: torch.ones(n, 2**20), device="cpu")
    monkeypatch.setattr("brim.forecasting.forecast.gpu_of_device", lambda _: find_gpu("t4"))
    monkeypatch.setattr(workload, "device", types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr("brim.forecasting.forecast._trace", _trace_as_cpu)
    forecast, notes = forecast_curve(workload)
    assert forecast is not None
    assert notes == ()
    assert forecast.reserved_at(64) >= forecast.allocated_at(64) > forecast.allocated_at(8) > 8 * 2**22
    assert forecast.runs_within(64, forecast.reserved_at(64))
    assert not forecast.runs_within(64, forecast.allocated_at(64) - 1)


def _trace_as_cpu(workload, size, target, _):
    from brim.forecasting.trace import trace_workload

    workload.device = torch.device("cpu")
    return trace_workload(workload, size, target=target)


def pressed(card: Card, forecast: ForecastCurve, *, really_to: float) -> tuple[list[int], FastestSizer]:
    """A search on a card where an allocator short of memory makes do with less: sizes up to `really_to` times run."""
    limit = card.bytes_at(card.largest)
    model = ByteModel(base_bytes=card.constant, noise=0.01, prior=forecast.reserved_at)
    search = FastestSizer(
        Evidence(model, limit_bytes=limit), grid=SizeGrid(last=LAST), usable=1 - 0.03, forecast=forecast
    )
    asked: list[int] = []
    while not search.settled:
        size = search.next_size()
        asked.append(size)
        assert len(asked) <= 10
        if size > really_to * card.largest:
            search.record(Trial.of_probe(Probe(batch_size=size, verdict="oom")))
            continue
        seconds = card.fixed_seconds + card.item_seconds * size
        reserved = min(card.bytes_at(size), limit)
        search.record(Trial.of_probe(Probe(
                batch_size=size, verdict="fits", peak_allocated_bytes=card.bytes_at(size), peak_reserved_bytes=reserved,
                step_seconds=seconds, samples_per_second=size / seconds,
            )))  # fmt: skip
    return asked, search


RISING = Card(0, 10**9, 20, 0.5, 0.01)  # the rate rises to the last size


def test_a_forecast_extends_the_climb_to_what_runs_within_the_limit() -> None:
    asked, search = pressed(RISING, RISING.whole_forecast(1.0, runs_to=1.2), really_to=1.2)
    assert 20 < max(asked) <= 24
    assert search.largest == max(asked) == asked[-1]  # nothing was tried beyond it, and nothing failed
    chosen = search.chosen()
    assert chosen is not None
    assert chosen.size == search.largest


def test_a_forecast_that_the_first_size_confirms_needs_two_probes() -> None:
    asked, search = pressed(RISING, RISING.whole_forecast(1.0, runs_to=1.2), really_to=1.2)
    assert len(asked) == 2
    assert search.largest == asked[-1]


def test_after_a_failure_at_the_largest_size_foreseen_a_smaller_one_near_the_limit_is_tried() -> None:
    asked, search = pressed(RISING, RISING.whole_forecast(1.0, runs_to=1.2), really_to=1.0)
    assert asked[1] > 20
    assert asked[2] == 18  # nine tenths of the limit, not half-way back to the first
    assert search.largest >= 18


def test_the_first_size_is_within_one_leap_of_the_last() -> None:
    heavy = Card(10 * 10**9, 10**7, 1000, 0.05, 0.001)  # what is resident takes more than a sixteenth of the limit
    asked, _ = pressed(heavy, heavy.whole_forecast(1.0), really_to=1.0)
    assert asked[0] >= 900 / 16
    assert asked[1] >= 880


def test_the_knee_is_not_probed_where_that_would_spare_little_memory() -> None:
    flat = Card(10**10, 10**5, 1000, 0.0012, 0.0004)  # a hundredth of the limit grows with the size
    steep = Card(10**6, 10**7, 1000, 0.0012, 0.0004)
    assert len(run(flat, None)[0].asked) < len(run(steep, None)[0].asked)


def test_a_forecast_that_promises_too_much_costs_one_failure() -> None:
    asked, search = pressed(RISING, RISING.whole_forecast(1.0, runs_to=1.2), really_to=1.0)
    assert sum(size > 20 for size in asked) == 1
    assert search.largest >= 18


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_wrong_forecast_does_not_extend_the_climb(factor: float) -> None:
    asked, _ = pressed(RISING, RISING.whole_forecast(factor, runs_to=1.5), really_to=1.0)
    assert max(asked) <= 20
