"""The second step of a further size, concluded from one that was traced in full: the same trace to the byte."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from brim.forecasting.events import Trace
from brim.forecasting.forecast import TracedWorkload
from brim.forecasting.later_steps import repeats_its_first_step, with_second_step
from brim.forecasting.trace import trace_workload
from brim.workloads.base import Workload
from brim.workloads.inference import ForwardWorkload
from tests.forecasting.traced_workloads import convolutional, pairwise, perceptron, rows, training


def forward() -> ForwardWorkload:
    return ForwardWorkload(model=perceptron(), make_batch=rows, device="cpu")


def requests(trace: Trace) -> tuple[object, ...]:
    return trace.batch_size, trace.events, trace.step_starts, trace.convolutions, trace.reductions, trace.attention


@pytest.mark.parametrize("make", [lambda: training(perceptron(), rows), convolutional, pairwise, forward])
def test_a_concluded_trace_is_that_of_two_steps(make) -> None:
    workload: Workload = make()
    whole = trace_workload(workload, 2)
    assert repeats_its_first_step(whole)
    concluded = with_second_step(trace_workload(workload, 8, steps=1), whole)
    assert concluded is not None
    assert requests(concluded) == requests(trace_workload(workload, 8))


class Counting(nn.Module):
    """A perceptron that notes its forwards; `keeps`: and holds on to a tensor that the first one makes."""

    def __init__(self, forwards: list[int], *, keeps: bool = False) -> None:
        super().__init__()
        self.inner, self.keeps = perceptron(), keeps
        self.note = forwards.append  # a list inside would be put back after a trace
        self.kept: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.note(len(batch))
        if self.keeps and self.kept is None:
            self.kept = (batch * 2).detach()
        return self.inner(batch)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "ASGD", "Rprop", "RMSprop", "RAdam"])
def test_a_repeated_step_is_that_of_two_steps(name: str) -> None:
    def traced(*, repeats: bool) -> tuple[Trace, int]:
        forwards: list[int] = []
        model = Counting(forwards)
        optimizer = getattr(torch.optim, name)(model.parameters(), **({"momentum": 0.9} if name == "SGD" else {}))
        trace = trace_workload(training(model, rows, optimizer=optimizer, repeats=repeats), 8)
        return trace, len(forwards)

    (once, forwards), (twice, real) = traced(repeats=True), traced(repeats=False)
    assert (forwards, real) == (1, 2)
    assert requests(once) == requests(twice)
    assert (once.gemm_calls, once.backward_gemm_calls, once.lt_calls) == (
        twice.gemm_calls, twice.backward_gemm_calls, twice.lt_calls,
    )  # fmt: skip


def test_convolutions_and_buffers_are_repeated_in_their_places() -> None:
    workload = convolutional()
    whole = trace_workload(workload, 4)
    workload._repeats = True
    assert whole.convolutions
    assert requests(trace_workload(workload, 4)) == requests(whole)


def test_a_second_step_is_traced_where_the_first_keeps_a_tensor() -> None:
    forwards: list[int] = []
    trace_workload(training(Counting(forwards, keeps=True), rows, repeats=True), 8)
    assert len(forwards) == 2


def test_gradients_from_before_are_dropped_by_both_steps_alike() -> None:
    model = perceptron()
    model(rows(2)).sum().backward()
    once, twice = (trace_workload(training(model, rows, repeats=repeats), 8) for repeats in (True, False))
    assert requests(once) == requests(twice)


def test_a_first_step_of_other_operations_concludes_nothing() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).relu() if len(batch) > 4 else self.layer(batch)

    workload = ForwardWorkload(model=Branching(), make_batch=rows, device="cpu")
    assert with_second_step(trace_workload(workload, 8, steps=1), trace_workload(workload, 2)) is None
    traced = TracedWorkload(workload)
    traced.at(2, None)
    assert requests(traced.at(8, None)) == requests(trace_workload(workload, 8))


def test_a_second_step_of_its_own_is_noticed() -> None:
    calls: list[int] = []

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (model(batch) if len(calls) % 2 else model(batch).exp()).square().mean()

    whole = trace_workload(training(perceptron(), rows, step), 2)
    assert not repeats_its_first_step(whole)
    assert not repeats_its_first_step(dataclasses.replace(whole, step_starts=whole.step_starts[:1]))


def test_a_further_size_is_traced_for_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def counted(workload: Workload, size: int, **options: object) -> Trace:
        steps.append(options.get("steps", 2))
        return trace_workload(workload, size, **options)

    monkeypatch.setattr("brim.forecasting.forecast.trace_workload", counted)
    traced = TracedWorkload(training(perceptron(), rows))
    for size in (2, 8, 2, 32):
        traced.at(size, None)
    assert steps == [2, 1, 1]
