"""The state of model and optimizer as one piece, whether this process holds all of it or a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from brim.ranks.gradients import load_whole_states, whole_states

__all__ = ["WholeState"]


class WholeState:
    """Reads and writes whole states; of a sharded model every rank must call every method."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool = False) -> None:
        self._model = model
        self._optimizer = optimizer
        self._sharded = sharded

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Weights and buffers by name, and the optimizer's `state_dict`."""
        if self._sharded:
            return whole_states(self._model, self._optimizer)
        return dict(self._model.state_dict()), self._optimizer.state_dict()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight and buffer."""
        return {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}

    def load(self, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """Put states back that `read` gave, perhaps by way of a file."""
        groups = [
            {name: _like(value, present.get(name)) for name, value in stored.items()}
            for stored, present in zip(optimizer["param_groups"], self._optimizer.param_groups, strict=True)
        ]
        state = {"state": optimizer["state"], "param_groups": groups}
        if self._sharded:
            load_whole_states(self._model, self._optimizer, weights, state)
        else:
            self._model.load_state_dict(dict(weights))
            self._optimizer.load_state_dict(state)


def _like(value: Any, present: Any) -> Any:
    """JSON has no tuples: Adam's betas come back as a list."""
    return tuple(value) if isinstance(present, tuple) and isinstance(value, list) else value
