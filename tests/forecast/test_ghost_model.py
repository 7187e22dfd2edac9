"""Models are built and traced without their weights ever being made."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from traced_workloads import perceptron, rows, training

from brim.forecast.events import Event
from brim.forecast.ghost import Ghost
from brim.forecast.ghost_model import building_ghosts
from brim.forecast.trace import UntraceableError, trace_workload
from brim.models.build import WorkloadRequest, build_workload
from brim.workloads.forward import ForwardWorkload


def test_a_layer_of_forty_gigabytes_is_built_and_traced_in_none() -> None:
    with building_ghosts():
        model = nn.Linear(100_000, 100_000, bias=False)
    trace = trace_workload(training(model, lambda n: torch.randn(n, 100_000)), 4)
    weights = 4 * 100_000**2
    assert trace.live_at_peak() == {
        "weights": weights, "gradients": weights, "optimizer": 2 * weights, "inputs": 4 * 400_000, "temporary": weights,
        "buffers": 0, "activations": 4, "cache": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "request_",
    [
        WorkloadRequest(model="py:brim.models.small:convnet", mode="train", dtype="bfloat16"),
        WorkloadRequest(model="py:brim.models.small:transformer", mode="train", gradient_checkpointing=True),
        WorkloadRequest(model="torchvision:resnet18", mode="train", dtype="float16", optimizer="sgd"),
        WorkloadRequest(model="torchvision:vit_b_32", mode="forward", dtype="bfloat16"),
    ],
)
def test_a_trace_without_weights_is_that_with_weights(request_: WorkloadRequest) -> None:
    if "torchvision" in request_.model:
        pytest.importorskip("torchvision")
    real, _ = build_workload(request_)
    with building_ghosts():
        ghost, _ = build_workload(request_)
    assert any(isinstance(parameter, Ghost) for parameter in ghost.modules()[0].parameters())
    without, with_weights = trace_workload(ghost, 4), trace_workload(real, 4)
    # Autocast lets go of its weights in the order of their addresses: the same events, here and there in another order.
    assert Counter(map(described, without.events)) == Counter(map(described, with_weights.events))
    assert without.peak_allocated() == with_weights.peak_allocated()


def described(event: Event) -> tuple[str, int, str, str]:
    return event.kind, event.bytes, event.category, event.op


def test_what_a_constructor_reads_stays_real() -> None:
    with building_ghosts():
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        table = torch.arange(100_000)
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    assert table.sum().item() == 100_000 * 99_999 // 2


def test_building_leaves_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    with building_ghosts():
        perceptron()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_on_the_meta_device_is_traced_and_stays_there() -> None:
    with torch.device("meta"):
        model = perceptron()
    workload = training(model, rows)
    parameters = list(model.parameters())
    trace = trace_workload(workload, 8)
    assert trace.peak_allocated() == trace_workload(training(perceptron(), rows), 8).peak_allocated()
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert all(parameter.device.type == "meta" and parameter.grad is None for parameter in parameters)
    assert workload.optimizer.param_groups[0]["params"][0] is parameters[0]


def test_a_ghost_outside_of_a_trace_still_has_a_shape_and_no_data() -> None:
    with building_ghosts():
        model = nn.Linear(200, 300)
    weight = model.weight
    assert (tuple(weight.shape), weight.t().shape[0], weight.dtype) == ((300, 200), 200, torch.float32)
    assert "Ghost((300, 200)" in repr(weight)
    assert isinstance(weight, nn.Parameter)
    assert model.to(torch.bfloat16).weight.dtype is torch.bfloat16
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, Ghost)
    with pytest.raises(NotImplementedError):
        weight.untyped_storage()


def test_without_weights_there_is_no_real_step_to_fall_back_to() -> None:
    with building_ghosts():
        model = nn.Linear(200, 300)

    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(model(x).detach().numpy())

    model_and_numpy = ForwardWorkload(model=model, make_batch=lambda n: torch.randn(n, 100, 200), device="cpu")
    model_and_numpy.step = through_numpy  # type: ignore[method-assign]
    with pytest.raises(UntraceableError, match=r"built without its weights.*through numpy"):
        trace_workload(model_and_numpy, 8)
