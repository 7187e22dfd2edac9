from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn

from brim.errors import RequestError
from brim.workloads.checkpointing import can_checkpoint, enable_gradient_checkpointing

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.train()
    model.zero_grad()
    torch.manual_seed(7)  # dropout and stochastic depth draw from here
    model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def saved_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "shape", "blocks"),
    [("resnet18", (2, 3, 64, 64), 8), ("r3d_18", (2, 3, 2, 32, 32), 8), ("swin_t", (2, 3, 32, 32), 16)],
)
def test_gradients_are_the_same_with_and_without(name: str, shape: tuple[int, ...], blocks: int) -> None:
    torch.manual_seed(0)
    plain = torchvision.models.get_model(name, weights=None)
    checkpointed = copy.deepcopy(plain)
    batch = torch.randn(shape)
    assert f"{blocks} blocks" in enable_gradient_checkpointing(checkpointed)
    for expected, found in zip(gradients(plain, batch), gradients(checkpointed, batch), strict=True):
        assert torch.equal(expected, found)


def layers(inplace: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(6):
        parts += [nn.Linear(8, 8), nn.Hardswish(inplace=inplace), nn.Dropout(0.2)]
    return nn.Sequential(*parts)


def test_checkpoint_segments_never_begin_with_an_in_place_module() -> None:
    plain, checkpointed = layers(), layers()
    batch = torch.randn(5, 8)
    assert "in segments" in enable_gradient_checkpointing(checkpointed)
    for expected, found in zip(gradients(plain, batch), gradients(checkpointed, batch), strict=True):
        assert torch.equal(expected, found)


def test_fewer_bytes_are_kept_for_the_backward() -> None:
    plain = torchvision.models.get_model("resnet18", weights=None)
    checkpointed = copy.deepcopy(plain)
    enable_gradient_checkpointing(checkpointed)
    batch = torch.randn(8, 3, 64, 64)
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    assert saved_bytes(checkpointed, batch) < saved_bytes(plain, batch) - weights // 2


def test_enabling_twice_recomputes_once() -> None:
    calls = 0

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return self.linear(value).relu()

    model = nn.Sequential(Block(), Block())
    enable_gradient_checkpointing(model)
    enable_gradient_checkpointing(model)
    model(torch.randn(2, 4)).sum().backward()
    assert calls == 4  # two blocks, forward and once again
    model(torch.randn(2, 4))
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert calls == 8


def test_a_copy_of_a_checkpointed_model_uses_its_own_weights() -> None:
    model = torchvision.models.get_model("resnet18", weights=None)
    enable_gradient_checkpointing(model)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert twin.eval()(torch.randn(1, 3, 32, 32)).abs().sum() > 0


def test_checkpointing_refuses_a_block_that_changes_its_input() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.linear(value.mul_(2))

    model = nn.Sequential(nn.Linear(4, 4), InPlace())
    enable_gradient_checkpointing(model)
    with pytest.raises(RequestError, match="block 1 changes its input in place"):
        model(torch.randn(2, 4))


def test_a_models_own_method_is_used_first() -> None:
    class Transformers(nn.Linear):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
            self.options = gradient_checkpointing_kwargs

    class Timm(nn.Linear):
        def set_grad_checkpointing(self, enable: bool) -> None:
            self.enabled = enable

    transformers, timm = Transformers(1, 1), Timm(1, 1)
    assert "own (transformers)" in enable_gradient_checkpointing(transformers)
    assert transformers.options == {"use_reentrant": False}
    assert can_checkpoint(timm)
    assert not timm.enabled  # asking leaves the model as it is
    assert "own (timm)" in enable_gradient_checkpointing(timm)
    assert timm.enabled


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
def test_a_model_without_blocks_is_refused(model: nn.Module) -> None:
    assert not can_checkpoint(model)
    with pytest.raises(RequestError, match=r"--gradient-checkpointing: .* no repeated blocks"):
        enable_gradient_checkpointing(model)
