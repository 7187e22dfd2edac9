from __future__ import annotations

import pytest
import torch
from torch import nn

from brim.errors import RequestError
from brim.workloads.optimizers import make_optimizer

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", "AdamW"), ("SGD", "SGD"), ("Adam", "Adam"), ("adafactor", "Adafactor"), ("LBFGS", "LBFGS")],
)
def test_every_optimizer_is_found_whatever_the_case(name: str, kind: str) -> None:
    optimizer = make_optimizer(name, nn.Linear(1, 1).parameters(), lr=0.5)
    assert type(optimizer).__name__ == kind
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_sgd_has_momentum_so_that_its_state_counts() -> None:
    assert make_optimizer("sgd", nn.Linear(1, 1).parameters()).param_groups[0]["momentum"] == 0.9


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(RequestError, match=r"--optimizer adamv: .*did you mean .*adamw"):
        make_optimizer("adamv", nn.Linear(1, 1).parameters())


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_a_name_that_is_not_an_optimizer_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"--optimizer {name}"):
        make_optimizer(name, nn.Linear(1, 1).parameters())


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(RequestError, match="does not take this model's parameters"):
        make_optimizer("adamw", nn.ReLU().parameters())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_parameters_that_an_optimizer_cannot_take_are_refused() -> None:
    with pytest.raises(RequestError, match=r"--optimizer muon.*adamw takes any"):
        make_optimizer("muon", nn.Conv2d(1, 1, 3).parameters())
