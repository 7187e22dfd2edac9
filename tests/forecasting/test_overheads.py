"""Workspaces are asked for where the libraries would ask, and of the size torch's source says."""

from __future__ import annotations

import dataclasses

import pytest

from brim.forecasting.allocator import FREE
from brim.forecasting.overheads import PARTS, Environment, make_timeline, version_pair
from brim.forecasting.workspaces import describe_reduction
from tests.forecasting.synthetic_traces import MIB, Writer, convolution, training_trace

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


def test_a_biased_product_adds_a_workspace_of_cublaslt_to_its_own_thread() -> None:
    trace = training_trace(2)
    first = trace.step_starts[0]
    events = list(trace.events)
    events[first] = events[first]._replace(op="aten.addmm")
    with_bias = dataclasses.replace(trace, events=tuple(events), lt_calls=1)
    assert workspaces(make_timeline(with_bias, HOPPER)) == [32 * MIB, MIB, 32 * MIB]


def test_the_forward_of_a_second_step_is_not_a_backward() -> None:
    trace = training_trace(2)
    second = trace.step_starts[1]
    events = list(trace.events)
    place = next(index for index in range(second, len(events)) if events[index].op == "aten.mm")
    events[place] = events[place]._replace(op="aten.addmm")
    with_bias = dataclasses.replace(trace, events=tuple(events), lt_calls=1)
    timeline = make_timeline(with_bias, HOPPER)
    places = [index for index, part in enumerate(timeline.parts) if part == "workspaces"]
    assert [timeline.requests[index] for index in places] == [32 * MIB, 32 * MIB, MIB]


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


def test_workspaces_are_allocated_at_first_product_and_backward() -> None:
    timeline = make_timeline(training_trace(2, layers=2), HOPPER)
    places = [place for place, part in enumerate(timeline.parts) if part == "workspaces"]
    before_first = timeline.parts[: places[0]]
    assert before_first[-1] == "activations"  # the product's own output is there already
    assert "gradients" not in before_first
    assert "gradients" in timeline.parts[: places[1] + 2]


def test_a_convolutions_workspace_is_held_right_after_its_result() -> None:
    writer = Writer()
    first = writer.take(MIB, op="aten.convolution_backward")
    second = writer.take(2 * MIB, op="aten.convolution_backward")
    writer.give_back(first, second)
    both = (convolution(4, 0, direction="dgrad"), convolution(4, 1, direction="wgrad"))
    timeline = make_timeline(writer.trace(4, convolutions=both), HOPPER)
    # The input's gradient, its workspace taken and given back; the weight's gradient and its workspace likewise.
    assert [request == FREE for request in timeline.requests] == [False, False, True, False, False, True, True, True]
    assert [part == "workspaces" for part in timeline.parts] == [False, True, True, False, True, True, False, False]


def test_a_copied_weight_is_held_beside_the_workspace() -> None:
    writer = Writer()
    writer.give_back(writer.take(MIB, op="aten.convolution"))
    call = convolution(4, 0, channels_last=True, copies_weight=True)
    timeline = make_timeline(writer.trace(4, convolutions=(call,)), HOPPER)
    assert workspaces(timeline) == [2 * 64 * 64 * 9, 0]
    assert timeline.requests[1:5] == (2 * 64 * 64 * 9, 0, FREE, FREE)
    assert len(set(timeline.blocks[1:3])) == 2


def test_a_reductions_buffer_depends_on_the_card() -> None:
    writer = Writer()
    writer.give_back(writer.take(1024, op="aten.sum"))
    call = describe_reduction((65536, 256), (256, 1), {0}, accumulator_bytes=4, event=0)
    assert call is not None
    trace = writer.trace(4, reductions=(call,))
    small = dataclasses.replace(AMPERE, multiprocessors=28)
    assert 0 < workspaces(make_timeline(trace, small))[0] < workspaces(make_timeline(trace, HOPPER))[0]


@pytest.mark.parametrize(("capability", "threads"), [((7, 5), 1024), ((8, 0), 2048), ((8, 9), 1536), ((12, 0), 1536)])
def test_threads_of_a_multiprocessor_are_those_of_its_architecture(capability: tuple[int, int], threads: int) -> None:
    assert dataclasses.replace(HOPPER, compute_capability=capability).threads_per_multiprocessor == threads


def test_every_category_of_a_trace_has_its_part() -> None:
    from brim.forecasting.events import CATEGORIES

    gathered = [category for categories in PARTS.values() for category in categories]
    assert sorted(gathered) == sorted([*CATEGORIES, "workspaces"])


@pytest.mark.parametrize(("text", "pair"), [("2.11.0+cu130", (2, 11)), ("2.6.0", (2, 6)), ("2.15.0a0+git1", (2, 15))])
def test_a_version_is_read_by_its_first_two_numbers(text: str, pair: tuple[int, int]) -> None:
    assert version_pair(text) == pair
