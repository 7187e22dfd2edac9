"""Schedulers by name, warm-up, ramps, resumed schedules, and the factor that follows the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.training.learning_rate import (
    RAMP_STEPS,
    LearningRate,
    ScheduleRequest,
    adjusted_betas,
    adjusted_eps,
    chosen_rule,
    lr_factor,
    scheduler_class,
)  # fmt: skip


def rate_of(*, optimizer: str = "SGD", **wanted: Any) -> LearningRate:
    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        made: torch.optim.Optimizer = getattr(torch.optim, optimizer)(parameters, lr=0.1, **options)
        return made

    request = ScheduleRequest(**{"learning_rate": 0.1, "epochs": 10, "total_steps": 100, **wanted})
    return LearningRate(make([torch.nn.Parameter(torch.zeros(2))]), request, make_optimizer=make)


def over_epochs(rate: LearningRate, epochs: int) -> list[float]:
    found = []
    for epoch in range(epochs):
        found.append(rate.current(10 * epoch))
        rate.epoch_done(1.0)
    return found


def plain(kind: Any, epochs: int, **params: Any) -> list[float]:
    """The rates of the scheduler used as torch documents it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = kind(optimizer, **params)
    found = []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("name", "params", "kind", "expected"),
    [
        ("cosine", {}, "CosineAnnealingLR", {"T_max": 10}),
        ("CosineAnnealingLR", {"T_max": 5, "eta_min": 0.01}, "CosineAnnealingLR", {"T_max": 5, "eta_min": 0.01}),
        ("step", {"step_size": 3}, "StepLR", {"step_size": 3}),
        ("StepLR", {}, "StepLR", {"step_size": 3}),
        ("exponential", {"gamma": 0.5}, "ExponentialLR", {"gamma": 0.5}),
        ("multistep", {}, "MultiStepLR", {"milestones": [5, 7]}),
        ("linear", {}, "LinearLR", {"total_iters": 10}),
        ("polynomial", {"power": 2.0}, "PolynomialLR", {"total_iters": 10, "power": 2.0}),
    ],
)
def test_schedulers_by_name_give_the_rates_of_torch(name: str, params: Any, kind: str, expected: Any) -> None:
    found = over_epochs(rate_of(name=name, params=params), 10)
    assert found == pytest.approx(plain(getattr(torch.optim.lr_scheduler, kind), 10, **expected))


def test_without_a_scheduler_the_rate_is_constant() -> None:
    assert over_epochs(rate_of(), 5) == [0.1] * 5
    assert scheduler_class("none") is None


def test_warm_up_rises_linearly_to_the_scheduled_rate() -> None:
    rate = rate_of(name="cosine", warmup_steps=4)
    assert [rate.current(step) for step in range(5)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_one_cycle_is_called_every_step_and_changes_momentum() -> None:
    rate = rate_of(name="onecycle", params={"max_lr": 0.5})
    found = []
    for step in range(100):
        found.append(rate.apply(step))
        rate.step_done()
    assert max(found) == pytest.approx(0.5)
    assert found[-1] < 0.01
    assert rate.optimizer.param_groups[0]["momentum"] != 0.9
    rate.step_done()  # one step too many, as a resumed run may make: the last rate is kept
    assert rate.apply(100) < 0.01


def test_plateau_scheduler_uses_the_loss_of_epochs() -> None:
    rate = rate_of(name="plateau", params={"patience": 1, "factor": 0.5})
    for _ in range(4):
        rate.epoch_done(1.0)
    assert rate.current(0) == pytest.approx(0.05)


def test_a_changed_factor_is_reached_over_ramp_steps() -> None:
    rate = rate_of(name="cosine")
    rate.rescale(2.0, step=10)
    found = [rate.current(step) for step in range(10, 10 + RAMP_STEPS)]
    assert found[0] == pytest.approx(0.1 * (1 + 1 / RAMP_STEPS))
    assert found[-1] == pytest.approx(0.2)
    assert found == sorted(found)
    rate.rescale(4.0, step=10 + RAMP_STEPS // 2)  # in the middle of a ramp: a new ramp starts from there
    assert rate.current(10 + RAMP_STEPS // 2) == pytest.approx(0.1 * (1.5 + 2.5 / RAMP_STEPS))


@pytest.mark.parametrize("name", ["cosine", "step", "onecycle", "plateau", "multistep"])
def test_a_restored_schedule_gives_the_same_rates(name: str) -> None:
    before = rate_of(name=name)
    for step in range(30):
        before.step_done()
        if step % 10 == 9:
            before.epoch_done(1.0)
    before.rescale(2.0, step=25)
    after = rate_of(name=name)
    after.restore(before.to_json())
    for step in range(30, 60):
        assert after.apply(step) == before.apply(step)
        after.step_done()
        before.step_done()
    before.epoch_done(1.0)
    after.epoch_done(1.0)
    assert after.current(60) == before.current(60)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"name": "cosin"}, "did you mean cosine"),
        ({"name": "step", "params": {"stepsize": 3}}, "did you mean step_size"),
        ({"name": "step", "params": {"step_size": "often"}}, "does not take"),
        ({"name": "onecycle", "steps_may_change": True}, "counts steps"),
    ],
)
def test_unknown_schedulers_and_parameters_are_refused(wanted: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        rate_of(**wanted)


@pytest.mark.parametrize(
    ("rule", "optimizer", "factor"),
    [
        ("sqrt", "adamw", 2.0),
        ("linear", "adamw", 4.0),
        ("none", "sgd", 1.0),
        ("auto", "adamw", 2.0),
        ("auto", "SGD", 4.0),
        ("auto", "lion", 2.0),
    ],
)
def test_factor_for_four_times_the_batch(rule: str, optimizer: str, factor: float) -> None:
    assert lr_factor(rule, 4.0, optimizer) == factor


def test_a_smaller_batch_lowers_the_rate() -> None:
    assert lr_factor("sqrt", 0.25, "adam") == 0.5
    assert chosen_rule("auto", "sgd") == "linear"


def test_adams_averages_span_as_many_samples_as_before() -> None:
    """Malladi et al.: 1 − β becomes κ(1 − β), ε becomes ε/√κ."""
    assert adjusted_betas((0.9, 0.999), 4.0) == pytest.approx((0.6, 0.996))
    assert adjusted_eps(1e-8, 4.0) == pytest.approx(5e-9)
    assert adjusted_betas((0.9, 0.999), 100.0) == pytest.approx((0.0, 0.9))  # never below 0
