"""A forward pass without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.records import Mode
from brim.workloads.base import Workload
from brim.workloads.model_call import call_model, in_mode

__all__ = ["ForwardWorkload"]


class ForwardWorkload(Workload):
    """Runs the model in evaluation mode on each batch; its training flags are as before after every step.

    `inference_mode=False` takes `torch.no_grad` instead, for a model that keeps tensors made in a forward
    (a cache, a lazily filled buffer) and is trained afterwards.

        workload = ForwardWorkload(model=resnet, make_batch=lambda n: torch.randn(n, 3, 224, 224), device="cpu")
    """

    mode: Mode = "forward"

    def __init__(
        self,
        *,
        model: nn.Module,
        make_batch: Callable[[int], Any],
        device: torch.device | str,
        identity: Mapping[str, Any] | None = None,
        largest_size: int | None = None,
        inference_mode: bool = True,
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self._make_batch = make_batch
        self._identity = identity
        self._largest_size = largest_size
        self._without_gradients = torch.inference_mode if inference_mode else torch.no_grad

    def make_batch(self, size: int) -> Any:
        """The batch that `make_batch=` gives for the size."""
        return self._make_batch(size)

    def step(self, batch: Any) -> Any:
        """One forward; its output is returned, so that it counts in the peak as it does in an evaluation."""
        with in_mode(self.model, training=False), self._without_gradients():
            return call_model(self.model, batch)

    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return (self.model,)

    def largest_size(self) -> int | None:
        """The size past which a batch makes no sense, if one was given."""
        return self._largest_size

    def identity(self) -> Mapping[str, Any] | None:
        """What the plan is filed under, if it was given."""
        return self._identity
