"""Optimizer state counted before it exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from brim.training.optimizers import absent_bytes, state_bytes_when_made, tensors_of_state


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim() > 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}), ("AdamW", {"amsgrad": True}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("RMSprop", {}),
        ("Adafactor", {}), ("ASGD", {}), ("Adagrad", {}), ("Adadelta", {}), ("NAdam", {}),
    ],
)  # fmt: skip
def test_state_bytes_are_known_before_the_first_step(name: str, options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(20, 12), nn.Linear(12, 3))
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)
    expected = state_bytes_when_made(optimizer)
    before = [parameter.clone() for parameter in net.parameters()]
    weights = bytes_of(net.parameters())
    made_by_constructor = bytes_of(tensors_of_state(optimizer))
    assert absent_bytes(optimizer, expected) == weights + (0 if made_by_constructor else expected)
    net(torch.randn(4, 20)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))  # counting changed no weight
    optimizer.step()
    assert bytes_of(tensors_of_state(optimizer)) == expected
    assert absent_bytes(optimizer, expected) == 0 or expected == 0
