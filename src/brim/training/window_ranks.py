"""Windows on several ranks: each runs its own micro-batches alone, then all agree and their gradients are summed.

For a model in `DistributedDataParallel`, whose own sum happens inside a backward. Knows nothing of losses or sizes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from brim.ranks.agreement import Agreement, Vote
from brim.ranks.gradients import RankGroup
from brim.ranks.unwrap import data_parallel, without_collectives
from brim.ranks.world import World, current_world
from brim.training.micro_batches import MicroBatches
from brim.training.optimizers import GradientSums

__all__ = ["WindowRanks"]


class WindowRanks:
    """The other ranks of a model in `DistributedDataParallel`; alone, and for a model of this rank's own, a no-op."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._wrapped = data_parallel([model])
        world = current_world()
        self.world = world if self._wrapped else World(0, 1, 0)
        self._device = device
        self._agreement: Agreement | None = None
        self._group: RankGroup | None = None

    @property
    def group(self) -> RankGroup:
        """The ranks as one for arithmetic."""
        if self._group is None:
            self._group = RankGroup(self._device, self.world)
        return self._group

    def begin(self, parameters: Sequence[torch.Tensor], samples: int) -> int:
        """Connect the ranks; what the sums of every window are divided by on all of them, 0 alone: by its samples."""
        if self.world.size == 1:
            return 0
        stack = contextlib.ExitStack()
        self._agreement = stack.enter_context(Agreement(purpose="a window of brim.accumulate"))
        weakref.finalize(self, stack.close)
        with self._agreement.step(int) as step:
            self.group.prepare(parameters)
            step.value = samples
        return max(sum(step.values), 1)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """While inside, forwards and backwards involve no other rank."""
        return contextlib.nullcontext() if self.world.size == 1 else without_collectives([self._model])

    def vote(self, sums: GradientSums, micro: MicroBatches, failed: Exception | None) -> set[int]:
        """All continue, or all stop with the same error; which parameters have a gradient on no rank."""
        if self._agreement is None:
            if failed is not None:
                raise failed
            return set()
        moving = micro.rewinder.moving()
        vote = Vote(error=failed) if failed is not None else Vote(value={"absent": sums.absent(), "moving": moving})
        votes: list[Any] = self._agreement.gather(vote)
        if any(one.broadcast_buffers for one in self._wrapped):  # rank 0's, as DistributedDataParallel has it
            places = sorted({place for one in votes for place in one["moving"]})
            self.group.copy_from_first(micro.rewinder.buffers_at(places))
        return set.intersection(*(set(one["absent"]) for one in votes))
