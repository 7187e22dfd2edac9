from __future__ import annotations

from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.training.fast_path.update_rules import rule_for
from brim.workloads.optimizers import make_optimizer

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"momentum": 0.0}),
    ("sgd", {}),
    ("sgd", {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.8, "nesterov": True}),
    ("sgd", {"maximize": True}),
    ("adam", {}),
    ("adam", {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.2}),
    ("AdamW", {}),
    ("adamw", {"weight_decay": 0.3, "betas": [0.5, 0.7], "maximize": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_twenty_steps_equal_torch_optim(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rule = rule_for(name, options)
    assert rule is not None
    lrs = [0.1, 0.003]
    start = torch.randn(2, 5, dtype=dtype)
    plain = [row.clone().requires_grad_() for row in start]
    optimizers = [make_optimizer(name, [parameter], lr) for parameter, lr in zip(plain, lrs, strict=True)]
    for optimizer in optimizers:
        optimizer.param_groups[0].update(options)
    weights, state = start.clone(), rule.start(start)
    lr = torch.tensor(lrs, dtype=torch.float64)[:, None]
    taken = torch.zeros(2, 1, dtype=torch.float64)
    for _ in range(20):
        gradients = torch.randn(2, 5, dtype=dtype)
        rule.step(weights, gradients.clone(), state, lr=lr, taken=taken)
        for parameter, optimizer, gradient in zip(plain, optimizers, gradients, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(weights, torch.stack([row.detach() for row in plain]), rtol=tolerance, atol=tolerance)


def test_a_run_that_is_not_active_keeps_weights_state_and_count() -> None:
    rule = rule_for("adamw")
    assert rule is not None
    weights = torch.ones(2, 3)
    state, taken = rule.start(weights), torch.zeros(2, 1, dtype=torch.float64)
    active = torch.tensor([[True], [False]])
    gradients = torch.tensor([[1.0, 2.0, 3.0], [torch.nan] * 3])
    rule.step(weights, gradients, state, lr=torch.full((2, 1), 0.1), taken=taken, active=active)
    assert torch.equal(weights[1], torch.ones(3))
    assert not torch.equal(weights[0], torch.ones(3))
    assert [float(part[1].abs().sum()) for part in state] == [0.0, 0.0]
    assert taken.flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "options"), [("adagrad", {}), ("lbfgs", {}), ("muon", {}), ("adam", {"amsgrad": True})]
)
def test_what_has_no_elementwise_form_has_no_rule(name: str, options: dict[str, Any]) -> None:
    assert rule_for(name, options) is None


def test_how_torch_computes_does_not_matter() -> None:
    assert rule_for("adam", {"foreach": True, "fused": False, "capturable": True}) == rule_for("adam")


def test_nesterov_without_momentum_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(RequestError, match="nesterov needs a momentum"):
        rule_for("sgd", {"momentum": 0.0, "nesterov": True})
