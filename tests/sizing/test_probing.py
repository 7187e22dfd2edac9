"""Settings become sizes: ceilings, fixed sizes, used-up probes, and what is said when nothing fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from brim.errors import DoesNotFitError, LostError, RequestError
from brim.memory.failures import memory_remedies, memory_savings
from brim.records import Probe
from brim.settings.find_settings import SearchSettings
from brim.sizing.probing import SearchResult, notes_on
from tests.fake_curves import Curve, FakeDevice, context_of, searched

MIB = 2**20


def thousand() -> FakeDevice:
    """1,000 samples fit and no more; the rate keeps rising up to there."""
    return FakeDevice(Curve(lambda n: MIB + n * MIB, 1_001 * MIB, MIB), step_seconds=lambda n: 1 + 0.0001 * n)


def search(device: FakeDevice, *, context: dict[str, object] | None = None, **settings: object) -> SearchResult:
    return searched(context_of(device.curve, **(context or {})), SearchSettings(**settings), device)


def test_the_largest_is_found_and_what_stops_it_is_named() -> None:
    found = search(thousand(), objective="largest")
    assert (found.chosen.batch_size, found.largest) == (1_000, 1_000)
    assert "1001 does not (oom)" in found.reason


def test_the_fastest_is_chosen_by_default_and_the_best_rate_is_named() -> None:
    device = FakeDevice(Curve(lambda n: n * MIB, 1_000 * MIB, 0), step_seconds=lambda n: 0.002 + 0.001 * n)
    found = search(device)
    assert found.chosen.batch_size < found.largest
    assert found.chosen.samples_per_second >= 0.97 * 1_000 / device.step_seconds(1_000)
    assert "within 2%" in found.reason
    assert f"at {found.largest}" in found.reason


def test_a_ceiling_that_fits_is_taken_in_one_probe() -> None:
    device = thousand()
    found = search(device, batch_size=64)
    assert device.asked == [64]
    assert found.chosen.batch_size == 64
    assert "-b 64" in found.reason


@pytest.mark.parametrize("objective", ["largest", "fastest"])
def test_a_ceiling_that_does_not_fit_is_lowered(objective: str) -> None:
    device = thousand()
    found = search(device, batch_size=3_000, objective=objective)
    assert device.asked[0] == 3_000
    assert max(device.asked[1:]) < 3_000
    assert 950 <= found.chosen.batch_size <= 1_000
    if objective == "largest":
        assert found.chosen.batch_size == 1_000


def test_a_ceiling_is_rounded_down_to_the_grid() -> None:
    device = thousand()
    assert search(device, batch_size=100, multiple_of=16).chosen.batch_size == 96
    assert search(thousand(), batch_size=100, power_of_two=True).chosen.batch_size == 64


def test_a_ceiling_below_the_smallest_allowed_size_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="no batch size is allowed up to 1"):
        search(thousand(), batch_size=1, context={"smallest_size": 2})


def test_the_data_bounds_the_search() -> None:
    device = thousand()
    found = search(device, objective="largest", context={"largest_size": 300})
    assert found.chosen.batch_size == max(device.asked) == 300
    assert "largest size allowed (300) fits" in found.reason
    assert not any(probe.verdict == "oom" for probe in found.probes)


def test_a_fixed_size_that_fits_is_exactly_that() -> None:
    device = thousand()
    found = search(device, batch_size=777, fixed=True)
    assert (device.asked, found.chosen.batch_size) == ([777], 777)


def test_a_fixed_size_that_does_not_fit_is_split_and_that_is_reported() -> None:
    found = search(thousand(), batch_size=2_500, fixed=True)
    assert found.chosen.batch_size == 1_000
    assert "(2500) does not fit and is split into parts of 1000" in found.reason


def test_parts_of_a_fixed_size_keep_to_the_bounds() -> None:
    found = search(thousand(), batch_size=2_500, fixed=True, max_size=100, context={"largest_size": 80}, multiple_of=16)
    assert found.chosen.batch_size == 80
    assert search(thousand(), objective="largest", max_size=100, multiple_of=16).reason == (
        "the largest size allowed (96) fits"
    )


@pytest.mark.parametrize("asked", [{}, {"fixed": True}])
def test_where_no_smaller_size_is_allowed_than_one_that_does_not_fit_nothing_fits(asked: dict[str, object]) -> None:
    with pytest.raises(DoesNotFitError, match="a batch of 1024 samples does not fit"):
        search(thousand(), batch_size=1_024, multiple_of=1_024, **asked)


def test_a_fixed_size_that_does_not_fit_is_an_error_when_asked() -> None:
    device = thousand()
    with pytest.raises(DoesNotFitError, match="a batch of 2500 samples") as caught:
        search(device, batch_size=2_500, fixed=True, fail_on_oom=True)
    assert device.asked == [2_500]
    assert caught.value.exit_code == 3
    assert "a smaller batch (it was 2500)" in str(caught.value)


@pytest.mark.parametrize("objective", ["largest", "fastest"])
def test_used_up_probes_give_the_best_verified_size_and_say_so(objective: str) -> None:
    device = thousand()
    found = search(device, objective=objective, max_probes=2)
    assert len(device.asked) == 2
    assert found.chosen.batch_size == max(device.asked)
    assert found.chosen.fits
    assert "max_probes=2 was used up" in found.reason


def test_probes_used_up_before_anything_fits_is_an_error() -> None:
    with pytest.raises(DoesNotFitError, match="max_probes=1 is used up"):
        search(thousand(), batch_size=2_000, max_probes=1)


def test_a_size_limit_bounds_the_search_and_is_named() -> None:
    device = FakeDevice(thousand().curve, verdicts={600: "size_limit"})
    found = search(device, objective="largest")
    assert found.chosen.batch_size == 599
    assert "600 does not (size_limit)" in found.reason
    assert any("a size limit stops the step, not memory" in note for note in found.notes)
    assert found.largest_estimate == 599


@pytest.mark.parametrize("objective", ["largest", "fastest"])
@pytest.mark.parametrize("verdict", ["timeout", "fatal", "thrashes"])
def test_a_size_that_timed_out_or_broke_never_counts_as_fitting(objective: str, verdict: str) -> None:
    device = FakeDevice(thousand().curve, verdicts={100: verdict})
    found = search(device, objective=objective)
    assert found.chosen.fits
    assert found.largest < 100
    assert found.chosen.batch_size < 100


def test_a_ceiling_that_times_out_is_not_taken() -> None:
    device = FakeDevice(thousand().curve, verdicts={64: "timeout"})
    assert search(device, batch_size=64, objective="largest").chosen.batch_size == 63


@pytest.mark.parametrize("objective", ["largest", "fastest"])
def test_nothing_fits_reports_bytes_limit_and_remedies(objective: str) -> None:
    device = FakeDevice(Curve(lambda n: 3 * MIB + n * MIB, 2 * MIB, 0))
    with pytest.raises(DoesNotFitError) as caught:
        search(device, objective=objective, context={"savings": ("half precision", "less of this")})
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert device.asked == [1]
    for part in ("a batch of 1 sample does not fit", "at least 4.0 MiB", "limit is 2.0 MiB on fake"):
        assert part in message
    expected = ["half precision", "less of this", "another device"]
    places = [message.index(remedy) for remedy in expected]
    assert places == sorted(places)
    assert "a smaller batch" not in message


@pytest.mark.parametrize(("verdict", "words"), [("timeout", "did not finish"), ("fatal", "broke its process")])
@pytest.mark.parametrize("asked", [{}, {"objective": "largest"}, {"batch_size": 8, "max_probes": 1}])
def test_a_step_that_is_lost_at_every_size_is_not_called_too_large(
    verdict: str, words: str, asked: dict[str, object]
) -> None:
    device = FakeDevice(thousand().curve, verdicts={1: verdict})
    with pytest.raises(LostError, match=words) as caught:
        search(device, **asked)
    assert caught.value.exit_code == 4
    assert f"forced {verdict}" in str(caught.value)


class Raising(FakeDevice):
    """A device on which some sizes raise an error of the step's own."""

    def __init__(self, raises: Callable[[int], bool]) -> None:
        super().__init__(thousand().curve, step_seconds=thousand().step_seconds)
        self.raises = raises

    def __call__(self, size: int) -> Probe:
        if self.raises(size):
            self.asked.append(size)
            raise ValueError(f"cannot take {size}")
        return super().__call__(size)


