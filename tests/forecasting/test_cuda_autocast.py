"""Inside the block CPU autocast follows CUDA's lists; after it, its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from brim.forecasting.cuda_autocast import cuda_autocast_on_cpu, policies

HALF, SINGLE = torch.bfloat16, torch.float32


def x() -> torch.Tensor:
    return torch.randn(4, 8).to(HALF)


# What each gives on CUDA under autocast in bfloat16, and what it is given.
ON_CUDA: dict[str, tuple[Callable[[], torch.Tensor], torch.dtype]] = {
    "matmul": (lambda: torch.randn(4, 8) @ torch.randn(8, 4), HALF),
    "linear": (lambda: functional.linear(torch.randn(4, 8), torch.randn(2, 8)), HALF),
    "einsum": (lambda: torch.einsum("ab,bc->ac", torch.randn(4, 8), torch.randn(8, 2)), HALF),
    "conv2d": (lambda: functional.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)), HALF),
    "layer_norm": (lambda: functional.layer_norm(x(), (8,)), SINGLE),
    "group_norm": (lambda: functional.group_norm(x().view(1, 4, 8), 2), SINGLE),
    "softmax": (lambda: x().softmax(-1), SINGLE),
    "log_softmax": (lambda: x().log_softmax(-1), SINGLE),
    "softmax with its own dtype": (lambda: x().softmax(-1, dtype=torch.float64), torch.float64),
    "sum": (lambda: x().sum(), SINGLE),
    "sum over a dimension": (lambda: x().sum(1), SINGLE),
    "cumsum": (lambda: x().cumsum(1), SINGLE),
    "exp": (lambda: x().exp(), SINGLE),
    "pow": (lambda: x().pow(2), SINGLE),
    "norm": (lambda: x().norm(), SINGLE),
    "norm over a dimension": (lambda: x().norm(dim=1), SINGLE),
    "cross_entropy": (lambda: functional.cross_entropy(x(), torch.tensor([1, 2, 3, 4])), SINGLE),
    "mse_loss": (lambda: functional.mse_loss(x(), x()), SINGLE),
    "upsample": (lambda: functional.interpolate(x().view(1, 1, 4, 8), scale_factor=2, mode="bilinear"), SINGLE),
    "max_pool3d": (lambda: functional.max_pool3d(x().view(1, 2, 2, 2, 4), 2), HALF),
    "addcmul of both": (lambda: torch.addcmul(x(), x(), x().float()), SINGLE),
    "relu": (lambda: x().relu(), HALF),
    "gelu": (lambda: functional.gelu(x()), HALF),
    "double": (lambda: functional.layer_norm(x().double(), (8,)), torch.float64),
}


def dtype_of(name: str) -> torch.dtype:
    with torch.autocast("cpu", dtype=HALF):
        return ON_CUDA[name][0]().dtype


@pytest.mark.parametrize("name", ON_CUDA)
def test_an_operation_runs_in_the_precision_that_cuda_would_choose(name: str) -> None:
    before = dtype_of(name)
    with cuda_autocast_on_cpu():
        assert dtype_of(name) is ON_CUDA[name][1]
    assert dtype_of(name) is before


def test_some_of_these_differ_on_the_cpu() -> None:
    assert {name for name in ON_CUDA if dtype_of(name) is not ON_CUDA[name][1]} >= {
        "layer_norm",
        "softmax",
        "max_pool3d",
    }


def test_without_autocast_nothing_is_converted() -> None:
    with cuda_autocast_on_cpu():
        assert functional.layer_norm(x(), (8,)).dtype is HALF


def test_gradients_flow_through_the_conversions() -> None:
    weight = torch.randn(8, requires_grad=True)
    with cuda_autocast_on_cpu(), torch.autocast("cpu", dtype=HALF):
        functional.layer_norm(x(), (8,), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is SINGLE


def test_the_registrations_end_with_the_block_even_when_it_raises() -> None:
    before = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    with pytest.raises(ZeroDivisionError), cuda_autocast_on_cpu():
        raise ZeroDivisionError
    assert torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU") == before


def test_every_listed_policy_is_one_that_torch_has() -> None:
    found = policies()
    assert found["layer_norm"] == "float32"
    assert found["sum.dim_IntList"] == "float32_dtype"
    assert found["max_pool3d"] == "untouched"
    assert found["linear"] == "half"
