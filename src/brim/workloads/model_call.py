"""How a model is called on a batch, and in which mode: what forward, generate and train steps share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["call_model", "in_mode"]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch: a mapping gives keyword arguments, a tuple positional ones, else the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run a block with the model in training or evaluation mode, and leave every submodule's flag as it was.

    A model already in the mode is not touched, so a submodule its owner froze (`bn.eval()`) stays frozen.
    """
    if model.training == training:
        yield
        return
    flags = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
