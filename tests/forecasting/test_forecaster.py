"""A forecast's figures agree with each other, its largest size is the largest, and wrong requests are told apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import brim
from brim.errors import DoesNotFitError, RequestError
from brim.forecasting.extrapolate import SizeModel
from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
from brim.forecasting.gpus import find_gpu, gpu_of_memory
from brim.forecasting.overheads import Environment, make_timeline
from brim.workloads.callables import CallableWorkload
from tests.forecasting.synthetic_traces import MIB, TracedByHand, training_trace

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

GIB = 2**30
CARD = "rtx-3060-12gb"


def forecaster(workload: TracedByHand | None = None, card: str = CARD, **settings) -> Forecaster:
    workload = workload or TracedByHand()
    return Forecaster(TracedWorkload(workload, workload.trace), find_gpu(card), torch_version=(2, 11), **settings)


def test_device_bytes_equal_the_sum_of_the_breakdown() -> None:
    one = forecaster().at(16)
    assert one.device_bytes == one.peak_reserved_bytes + find_gpu(CARD).context_bytes
    assert sum(one.breakdown.values()) == one.device_bytes
    assert one.breakdown["cached"] == one.peak_reserved_bytes - one.peak_allocated_bytes
    assert one.breakdown["context"] == find_gpu(CARD).context_bytes
    assert one.breakdown["weights"] == 6 * 3 * MIB
    assert one.breakdown["optimizer_state"] == 6 * 6 * MIB
    assert min(one.breakdown.values()) >= 0


@given(st.integers(1, 500))
@settings(max_examples=15)
def test_a_breakdown_always_sums_to_its_total(size: int) -> None:
    one = _shared().at(size)
    assert sum(one.breakdown.values()) == one.device_bytes
    assert one.peak_allocated_bytes <= one.peak_reserved_bytes < one.device_bytes


_forecasters: list[Forecaster] = []


def _shared() -> Forecaster:
    if not _forecasters:
        _forecasters.append(forecaster())
    return _forecasters[0]


def test_forecasts_of_growing_sizes_never_fall() -> None:
    figures = [_shared().at(size) for size in range(1, 49)]
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"):
        values = [getattr(figure, name) for figure in figures]
        assert values == sorted(values)


def test_the_largest_size_fits_and_the_next_does_not() -> None:
    largest = _shared().largest()
    assert largest > 100
    assert _shared().at(largest).fits
    assert not _shared().at(largest + 1).fits


def test_a_margin_leaves_so_much_free() -> None:
    wide, narrow = forecaster(margin=0.0), forecaster(margin=0.5)
    assert wide.largest() > forecaster().largest() > narrow.largest()
    card = find_gpu(CARD)
    assert narrow.at(narrow.largest()).peak_reserved_bytes <= 0.5 * card.usable_bytes


def test_sizes_can_be_powers_of_two_or_multiples() -> None:
    largest = _shared().largest()
    power = _shared().largest(power_of_two=True)
    assert power & (power - 1) == 0
    assert power <= largest < 2 * power
    multiple = _shared().largest(multiple_of=24)
    assert multiple % 24 == 0
    assert multiple <= largest < multiple + 24
    with pytest.raises(RequestError, match="--multiple-of 24"):
        _shared().largest(power_of_two=True, multiple_of=24)
    with pytest.raises(RequestError, match="--multiple-of 0"):
        _shared().largest(multiple_of=0)


def test_a_multiple_that_is_too_large_fits_nothing() -> None:
    assert _shared().largest(multiple_of=10**6) == 0


def test_two_traces_are_enough_for_a_whole_table() -> None:
    workload = TracedByHand()
    table = forecaster(workload)
    largest = table.largest()
    assert [table.at(size).batch_size for size in table.sizes(largest)]
    assert len(workload.traced) == 2


def test_a_size_that_is_asked_for_is_traced_itself() -> None:
    workload = TracedByHand()
    forecaster(workload).at(37)
    assert 37 in [size for size, _ in workload.traced]


def test_a_quadratic_loss_is_met_by_a_third_trace() -> None:
    workload = TracedByHand(pairs=4096)
    table = forecaster(workload)
    largest = table.largest()
    assert len(workload.traced) == 3
    limit = table.gpu.limit_bytes(table.margin)
    assert table.model().replayed(largest).reserved_bytes == _traced_at(largest) <= limit
    assert _traced_at(2 * largest) > 2 * limit  # a line would have allowed nearly twice as much


def _traced_at(size: int) -> int:
    """What a trace of this very size reserves."""
    environment = Environment(compute_capability=find_gpu(CARD).compute_capability, torch_version=(2, 11))
    timeline = make_timeline(training_trace(size, pairs=4096), environment)
    return SizeModel({size: timeline}).replayed(size).reserved_bytes


def test_cards_of_one_architecture_share_their_traces() -> None:
    workload = TracedByHand()
    traced = TracedWorkload(workload, workload.trace)
    small, large = (Forecaster(traced, find_gpu(name)) for name in ("rtx 3060", "rtx 3090"))
    assert small.largest() < large.largest()
    assert len(workload.traced) == 2
    Forecaster(traced, find_gpu("h200")).largest()
    assert len(workload.traced) == 4


def test_the_sizes_shown_double_and_end_past_the_largest() -> None:
    table = _shared()
    largest = table.largest()
    sizes = table.sizes(largest)
    assert sizes[0] == 1
    assert largest in sizes
    assert sizes[-1] > largest
    assert table.sizes(0) == [1]


def test_the_workloads_own_bounds_are_kept() -> None:
    bounded = forecaster(TracedByHand(smallest=2, largest=24))
    assert bounded.largest() == 24
    assert bounded.sizes(24)[0] == 2
    with pytest.raises(RequestError, match="smallest this workload can run is 2"):
        bounded.at(1)


def test_a_workload_of_a_single_item_is_traced_at_that_size() -> None:
    workload = TracedByHand(largest=1)
    assert forecaster(workload).largest() == 1
    assert [size for size, _ in workload.traced] == [1]


def test_nothing_fits_is_reported_with_what_it_would_take_and_remedies() -> None:
    hopeless = forecaster(TracedByHand(weight=GIB))
    assert hopeless.largest() == 0
    text = str(hopeless.does_not_fit())
    for words in ("a batch of 1 sample does not fit", "RTX 3060", "GiB", "half precision", "--gpu NAME"):
        assert words in text


def test_a_step_that_cannot_be_traced_is_run_for_real_at_two_sizes_only() -> None:
    sizes: list[int] = []

    def step(batch: torch.Tensor) -> None:
        values = torch.from_numpy((batch * 2).numpy())  # too many for a trace
        sizes.append(len(values))

    workload = CallableWorkload(step=step, make_batch=lambda n: torch.randn(n, 100, 64))
    traced = TracedWorkload(workload)
    peaks = [Forecaster(traced, find_gpu(card)).at(8).peak_allocated_bytes for card in ("a100-80gb", "t4")]
    assert sizes == [1, 1, 2, 2]
    assert peaks[0] > 2 * 8 * 100 * 64 * 4


def test_an_approximate_trace_marks_the_forecast() -> None:
    assert forecaster().at(4).approximate is None
    assert forecaster(TracedByHand(approximate="control flow on values")).at(4).approximate == "control flow on values"


def test_expandable_segments_of_the_environment_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = forecaster().at(40).peak_reserved_bytes
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert forecaster().at(40).peak_reserved_bytes < usual
    assert forecaster(expandable_segments=False).at(40).peak_reserved_bytes == usual


@pytest.mark.parametrize("margin", [-0.1, 1.0, 2])
def test_a_margin_out_of_range_is_refused(margin: float) -> None:
    with pytest.raises(RequestError, match="--margin"):
        forecaster(margin=margin)


def test_two_ways_to_name_a_card_are_one_too_many() -> None:
    with pytest.raises(RequestError, match="both name a card"):
        choose_gpu("a100", "24GiB")
    assert choose_gpu("a100-40gb", None).key == "a100-40gb"
    assert choose_gpu(None, "24GiB").memory_bytes == 24 * GIB


def test_the_python_calls_take_a_workload_and_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = TracedByHand()
    monkeypatch.setattr("brim.forecasting.forecast._trace", lambda *call: workload.trace(*call[:3]))
    one = brim.forecast_memory(workload, 32, gpu="rtx 3060")
    assert (one.batch_size, one.batch_size_max, one.unit) == (32, None, "samples")
    largest = brim.forecast_batch_size(workload, gpu="rtx 3060")
    assert largest.batch_size == largest.batch_size_max
    assert largest.fits
    by_memory = brim.forecast_batch_size(workload, memory="12GiB", power_of_two=True).batch_size
    assert by_memory & (by_memory - 1) == 0
    assert brim.forecast_batch_size(workload, gpu="h200", max_batch_size=50).batch_size == 50
    heavy = TracedByHand(weight=GIB)
    monkeypatch.setattr("brim.forecasting.forecast._trace", lambda *call: heavy.trace(*call[:3]))
    with pytest.raises(DoesNotFitError):
        brim.forecast_batch_size(heavy, memory="4GiB")


def test_a_forecast_goes_through_json_unchanged() -> None:
    one = forecaster().at(8, largest=99)
    assert brim.Forecast.from_json(one.to_json()) == one
    assert one.to_json()["schema"] == "brim.forecast/1"
    with pytest.raises(RequestError, match="not a forecast"):
        brim.Forecast.from_json({"schema": "brim.plan/1"})


def test_a_card_known_by_its_memory_is_forecast_too() -> None:
    workload = TracedByHand()
    given_memory = Forecaster(TracedWorkload(workload, workload.trace), gpu_of_memory("8GiB"))
    assert 0 < given_memory.largest() < _shared().largest()