@pytest.mark.parametrize("objective", ["largest", "fastest"])
@pytest.mark.parametrize(("needed", "smallest"), [(2, 2), (3, 4)])
def test_an_error_at_the_smallest_size_bounds_the_search_from_below(objective: str, needed: int, smallest: int) -> None:
    device = Raising(lambda size: size < needed)
    found = search(device, objective=objective)
    assert min(probe.batch_size for probe in found.probes) == smallest
    assert found.chosen.batch_size >= 950
    assert len(device.asked) == len(set(device.asked)), "no size is tried twice"
    assert [note for note in found.notes if f"searched from {smallest}" in note and "cannot take 1" in note]


def test_a_split_part_is_above_sizes_that_raise_and_a_fixed_size_is_kept() -> None:
    assert search(Raising(lambda size: size < 2), batch_size=2_000, fixed=True).chosen.batch_size == 1_000
    device = Raising(lambda size: size < 2)
    with pytest.raises(ValueError, match="cannot take 1"):
        search(device, batch_size=1, fixed=True)
    assert device.asked == [1]


@pytest.mark.parametrize(
    "asked", [{}, {"max_size": 1}, {"batch_size": 1}, {"multiple_of": 8}, {"objective": "largest"}]
)
def test_an_error_at_every_size_is_raised_as_it_was_at_the_first(asked: dict[str, object]) -> None:
    device = Raising(lambda size: True)
    with pytest.raises(ValueError, match=f"cannot take {asked.get('multiple_of', 1)}$"):
        search(device, **asked)
    assert len(device.asked) <= 3


