"""What every kind of workload must do, whichever way it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from brim.workloads.base import Workload
from brim.workloads.callables import CallableWorkload
from brim.workloads.inference import ForwardWorkload, GenerateWorkload
from brim.workloads.optimizers import make_optimizer
from brim.workloads.train_step import TrainStepWorkload


def tiny_language_model() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=1, **shape))


def linear_pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.zeros(size, dtype=torch.long)


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def forward() -> Workload:
    return ForwardWorkload(model=nn.Linear(4, 2), make_batch=lambda n: torch.randn(n, 4), device="cpu")


def generate() -> Workload:
    def prompts(size: int) -> Mapping[str, torch.Tensor]:
        ids = torch.ones(size, 3, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return GenerateWorkload(model=tiny_language_model(), make_batch=prompts, max_new_tokens=5, device="cpu")


def train() -> Workload:
    model = nn.Linear(4, 2)
    optimizer = make_optimizer("adamw", model.parameters())
    return TrainStepWorkload(model=model, make_batch=linear_pair, loss=cross_entropy, optimizer=optimizer, device="cpu")


def callables() -> Workload:
    model = nn.Linear(4, 2)
    optimizer = make_optimizer("sgd", model.parameters())

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()

    return CallableWorkload(step=step, make_batch=linear_pair, model=model, optimizer=optimizer)


KINDS = {"forward": forward, "generate": generate, "train": train, "callables": callables}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def workload(request: pytest.FixtureRequest) -> Workload:
    make: Callable[[], Workload] = request.param
    return make()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_batch_has_the_requested_number_of_items(workload: Workload, size: int) -> None:
    assert workload.batch_length(workload.make_batch(size)) == size


def test_a_step_runs_twice_on_the_same_batch(workload: Workload) -> None:
    batch = workload.make_batch(2)
    workload.step(batch)
    workload.step(batch)


def test_every_module_and_optimizer_a_step_changes_is_reported(workload: Workload) -> None:
    assert all(isinstance(module, nn.Module) for module in workload.modules())
    assert len(workload.modules()) == 1
    assert len(workload.optimizers()) == (1 if workload.mode == "train" else 0)


def test_weights_change_in_training_only(workload: Workload) -> None:
    before = [parameter.detach().clone() for parameter in workload.modules()[0].parameters()]
    workload.step(workload.make_batch(2))
    after = list(workload.modules()[0].parameters())
    same = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert same == (workload.mode != "train")


def test_training_flags_of_every_submodule_are_as_before_after_a_step(workload: Workload) -> None:
    for flag in (True, False):
        workload.modules()[0].train(flag)
        workload.step(workload.make_batch(2))
        assert all(module.training == flag for module in workload.modules()[0].modules())


def test_sizes_and_reserved_bytes_have_plain_defaults(workload: Workload) -> None:
    assert workload.smallest_size() == 1
    assert workload.largest_size() is None
    assert workload.reserved_bytes() == 0
    assert workload.device == torch.device("cpu")
    assert workload.unit == "samples"
