"""The `Workload`: something that can make a worst-case batch of any size and step on it.

Knows nothing of searching, timing or memory limits: it only says what runs, on which device, and which
objects a step may change, so that a search can put them back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.memory.failures import HALF_PRECISION
from brim.records import Mode, Unit

__all__ = ["Workload", "leading_length"]


class Workload(ABC):
    """What runs on one batch, with the device, dtype and knobs it runs under.

    Subclass it when `brim.find_batch_size(step, make_batch)` is not enough, for instance for batches
    without a leading dimension:

        class Packed(brim.Workload):
            def make_batch(self, size): return pack(longest_documents(size))
            def batch_length(self, batch): return len(batch["cu_seqlens"]) - 1
            def step(self, batch): model(**batch)
    """

    mode: Mode = "forward"
    unit: Unit = "samples"
    device: torch.device = torch.device("cpu")
    notes: Sequence[str] = ()  # what the user should be told: random weights, a smallest size
    savings: Sequence[str] = (HALF_PRECISION,)  # what would take less memory, proposed where nothing fits

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
        """The functions that a step runs, so that a compiled one can be told where it matters."""
        return (self.step,)

    def release(self) -> None:
        """Let go of memory that a step keeps for the next one; called between sizes."""
        return

    def reserved_bytes(self) -> int:
        """Bytes to keep free beside a probe for what does not exist yet, e.g. communication buckets."""
        return 0

    def smallest_size(self) -> int:
        """The smallest size that can run at all: 2 where batch normalisation is left with one value per channel."""
        return 1

    def traced_as(self) -> Workload:
        """What a forecast traces in its place, where that says more of what a step is made of."""
        return self

    def largest_size(self) -> int | None:
        """A size past which a batch makes no sense (the data set's length), or None."""
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
        f"cannot tell how many items a batch of type {type(batch).__name__} holds: "
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
