"""How far a step had come when it failed, by where the error was raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from brim.memory.failing_place import progress_at


class Failing(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory.")


class FailsForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory.")


class Kernel(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return FailsForward.apply(inputs)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory.")


def place_of(run: Callable[[], object]) -> float | None:
    with pytest.raises(RuntimeError) as caught:
        run()
    return progress_at(caught.value.__traceback__)


def test_a_forward_that_fails_in_a_module_has_come_as_far_as_that_one() -> None:
    layers = [nn.Linear(2, 2) for _ in range(8)]
    model = nn.Sequential(nn.Sequential(*layers[:6]), nn.Sequential(Failing(), *layers[6:]))
    assert place_of(lambda: model(torch.ones(1, 2))) == pytest.approx(0.9 * 7 / 9)


def test_a_forward_is_one_inside_of_a_kernel_of_its_own_or_of_an_optimizers_closure() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Kernel(), nn.Linear(2, 2))
    assert place_of(lambda: model(torch.ones(1, 2))) == pytest.approx(0.9 * 2 / 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert place_of(lambda: optimizer.step(lambda: model(torch.ones(1, 2)))) == pytest.approx(0.9 * 2 / 3)
    weight = torch.ones(2, requires_grad=True)
    assert place_of(lambda: optimizer.step(lambda: FailsBackward.apply(weight).sum().backward())) == 1.0


def test_a_failing_backward_or_optimizer_step_has_everything_in_memory() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert place_of(lambda: torch.autograd.backward(FailsBackward.apply(weight).sum())) == 1.0

    class Exploding(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("CUDA out of memory.")

    assert place_of(Exploding([weight], lr=0.1).step) == 1.0


def test_a_failure_outside_of_modules_says_nothing() -> None:
    def plain() -> None:
        raise RuntimeError("CUDA out of memory.")

    assert place_of(plain) is None
    assert place_of(lambda: Failing()(torch.ones(1))) is None  # no part of anything
    assert progress_at(None) is None
