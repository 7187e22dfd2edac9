"""A step that cannot be traced is run for real at two small sizes, and that is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from brim.forecasting.trace import UntraceableError, _metered, approximate_trace, trace_workload
from brim.workloads.callables import CallableWorkload
from tests.forecasting.traced_workloads import convolutional, perceptron, rows, training


class ThroughNumpy(nn.Module):
    """Leaves torch in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(torch.from_numpy(x.detach().numpy() * 2))
        return result


def through_numpy() -> torch.nn.Module:
    return ThroughNumpy()


large = nn.Linear(64, 4096)


def batch(count: int) -> torch.Tensor:
    return torch.randn(count, 100, 64)


def test_a_step_through_numpy_is_extended_from_real_ones() -> None:
    trace = trace_workload(training(through_numpy(), batch), 16)
    assert trace.approximate is not None
    assert trace.approximate.startswith("extended from real steps at batch sizes 1 and 2 on the CPU")
    assert "numpy" in trace.approximate
    assert trace.batch_size == 16
    real = _metered(training(through_numpy(), batch), 16, 2)
    assert trace.peak_allocated() == real.peak_allocated()  # this one does grow in a line


def test_sparse_gradients_are_extended_too() -> None:
    model = nn.Embedding(1000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    workload = training(model, lambda n: torch.randint(0, 1000, (n, 16)), optimizer=optimizer)
    trace = trace_workload(workload, 8)
    assert trace.approximate is not None
    assert "sparse" in trace.approximate
    assert trace.peak_allocated() > 4 * 1000 * 64


def test_the_real_steps_leave_the_state_as_it_was() -> None:
    workload = training(through_numpy(), batch)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    random_state = torch.get_rng_state()
    trace_workload(workload, 4)
    assert all(torch.equal(value, before[name]) for name, value in workload.model.state_dict().items())
    assert not workload.optimizer.state
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_an_error_of_the_step_itself_is_named() -> None:
    model = perceptron()
    wrong = training(model, lambda n: torch.randn(n, 63))
    with pytest.raises(UntraceableError, match="run for real on the CPU at batch size 1 it raised RuntimeError"):
        trace_workload(wrong, 4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(63, 8), "cannot be multiplied"),
        (nn.LayerNorm(63), "normalized_shape"),
        (lambda x: large(x).roll(1, 2), "[Dd]imension"),
        (lambda x: torch.add(large(x), large(x), alpha=2j), "alpha"),
    ],
)
def test_a_forward_that_torch_refuses_is_not_forecast(
    model: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    workload = CallableWorkload(step=torch.no_grad()(model), make_batch=rows)
    with pytest.raises(UntraceableError, match=message):
        trace_workload(workload, 4)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_an_extension_meets_the_real_peak_of_a_step_that_grows_in_a_line(size: int) -> None:
    extended = approximate_trace(convolutional(), size, steps=2, why="a test")
    assert extended.peak_allocated() == pytest.approx(_metered(convolutional(), size, 2).peak_allocated(), rel=0.01)


def test_a_step_that_differs_between_sizes_is_extended_in_proportion() -> None:
    model = nn.Linear(64, 64)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[0]):
            x = model(x)
        return x.mean()

    workload = training(model, rows, loss)
    small = approximate_trace(workload, 2, steps=2, why="a test")
    large = approximate_trace(workload, 64, steps=2, why="a test")
    assert small.resident()["weights"] == large.resident()["weights"]
    assert large.peak_allocated() > small.peak_allocated()
