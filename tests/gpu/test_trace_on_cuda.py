"""A trace on a machine with a card: the same events as without one, and none of the card's memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from brim.forecasting.events import Target, Trace
from brim.forecasting.trace import trace_workload
from brim.models.build import build_workload
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.base import Workload
from brim.workloads.train_step import TrainStepWorkload

pytestmark = pytest.mark.gpu


def this_card() -> Target:
    properties = torch.cuda.get_device_properties(0)
    return Target(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
    )


def built(device: str, **request: Any) -> Workload:
    return build_workload(WorkloadRequest(device=device, **request))[0]


CASES: dict[str, Callable[[str], Workload]] = {
    "convnet": lambda device: built(device, model="py:brim.models.small:convnet", mode="train", dtype="bfloat16"),
    "transformer": lambda device: built(device, model="py:brim.models.small:transformer", mode="train"),
    "float16": lambda device: built(device, model="py:brim.models.small:convnet", mode="train", dtype="float16"),
    "forward": lambda device: built(device, model="py:brim.models.small:transformer", dtype="bfloat16"),
}


def described(trace: Trace) -> Counter[tuple[str, int, str]]:
    return Counter((event.kind, event.bytes, event.op) for event in trace.events if event.bytes > 512)


@pytest.mark.parametrize("name", CASES)
def test_the_events_are_those_of_a_trace_without_a_card(name: str) -> None:
    here, without = (trace_workload(CASES[name](device), 8, target=this_card()) for device in ("cuda", "cpu"))
    assert here.approximate is None
    assert here.attention == without.attention
    assert described(here) == described(without)


@pytest.mark.parametrize("name", CASES)
def test_the_modules_are_those_of_a_trace_without_a_card(name: str) -> None:
    """There the backward runs in a thread of its own, which numbers its nodes by itself."""
    here, without = (trace_workload(CASES[name](device), 8, target=this_card()) for device in ("cuda", "cpu"))
    counts = (
        Counter((event.module, event.op) for event in trace.events if event.kind == "alloc" and event.bytes > 512)
        for trace in (here, without)
    )
    assert next(counts) == next(counts)


def test_a_trace_takes_no_memory_of_the_card_and_leaves_the_model_there() -> None:
    workload = CASES["convnet"]("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trace_workload(workload, 4096, target=this_card())
    assert torch.cuda.max_memory_allocated() - before < 2**20
    (model,) = workload.modules()
    assert all(type(p) is nn.Parameter and p.is_cuda and p.grad is None for p in model.parameters())


def test_a_step_may_read_integers_that_are_on_the_card() -> None:
    seen: list[Any] = []
    lengths = torch.tensor([3, 5], device="cuda")

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(8, device="cuda") < lengths[:, None]
        seen.append((int(mask.sum()), lengths.tolist(), tuple(batch[mask].shape)))
        return model(batch)[mask].mean()

    model = nn.Linear(64, 64).cuda()
    workload = TrainStepWorkload(
        model=model,
        make_batch=lambda n: torch.randn(n, 8, 64, device="cuda"),
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters()),
        device="cuda",
    )
    assert trace_workload(workload, 2).approximate is None
    assert seen[0] == (8, [3, 5], (8, 64))


@pytest.mark.parametrize("name", CASES)
def test_a_trace_meets_the_peak_that_torch_counts(name: str) -> None:
    workload = CASES[name]("cuda")
    trace = trace_workload(workload, 256, target=this_card())
    batch = workload.make_batch(256)
    for _ in range(2):
        workload.step(batch)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    workload.step(batch)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated()
    workspaces = 2 * 33 * 2**20  # of cuBLAS, at most: they are not in a trace
    assert 0.97 * trace.peak_allocated() <= measured <= 1.1 * trace.peak_allocated() + workspaces
