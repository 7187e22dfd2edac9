from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import RequestError
from brim.workloads.callables import CallableWorkload


def make(**options: object) -> CallableWorkload:
    return CallableWorkload(**{"step": lambda batch: batch, "make_batch": torch.zeros, **options})  # type: ignore[arg-type]


def test_one_object_and_a_sequence_of_them_are_both_taken() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert make(model=first).modules() == (first,)
    assert make(model=[first, second]).modules() == (first, second)
    stack = nn.Sequential(first, second)
    assert make(model=stack).modules() == (stack,)


def test_scaler_and_schedulers_are_reported_as_stateful() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    assert make(scaler=scaler, scheduler=[scheduler]).stateful() == (scaler, scheduler)


def test_an_optimizer_makes_it_training_by_default() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert make().mode == "forward"
    assert make(optimizer=optimizer).mode == "train"
    assert make(mode="generate").mode == "generate"


def test_identity_is_the_key() -> None:
    assert make().identity() is None
    assert make(key="mine").identity() == {"key": "mine"}


def test_the_device_is_that_of_the_first_parameter() -> None:
    assert make(model=nn.Linear(1, 1, device="meta")).device == torch.device("meta")
    assert make(device="meta").device == torch.device("meta")
    assert make().device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_batch_length_replaces_the_leading_dimension() -> None:
    assert make(batch_length=lambda batch: 42).batch_length(torch.zeros(3)) == 42


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 3}, "step=3: expected a function that takes a batch"),
        ({"make_batch": None}, "make_batch=None: expected a function that takes a size"),
        ({"batch_length": 1}, "batch_length=1: expected a function"),
        ({"model": "resnet"}, "model='resnet': expected a Module"),
        ({"optimizer": [1]}, "optimizer=1: expected a Optimizer"),
        ({"unit": "frames"}, "unit='frames': it must be one of samples, tokens"),
        ({"mode": "eval"}, "mode='eval': it must be one of forward, generate, train"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("[", r"\[")):
        make(**options)


async def waiting(batch: torch.Tensor) -> None: ...


def giving(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield batch


@pytest.mark.parametrize("step", [waiting, giving])
def test_a_step_whose_body_would_never_run_is_refused(step: Any) -> None:
    """Every size would fit."""
    with pytest.raises(RequestError, match=r"step=.*: a generator or an async function returns before its body runs"):
        make(step=step)
