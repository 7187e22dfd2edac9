from __future__ import annotations

import torch
from torch import nn

from brim.workloads.inference import ForwardWorkload


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
        self.modes: list[tuple[bool, bool, bool]] = []

    def forward(self, *args: object, **kwargs: object) -> None:
        self.calls.append((args, kwargs))
        self.modes.append((self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))


def make(**options: bool) -> tuple[ForwardWorkload, Recorder]:
    model = Recorder()
    return ForwardWorkload(model=model, make_batch=torch.zeros, device="cpu", **options), model


def test_tuples_are_positional_and_mappings_keyword_arguments() -> None:
    workload, model = make()
    workload.step(7)
    workload.step((1, 2))
    workload.step({"a": 3})
    assert model.calls == [((7,), {}), ((1, 2), {}), ((), {"a": 3})]


def test_the_model_runs_in_evaluation_and_inference_mode() -> None:
    workload, model = make()
    workload.step(0)
    assert model.modes == [(False, False, True)]


def test_no_grad_can_take_the_place_of_inference_mode() -> None:
    workload, model = make(inference_mode=False)
    workload.step(0)
    assert model.modes == [(False, False, False)]


def test_a_submodule_frozen_inside_a_training_model_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    ForwardWorkload(model=model, make_batch=torch.zeros, device="cpu").step(torch.zeros(3, 2))
    assert model.training
    assert model[0].training
    assert not model[1].training


def test_identity_and_largest_size_are_kept() -> None:
    workload = ForwardWorkload(
        model=nn.Identity(), make_batch=torch.zeros, device="cpu", identity={"model": "x"}, largest_size=9
    )
    assert workload.identity() == {"model": "x"}
    assert workload.largest_size() == 9
