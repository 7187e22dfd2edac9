from __future__ import annotations

import pytest
import torch
from torch import nn

from brim.errors import RequestError
from brim.workloads.optimizers import make_optimizer
from brim.workloads.train_step import TrainStepWorkload


def make(
    optimizer: str = "adamw", *, scaler: torch.amp.GradScaler | None = None, autocast_dtype: torch.dtype | None = None
) -> TrainStepWorkload:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return TrainStepWorkload(
        model=model,
        make_batch=lambda n: torch.ones(n, 4),
        loss=lambda model, batch: model(batch).float().square().mean(),
        optimizer=make_optimizer(optimizer, model.parameters()),
        device="cpu",
        autocast_dtype=autocast_dtype,
        scaler=scaler,
    )


def overflowing_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the first scaled gradients are infinite


def test_a_step_equals_the_plain_loop() -> None:
    workload, plain = make(), make()
    batch = torch.ones(3, 4)
    workload.step(batch)
    plain.model(batch).square().mean().backward()
    plain.optimizer.step()
    assert torch.equal(workload.model.weight, plain.model.weight)


def test_gradients_of_the_step_before_are_not_added() -> None:
    once, twice = make("sgd"), make("sgd")
    batch = torch.ones(3, 4)
    for group in (*once.optimizer.param_groups, *twice.optimizer.param_groups):
        group["lr"] = 0.0
    once.step(batch)
    twice.step(batch)
    twice.step(batch)
    assert torch.equal(once.model.weight.grad, twice.model.weight.grad)


def test_the_loss_is_returned_without_its_graph() -> None:
    loss = make().step(torch.ones(3, 4))
    assert loss.grad_fn is None
    assert loss.shape == ()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "rmsprop"])
def test_optimizer_state_exists_after_a_step_that_the_scaler_skipped(optimizer: str) -> None:
    workload = make(optimizer, scaler=overflowing_scaler())
    before = workload.model.weight.detach().clone()
    workload.step(torch.full((3, 4), 1e3))
    assert all(workload.optimizer.state[parameter] for parameter in workload.model.parameters())
    assert torch.isfinite(workload.model.weight).all()
    assert torch.allclose(workload.model.weight, before, atol=1e-3)  # weight decay at most: the gradients were zero


def test_a_stateless_optimizer_is_checked_for_state_once() -> None:
    workload = make("sgd", scaler=overflowing_scaler())
    workload.optimizer.param_groups[0]["momentum"] = 0.0
    steps = 0
    plain_step = workload.optimizer.step

    def counting_step() -> None:
        nonlocal steps
        steps += 1
        plain_step()

    workload.optimizer.step = counting_step  # type: ignore[method-assign]
    for _ in range(3):
        workload.step(torch.full((3, 4), 1e30))  # every step overflows, so the scaler skips all of them
    assert steps == 1


def test_state_that_was_cleared_is_created_again() -> None:
    workload = make(scaler=overflowing_scaler())
    workload.step(torch.full((3, 4), 1e3))
    workload.optimizer.state.clear()  # as a search does between probes
    workload.scaler.update(2.0**127)
    workload.step(torch.full((3, 4), 1e3))
    assert workload.optimizer.state[workload.model.weight]


def test_the_scaler_is_reported_and_a_disabled_one_is_none() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert make(scaler=scaler).stateful() == (scaler,)
    assert make(scaler=torch.amp.GradScaler("cpu", enabled=False)).stateful() == ()


def test_autocast_runs_the_loss_in_half_precision_over_float32_weights() -> None:
    workload = make(autocast_dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    workload.model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    workload.step(torch.ones(3, 4))
    assert seen == [torch.bfloat16]
    assert workload.model.weight.dtype == torch.float32


def test_lbfgs_is_given_the_closure_it_needs() -> None:
    workload = make("lbfgs")
    before = workload.model.weight.detach().clone()
    first = workload.step(torch.ones(3, 4))
    second = workload.step(torch.ones(3, 4))
    assert not torch.equal(before, workload.model.weight)
    assert second < first


def test_lbfgs_with_a_scaler_is_refused() -> None:
    with pytest.raises(RequestError, match=r"LBFGS.*scaler.*bfloat16"):
        make("lbfgs", scaler=torch.amp.GradScaler("cpu"))


def test_the_smallest_size_is_kept() -> None:
    model = nn.Linear(2, 2)
    workload = TrainStepWorkload(
        model=model,
        make_batch=torch.zeros,
        loss=lambda model, batch: model(batch).sum(),
        optimizer=make_optimizer("sgd", model.parameters()),
        device="cpu",
        smallest_size=2,
        largest_size=7,
    )
    assert (workload.smallest_size(), workload.largest_size()) == (2, 7)
