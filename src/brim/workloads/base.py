"""The `Workload`: makes a worst-case batch of any size and runs a step on it.

Knows nothing of searching, timing or memory limits: only what runs, on which device, and which objects a step may
change, so that a search can restore them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.memory.failures import HALF_PRECISION
from brim.records import Mode, Unit

__all__ = ["Workload", "call_model", "in_mode", "leading_length"]


class Workload(ABC):
    """What runs on one batch, with the device, dtype and knobs it runs under.

    Subclass it when `brim.find(step=…, make_batch=…)` is not enough, for instance for batches without a leading
    dimension.

    Examples:
        >>> class Packed(brim.Workload):
        ...     def make_batch(self, size):
        ...         return {"tokens": torch.ones(size * 128), "starts": torch.arange(0, size + 1) * 128}
        ...
        ...     def batch_length(self, batch):
        ...         return len(batch["starts"]) - 1
        ...
        ...     def step(self, batch):
        ...         return batch["tokens"].cumsum(0)
        >>> brim.find_plan(Packed(), brim.SearchSettings(memory_limit_bytes=2**22)).unit
        'samples'
    """

    mode: Mode = "forward"
    unit: Unit = "samples"
    device: torch.device = torch.device("cpu")
    notes: Sequence[str] = ()  # for the user: random weights, a smallest size
    savings: Sequence[str] = (HALF_PRECISION,)  # ways to use less memory, proposed where nothing fits

    @abstractmethod
    def make_batch(self, size: int) -> Any:
        """A worst-case batch of `size` items on the device: the longest prompt, the most crops, all frames."""

    @abstractmethod
    def step(self, batch: Any) -> Any:
        """Run once on the batch: a forward, a generate, or a whole training step."""

    def batch_length(self, batch: Any) -> int:
        """How many items the batch holds; override it where there is no leading dimension to count."""
        return leading_length(batch)

    def modules(self) -> Sequence[nn.Module]:
        """The modules whose weights, buffers and gradients a step may change."""
        return ()

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers whose state a step may change."""
        return ()

    def stateful(self) -> Sequence[Any]:
        """Further objects a step may change: gradient scalers, learning-rate schedulers."""
        return ()

    def functions(self) -> Sequence[Any]:
        """The functions that a step runs, so that a compiled one is recognised."""
        return (self.step,)

    def release(self) -> None:
        """Free the memory that a step keeps for the next one; called between sizes."""
        return

    def reserved_bytes(self) -> int:
        """Bytes to keep free during a probe for what is allocated later, e.g. communication buckets."""
        return 0

    def smallest_size(self) -> int:
        """The smallest size that can run at all: 2 where batch normalisation is left with one value per channel."""
        return 1

    def traced_as(self) -> Workload:
        """The workload that a forecast traces instead of this one, if it shows more of a step's operations."""
        return self

    def begin_repeat(self) -> bool:
        """Do what comes in a further step before the operations of the first come again, all of them and no others.

        False, and nothing is done, where a further step may be of others; a forecast then traces one.
        """
        return False

    def largest_size(self) -> int | None:
        """The largest useful size (the length of the data set), or None."""
        return None

    def identity(self) -> Mapping[str, Any] | None:
        """What a cached plan of this workload is filed under; None means that it is not cached."""
        return None


def leading_length(batch: Any) -> int:
    """The leading dimension of the first tensor in a nested batch, or the length of a plain sequence.

    A batch with neither is a `RequestError`: guessing would let a wrong size pass for the right one.
    """
    tensor = _first_tensor(batch)
    if tensor is not None and tensor.dim() > 0:
        return int(tensor.shape[0])
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return len(batch)
    raise RequestError(
        f"cannot count the items of a batch of type {type(batch).__name__}: "
        "it has no tensor with a leading dimension; pass batch_length=, a function from batch to count"
    )


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    else:
        return None
    for part in parts:
        found = _first_tensor(part)
        if found is not None and found.dim() > 0:
            return found
    return None


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