def test_an_error_above_a_size_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="cannot take"):
        search(Raising(lambda size: size > 99), objective="largest")


@pytest.mark.parametrize(("number", "asked"), [(2, {"batch_size": 65}), (4, {"batch_size": 66}), (2, {})])
def test_a_step_that_takes_only_multiples_is_answered_with_the_flag(number: int, asked: dict[str, object]) -> None:
    device = Raising(lambda size: size % number != 0)
    with pytest.raises(RequestError, match=f"multiple_of={number} "):
        search(device, objective="largest", **asked)
    found = search(device, objective="largest", multiple_of=number, **asked)
    assert found.chosen.batch_size % number == 0


def test_remedies_come_in_one_order_and_only_those_that_are_possible() -> None:
    savings = memory_savings(
        half_precision="--dtype bfloat16", smaller="less", checkpointing="--gradient-checkpointing"
    )
    expected = ["a smaller batch (it was 8)", "half precision: --dtype", "less", "--gradient-checkpointing", "another"]
    remedies = memory_remedies(savings, batch_size=8)
    assert len(remedies) == len(expected)
    assert all(remedy.startswith(words) for words, remedy in zip(expected, remedies, strict=True))
    assert memory_remedies(memory_savings(smaller="less"), more="a larger card") == ["less", "a larger card"]


def test_a_noisy_allocator_ends_the_search_at_two_percent() -> None:
    device = thousand()
    found = search(device, objective="largest", context={"exact": False})
    assert 980 <= found.chosen.batch_size <= 1_000


@pytest.mark.parametrize(("growing", "noted"), [({64, 80}, True), ({64}, False), (set(), False)])
def test_growth_is_noted_where_every_size_shows_it(growing: set[int], noted: bool) -> None:
    probes = [
        Probe(batch_size=size, verdict="fits", growth_bytes_per_step=1024 if size in growing else 0)
        for size in (64, 80)
    ]
    probes.append(Probe(batch_size=96, verdict="oom"))  # ran out before growth could be seen
    assert any("grows by 1.0 KiB with every step" in note for note in notes_on(probes)) is noted
