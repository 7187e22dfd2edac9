"""Forecasts against a real allocator: peaks, a run capped at the forecast, and traces made with and without a card."""

from __future__ import annotations

import pytest
import torch

from brim.forecasting.forecast import Forecaster, TracedWorkload, gpu_of_device
from brim.memory.devices import DEFAULT_MARGIN, CudaMemory
from brim.models.build import build_workload
from brim.searching.find import find_plan
from brim.settings.find_settings import SearchSettings, WorkloadRequest
from brim.workloads.base import Workload

pytestmark = pytest.mark.gpu

CASES = {
    "resnet18 train": (WorkloadRequest(model="resnet18", mode="train", dtype="bfloat16"), 32),
    "resnet18 train float32 sgd": (WorkloadRequest(model="resnet18", mode="train", optimizer="sgd"), 32),
    "vit_b_16 forward": (WorkloadRequest(model="vit_b_16", mode="forward", dtype="bfloat16"), 64),
    "convnet checkpointed": (
        WorkloadRequest(
            model="py:brim.models.small:convnet", mode="train", knobs={"size": 64}, gradient_checkpointing=True
        ),
        128,
    ),
    "transformer train": (
        WorkloadRequest(model="py:brim.models.small:transformer", mode="train", dtype="bfloat16"),
        128,
    ),
}


def build(name: str, device: str) -> tuple[Workload, int]:
    request, size = CASES[name]
    fields = {**request.to_json(), "device": device}
    return build_workload(WorkloadRequest.from_json(fields))[0], size


def forecast_of(workload: Workload, size: int):
    return Forecaster(TracedWorkload(workload), gpu_of_device(0)).at(size)


def peaks(workload: Workload, size: int) -> tuple[int, int]:
    memory = CudaMemory(torch.device("cuda", 0))
    with memory.metered() as reading:
        batch = workload.make_batch(size)
        for _ in range(3):
            workload.step(batch)
    return reading.peak_allocated_bytes, reading.peak_reserved_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_forecast_meets_the_measured_peaks(name: str) -> None:
    forecast = forecast_of(*build(name, "cpu"))
    workload, size = build(name, "cuda")
    base = torch.cuda.memory_allocated()
    resident = sum(t.numel() * t.element_size() for m in workload.modules() for t in (*m.parameters(), *m.buffers()))
    others = max(base - resident, 0)  # what earlier tests left on the card: workspaces of cuBLAS
    allocated, reserved = peaks(workload, size)
    assert abs(forecast.peak_allocated_bytes / (allocated - others) - 1) < 0.08
    assert forecast.peak_reserved_bytes > 0.85 * (reserved - others)
    assert forecast.peak_reserved_bytes < 1.3 * reserved


@pytest.mark.parametrize("name", CASES)
def test_a_run_limited_to_forecast_plus_margin_has_no_oom(name: str) -> None:
    workload, size = build(name, "cuda")
    forecast = forecast_of(build(name, "cpu")[0], size)
    memory = CudaMemory(torch.device("cuda", 0))
    left = 96 * 2**20  # workspaces that earlier tests have left in this process
    with memory.limited(int(forecast.peak_reserved_bytes / (1 - DEFAULT_MARGIN)) + left):
        peaks(workload, size)


@pytest.mark.parametrize("name", CASES)
def test_a_trace_of_a_workload_on_the_card_is_that_of_one_on_the_cpu(name: str) -> None:
    here, size = build(name, "cuda")
    before = torch.cuda.memory_allocated()
    on_cuda = forecast_of(here, size)
    assert torch.cuda.memory_allocated() == before  # tracing takes no memory of the card
    on_cpu = forecast_of(build(name, "cpu")[0], size)
    assert abs(on_cuda.peak_allocated_bytes / on_cpu.peak_allocated_bytes - 1) < 0.005


def test_tracing_leaves_the_weights_of_a_workload_on_the_card_as_they_were() -> None:
    workload, size = build("resnet18 train", "cuda")
    before = [tensor.clone() for module in workload.modules() for tensor in (*module.parameters(), *module.buffers())]
    forecast_of(workload, size)
    after = [tensor for module in workload.modules() for tensor in (*module.parameters(), *module.buffers())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(parameter.grad is None for module in workload.modules() for parameter in module.parameters())
    assert all(not optimizer.state for optimizer in workload.optimizers())


def test_a_search_starts_from_the_forecast_and_makes_no_failure() -> None:
    workload, _ = build("resnet18 train", "cuda")
    plan = find_plan(workload, SearchSettings(memory_limit_bytes=16 * 2**30, use_cache=False))
    assert not any("without a forecast" in note for note in plan.notes)
    assert plan.oom_events == 0
    assert len(plan.probes) <= 5
    assert plan.probes[0].batch_size > 1


def test_the_card_of_this_machine_is_known() -> None:
    card = gpu_of_device(0)
    assert card.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert card.usable_bytes < card.memory_bytes
