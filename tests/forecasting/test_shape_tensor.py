"""Models on the meta device, or built for their shapes alone, are traced as if their weights were there."""

from __future__ import annotations

import copy
import resource
from collections import Counter

import pytest
import torch
from torch import nn

from brim.forecasting.events import Event
from brim.forecasting.shape_tensor import MAPPED_BYTES, ShapeTensor, make_shape_tensor, without_initialisation
from brim.forecasting.trace import UntraceableError, trace_workload
from brim.models.build import build_workload
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.inference import ForwardWorkload
from tests.forecasting.traced_workloads import perceptron, rows, training


def test_a_layer_of_forty_gigabytes_is_built_and_traced_in_none() -> None:
    with torch.device("meta"):
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
def test_a_trace_of_weights_never_filled_is_that_of_filled_ones(request_: WorkloadRequest) -> None:
    if "torchvision" in request_.model:
        pytest.importorskip("torchvision")
    real, _ = build_workload(request_)
    with without_initialisation():
        skeleton, _ = build_workload(request_)
    without, with_weights = trace_workload(skeleton, 4), trace_workload(real, 4)
    # Autocast lets go of its weights in the order of their addresses: the same events, here and there in another order.
    assert Counter(map(described, without.events)) == Counter(map(described, with_weights.events))
    assert without.peak_allocated() == with_weights.peak_allocated()


def described(event: Event) -> tuple[str, int, str, str]:
    return event.kind, event.bytes, event.category, event.op


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


def test_a_shape_tensor_outside_of_a_trace_still_has_a_shape_and_no_data() -> None:
    shape_tensor = make_shape_tensor((300, 200), (200, 1), torch.float32, torch.device("cpu"), None)
    assert (tuple(shape_tensor.shape), shape_tensor.t().shape[0], shape_tensor.dtype) == (
        (300, 200),
        200,
        torch.float32,
    )
    assert "ShapeTensor((300, 200)" in repr(shape_tensor)
    assert shape_tensor.to(torch.bfloat16).dtype is torch.bfloat16
    assert isinstance(copy.deepcopy(shape_tensor), ShapeTensor)
    with pytest.raises(NotImplementedError):
        shape_tensor.untyped_storage()


def test_without_weights_there_is_no_real_step_to_fall_back_to() -> None:
    with torch.device("meta"):
        model = nn.Linear(200, 300)

    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(model(x).detach().numpy())

    model_and_numpy = ForwardWorkload(model=model, make_batch=lambda n: torch.randn(n, 100, 200), device="cpu")
    model_and_numpy.step = through_numpy  # type: ignore[method-assign]
    with pytest.raises(UntraceableError, match=r"built without its weights.*through numpy"):
        trace_workload(model_and_numpy, 8)


def test_where_no_approximation_is_wanted_the_step_is_not_run_for_real() -> None:
    ran: list[torch.Tensor] = []

    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        halved = torch.from_numpy((x / 2).numpy())
        ran.append(halved)
        return halved

    workload = ForwardWorkload(model=nn.Identity(), make_batch=lambda n: torch.randn(n, 100, 200), device="cpu")
    workload.step = through_numpy  # type: ignore[method-assign]
    with pytest.raises(UntraceableError, match=r"^NotImplementedError: .*through numpy"):
        trace_workload(workload, 8, or_approximately=False)
    assert not ran
    assert trace_workload(workload, 8).approximate is not None
    assert ran


def test_the_shapes_are_those_of_a_model_built_for_real() -> None:
    with without_initialisation():
        skeleton = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))
    real = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))
    assert [tuple(p.shape) for p in skeleton.parameters()] == [tuple(p.shape) for p in real.parameters()]


def test_initialisation_is_restored_also_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="in the block"), without_initialisation():
        raise RuntimeError("in the block")
    weight = torch.full((64, 64), 7.0)
    nn.init.normal_(weight)
    assert (weight != 7).any()
    torch.manual_seed(0)
    first = nn.Linear(4, 4).weight.clone()
    torch.manual_seed(0)
    with without_initialisation():
        nn.Linear(4, 4)
    assert torch.equal(nn.Linear(4, 4).weight, first)  # and the generator has not moved


def test_a_model_larger_than_this_test_may_use_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with without_initialisation():
        model = nn.Linear(2**14, 2**15, bias=False)  # 2 GiB
    assert model.weight.numel() * 4 == 2 * 2**30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 2**19


def test_random_numbers_that_a_model_reads_while_it_is_built_are_drawn() -> None:
    with without_initialisation():
        small = torch.empty(1000).uniform_(2, 3)
        large = torch.zeros(MAPPED_BYTES // 4).normal_()
    assert small.min() >= 2
    assert (large == 0).all()


def test_an_initialisation_that_draws_until_values_are_in_range_ends() -> None:
    with without_initialisation():
        table = torch.empty(7000, 3)
        assert nn.init.trunc_normal_(table) is table
