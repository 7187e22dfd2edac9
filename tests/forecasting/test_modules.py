"""Bytes by module at the peak: whose each block is, in the forward and in the backward, and that the rows add up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from brim.forecasting.events import BATCH, OUTSIDE
from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
from brim.forecasting.trace import approximate_trace, trace_workload
from brim.records import Forecast
from brim.workloads.base import Workload
from brim.workloads.callables import CallableWorkload
from tests.forecasting.traced_workloads import Residual, convolutional, pairwise, perceptron, rows, training

FLOAT = 4


def forecast(workload: Workload, size: int, depth: int = 8) -> Forecast:
    return Forecaster(TracedWorkload(workload), choose_gpu("a100-80gb", None)).at(size, depth=depth)


def residuals() -> Workload:
    return training(nn.Sequential(nn.Linear(64, 256), Residual(), Residual()), rows)


@pytest.mark.parametrize("make", [convolutional, pairwise, residuals, lambda: training(perceptron(), rows)])
@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("depth", [0, 1, 8])
def test_rows_add_up_to_the_allocated_peak_and_to_its_parts(
    make: Callable[[], Workload], size: int, depth: int
) -> None:
    found = forecast(make(), size, depth)
    assert sum(row.bytes for row in found.by_module) == found.peak_allocated_bytes
    assert all(sum(row.parts.values()) == row.bytes > 0 for row in found.by_module)
    beside = {"cached", "context", "communication"}
    for part, count in found.breakdown.items():
        if part not in beside:
            assert sum(row.parts.get(part, 0) for row in found.by_module) == count, part
    assert len({row.module for row in found.by_module}) == len(found.by_module)


def test_rows_of_sizes_between_traces_that_differ_add_up() -> None:
    def step(batch: torch.Tensor) -> None:
        hidden = model(batch)
        for _ in range(len(batch)):  # more requests with every item: peaks are fitted
            hidden = hidden.clone()

    model = nn.Linear(64, 4096)
    workload = CallableWorkload(step=step, make_batch=rows, model=model)
    forecaster = Forecaster(TracedWorkload(workload), choose_gpu("t4", None))
    found = forecaster.at(24, depth=1)
    assert not forecaster.model().simulated
    assert sum(row.bytes for row in found.by_module) == found.peak_allocated_bytes


def test_figures_of_a_forward_are_those_computed_by_hand() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 1024, bias=False), nn.Linear(1024, 512, bias=False)

        def forward(self, batch: torch.Tensor) -> Any:
            hidden = self.first(batch)
            return hidden, self.second(hidden), hidden.repeat(1, 64)

    size = 256
    model = Two()
    workload = CallableWorkload(step=model, make_batch=rows, model=model)
    found = {row.module: row for row in forecast(workload, size).by_module if not row.module.startswith("(kept")}
    assert {name: dict(row.parts) for name, row in found.items() if name} == {
        "first": {"weights": 64 * 1024 * FLOAT, "activations": size * 1024 * FLOAT},
        "second": {"weights": 1024 * 512 * FLOAT, "activations": size * 512 * FLOAT},
        BATCH: {"inputs": size * 64 * FLOAT},
    }
    assert dict(found[""].parts) == {"activations": 64 * size * 1024 * FLOAT}  # what the model adds by itself


def test_the_backward_of_a_module_takes_memory_in_its_name() -> None:
    trace = trace_workload(residuals(), 128)
    assert {"0", "1.inner", "1.outer", "2.inner", "2.outer"} <= {event.module for event in trace.events}
    gradients = {event.module for event in trace.events if event.category == "gradients"}
    state = {event.module for event in trace.events if event.category == "optimizer"}
    assert gradients == state == {"0", "1.inner", "1.outer", "2.inner", "2.outer"}
    # ReLU's backward runs for the block whose forward called it.
    relu = {event.module for event in trace.events if event.op == "aten.threshold_backward" and event.kind == "alloc"}
    assert relu == {"1", "2"}


def test_a_loss_outside_of_the_model_is_no_module_s() -> None:
    trace = trace_workload(pairwise(), 96)
    pairs = [event for event in trace.events if event.kind == "alloc" and event.bytes == 96 * 96 * FLOAT]
    assert pairs
    assert {event.module for event in pairs} == {OUTSIDE}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_takes_memory_in_the_name_of_its_module(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.blocks = nn.Linear(64, 256), nn.ModuleList([Residual(), Residual()])

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            hidden = self.head(batch)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
            return hidden

    trace = trace_workload(training(Checkpointed(), rows), 64)
    first, second = trace.step_starts
    products = [
        event.module
        for event in trace.events[first:second]
        if event.kind == "alloc" and event.op in ("aten.addmm", "aten.linear")
    ]
    # Once in the forward, once recomputed, the last block first.
    assert products[:5] == ["head", "blocks.0.inner", "blocks.0.outer", "blocks.1.inner", "blocks.1.outer"]
    assert products[5] == "blocks.1.inner"
    assert set(products[5:]) >= {"blocks.1.inner", "blocks.0.inner"}
    wanted = {"head", "blocks.0.inner", "blocks.0.outer", "blocks.1.inner", "blocks.1.outer"}
    assert {event.module for event in trace.events if event.category == "gradients"} == wanted


def test_modules_that_were_not_handed_over_are_named_by_their_class() -> None:
    inner, outer = nn.Linear(64, 256), perceptron()
    workload = CallableWorkload(step=lambda batch: (inner(batch), outer(batch)), make_batch=rows, model=outer)
    names = {event.module for event in trace_workload(workload, 64).events}
    assert {"Linear", "0", "2", "4"} <= names


def test_several_models_have_their_class_in_front() -> None:
    first, second = nn.Linear(64, 256), nn.Linear(256, 64)
    workload = CallableWorkload(step=lambda batch: second(first(batch)), make_batch=rows, model=[first, second])
    names = {event.module for event in trace_workload(workload, 64).events if event.category == "weights"}
    assert names == {"Linear", "Linear-2"}


def test_a_loss_that_every_step_makes_anew_has_one_name() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model(batch)
        return nn.MSELoss()(hidden, torch.zeros_like(hidden))

    events = trace_workload(training(perceptron(), rows, loss), 64).events
    assert {event.module for event in events if event.module.startswith("MSELoss")} == {"MSELoss"}


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module_has_the_names_of_what_it_wraps(whole: bool) -> None:
    def names(model: nn.Module) -> set[str]:
        return {event.module for event in trace_workload(training(model, rows), 64).events}

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), Residual())

    compiled = model()
    if whole:
        compiled = torch.compile(compiled)
    else:
        compiled[1] = torch.compile(compiled[1])
    assert names(compiled) == names(model())


def test_a_parameter_that_parent_and_child_share_has_one_owner() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 256)
            self.weight = self.inner.weight

        def forward(self, batch: torch.Tensor) -> Any:
            return self.inner(batch)

    events = trace_workload(training(Parent(), rows), 64).events
    owners = {
        category: {event.module for event in events if event.category == category and event.bytes == 64 * 256 * FLOAT}
        for category in ("weights", "gradients", "optimizer")
    }
    assert owners["weights"] == owners["gradients"] == owners["optimizer"] == {""}


def test_a_step_that_raises_inside_a_module_and_continues_is_attributed_rightly() -> None:
    class Raises(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            raise ValueError("not this way")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Raises(), nn.Linear(64, 256)

        def forward(self, batch: torch.Tensor) -> Any:
            try:
                return self.bad(batch)
            except ValueError:
                return self.good(batch), batch * 2

    model = Tries()
    workload = CallableWorkload(step=model, make_batch=rows, model=model)
    trace = trace_workload(workload, 64)
    assert "bad" not in {event.module for event in trace.events}
    assert {event.module for event in trace.events if event.op == "aten.mul"} == {""}


def test_real_steps_are_attributed_as_traced_ones() -> None:
    traced = trace_workload(residuals(), 8)
    metered = approximate_trace(residuals(), 8, steps=2, why="for this test")
    for category in ("weights", "gradients", "optimizer"):
        assert {event.module for event in metered.events if event.category == category} == {
            event.module for event in traced.events if event.category == category
        }
    kept = {event.module for event in metered.events if event.category == "activations"}
    assert {"0", "1", "2"} <= kept


def test_hooks_are_gone_after_a_trace() -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    trace_workload(residuals(), 4)
    assert (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)) == before


@pytest.mark.filterwarnings("ignore")
def test_kinds_and_modules_agree_with_torch_s_memory_tracker() -> None:
    """At the end of the forward: parameters, buffers and the batch alike, activations alike, module by module."""
    tools = pytest.importorskip("torch.distributed._tools.mem_tracker")
    size = 512

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks, self.norm = (
                nn.Linear(64, 256),
                nn.ModuleList([Residual(), Residual()]),
                nn.Linear(256, 10),
            )

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            hidden = self.first(batch)
            for block in self.blocks:
                hidden = block(hidden)
            return self.norm(hidden)

    def snapshots(model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by kind after a forward, and what each module's forward has added, as torch's tracker sees it."""
        batch = torch.randn(size, 64)
        tracker = tools.MemTracker()
        tracker.track_external(model, batch)
        with tracker:
            output = model(batch)
            now = {str(kind): count for kind, count in tracker.get_tracker_snapshot("current")[batch.device].items()}
        added = {}
        for stats in tracker.memory_tracking.values():
            states = {str(state): snaps[-1][batch.device] for state, snaps in stats.snapshots.items()}
            after, before = states["_ModState.POST_FW"], states["_ModState.PRE_FW"]
            added[stats.mod_fqn] = after["Total"] - before["Total"]
        del output
        return now, added

    model = Net()
    now, added = snapshots(model)
    gc.collect()
    trace = trace_workload(training(Net(), rows, lambda model, batch: model(batch).sum()), size)
    start = trace.step_starts[0]
    end = next(index for index, event in enumerate(trace.events) if index > start and event.op == "aten.sum")
    live: dict[int, Any] = {}
    for event in trace.events[:end]:
        if event.kind == "alloc":
            live[event.block] = event
        else:
            live.pop(event.block, None)

    def held(*categories: str) -> int:
        return sum(event.bytes for event in live.values() if event.category in categories)

    by_kind = {kind.rpartition(".")[2]: count for kind, count in now.items()}
    assert held("weights") == by_kind["PARAM"]
    assert held("activations", "temporary") == by_kind["ACT"]
    for name in ("first", "blocks.0", "blocks.1", "norm"):
        mine = sum(
            event.bytes
            for event in live.values()
            if event.category in ("activations", "temporary")
            and (event.module == name or event.module.startswith(f"{name}."))
        )
        assert mine == added[f"Net.{name}"], name


def test_functional_code_of_a_parent_is_the_parent_s() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(64, 64)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return functional.gelu(self.child(batch))

    model = Parent()
    trace = trace_workload(training(model, rows), 64)
    assert {event.module for event in trace.events if event.op == "aten.gelu"} == {""}
    assert {event.module for event in trace.events if event.op == "aten.gelu_backward"} == {""}
