"""Workspaces are asked for where the libraries would ask, and of the size torch's source says."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic_traces import MIB, Writer, convolution, training_trace

from brim.forecast.allocator import FREE
from brim.forecast.overheads import PARTS, Environment, make_timeline, version_pair

HOPPER = Environment(compute_capability=(9, 0), torch_version=(2, 11))
AMPERE = Environment(compute_capability=(8, 6), torch_version=(2, 11))
NEWEST = Environment(compute_capability=(9, 0), torch_version=(2, 15))


def workspaces(timeline) -> list[int]:
    return [r for r, part in zip(timeline.requests, timeline.parts, strict=True) if part == "workspaces" and r != FREE]


def test_cublas_keeps_one_workspace_for_each_thread_that_makes_products() -> None:
    assert workspaces(make_timeline(training_trace(2), HOPPER)) == [32 * MIB, 32 * MIB]
    assert workspaces(make_timeline(training_trace(2), AMPERE)) == [8_519_680, 8_519_680]
    forward_only = dataclasses.replace(training_trace(2), backward_gemm_calls=0)
    assert workspaces(make_timeline(forward_only, HOPPER)) == [32 * MIB]


def test_a_biased_product_adds_a_workspace_of_cublaslt() -> None:
    with_bias = dataclasses.replace(training_trace(2), lt_calls=3)
    assert workspaces(make_timeline(with_bias, HOPPER)) == [32 * MIB, MIB, 32 * MIB, MIB]


def test_a_step_without_products_takes_no_workspace() -> None:
    writer = Writer()
    writer.give_back(writer.take(MIB, op="aten.relu"))
    assert workspaces(make_timeline(writer.trace(1), HOPPER)) == []


def test_since_torch_2_15_a_workspace_is_given_back_after_its_product() -> None:
    timeline = make_timeline(training_trace(2, layers=2), NEWEST)
    taken = workspaces(timeline)
    assert len(taken) == 2 * (2 + 2)  # forward and backward, in each of two steps
    freed = sum(p == "workspaces" and r == FREE for r, p in zip(timeline.requests, timeline.parts, strict=True))
    assert freed == len(taken)


def test_the_first_workspace_comes_with_the_first_product_and_the_second_with_the_backward() -> None:
    timeline = make_timeline(training_trace(2, layers=2), HOPPER)
    places = [place for place, part in enumerate(timeline.parts) if part == "workspaces"]
    before_first = timeline.parts[: places[0]]
    assert before_first[-1] == "activations"  # the product's own output is there already
    assert "gradients" not in before_first
    assert "gradients" in timeline.parts[: places[1] + 2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"direction": "wgrad"}, 2 * (2 * 64 * 56 * 56 * 4 + 64 * 64 * 9)),
        ({"direction": "wgrad", "channels_last": True}, 0),
        ({"direction": "wgrad", "groups": 64}, 0),
    ],
)
def test_a_convolution_over_channels_first_needs_copies_of_its_operands(changes: dict, expected: int) -> None:
    writer = Writer()
    writer.give_back(writer.take(4 * 64 * 56 * 56 * 2, op="aten.convolution_backward"))
    trace = writer.trace(4, convolutions=(convolution(4, 1, **changes),))
    assert sum(workspaces(make_timeline(trace, HOPPER))) == expected


def test_workspaces_of_two_directions_are_not_there_at_once() -> None:
    writer = Writer()
    writer.give_back(writer.take(MIB, op="aten.convolution_backward"))
    both = (convolution(4, 1, direction="dgrad"), convolution(4, 1, direction="wgrad"))
    timeline = make_timeline(writer.trace(4, convolutions=both), HOPPER)
    rows = [r for r, part in zip(timeline.requests, timeline.parts, strict=True) if part == "workspaces"]
    assert [row == FREE for row in rows] == [False, True, False, True]


def test_every_category_of_a_trace_has_its_part() -> None:
    from brim.forecast.events import CATEGORIES

    gathered = [category for categories in PARTS.values() for category in categories]
    assert sorted(gathered) == sorted([*CATEGORIES, "workspaces"])


@pytest.mark.parametrize(("text", "pair"), [("2.11.0+cu130", (2, 11)), ("2.6.0", (2, 6)), ("2.15.0a0+git1", (2, 15))])
def test_a_version_is_read_by_its_first_two_numbers(text: str, pair: tuple[int, int]) -> None:
    assert version_pair(text) == pair
