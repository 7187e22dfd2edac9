"""Runs the steps of one epoch; on CUDA, after two real steps, each further one is the replay of a captured graph.

The steps that warm a graph up are steps of the run itself: nothing is computed for its own sake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from brim.generation.graphs import CaptureFailedError, capture, graphs_work_on, shared_pool
from brim.training.fast_path.order import Counts, EpochPlan
from brim.training.fast_path.row_feed import RowFeed
from brim.training.fast_path.runs import Runs

__all__ = ["EpochRunner"]

WARM_UP_STEPS = 2  # eager ones of the same size, so that libraries have set themselves up


class EpochRunner:
    """The steps of an epoch for one stack of runs."""

    def __init__(
        self,
        runs: Runs,
        feed: RowFeed,
        plan: EpochPlan,
        *,
        lr_factor: Callable[[int], float] | None = None,
        graphs: bool = True,
    ) -> None:
        self.runs = runs
        self.feed = feed
        self.plan = plan
        self.graph_failure: str | None = None  # why steps are not replayed, where they could have been
        self._graphed = graphs and runs.capturable and feed.resident and graphs_work_on(runs.device)
        self._graphs: dict[Counts, torch.cuda.CUDAGraph] = {}
        self._warm: Counter[Counts] = Counter()
        self._lr_factor = lr_factor
        self._offset = 0  # optimizer steps before this epoch
        wide = torch.float32 if runs.device.type == "mps" else torch.float64
        self._log = torch.zeros(runs.count, plan.steps, dtype=wide, device=runs.device)
        self._factors = torch.ones(plan.steps, dtype=wide, device=runs.device)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a graph by now."""
        return bool(self._graphs)

    @property
    def may_replay(self) -> bool:
        """Whether the next epoch may replay steps, those of a graph that is captured on the way included."""
        return self._graphed

    def stop_replaying(self, reason: str) -> None:
        """From now on every step runs eagerly."""
        self.graph_failure = reason
        self._graphed = False

    def run(self, epoch: int, *, eager: bool = False) -> torch.Tensor:
        """All steps of the epoch (from 0) that the feed has begun; losses `[runs, steps]`, on the device.

        Returns as soon as everything has been handed to the device.
        """
        self.prepare(epoch)
        for step in range(self.plan.steps):
            self.take(step, eager=eager)
        return self._log

    def prepare(self, epoch: int) -> None:
        """Set the learning rates of the epoch's steps."""
        self._offset = epoch * self.plan.steps
        if self._graphed and self._lr_factor is not None:
            factors = [self._factor(self._offset + step) for step in range(self.plan.steps)]
            self._factors.copy_(torch.tensor(factors, dtype=self._factors.dtype))

    def take(self, step: int, *, eager: bool = False) -> None:
        """One step of the epoch; they come in order."""
        counts = self.plan.counts(step)
        if self._graphed and not eager and self._ready(counts):
            self._graphs[counts].replay()
        else:
            self._step(counts, step)
            self._warm[counts] += 1

    def _step(self, counts: Counts, step: int) -> None:
        batch = self.feed.batch(counts)
        if self._graphed:
            factor = self._factors.index_select(0, self.feed.counter)
            losses = self.runs.step(batch, counts, factor)
            self._log.index_copy_(1, self.feed.counter, losses[:, None].to(self._log.dtype))
        else:
            self._log[:, step] = self.runs.step(batch, counts, self._factor(self._offset + step))
        self.feed.counter += 1

    def _ready(self, counts: Counts) -> bool:
        """Whether there is a graph for steps of this size; captures it when enough of them have run."""
        if counts in self._graphs:
            return True
        if self._warm[counts] < WARM_UP_STEPS:
            return False
        try:
            self._graphs[counts] = capture(lambda: self._step(counts, 0), shared_pool(self.runs.device))
        except CaptureFailedError as error:
            self.stop_replaying(f"it could not be captured: {str(error).splitlines()[0]}")
            return False
        return True

    def _factor(self, step: int) -> float:
        return 1.0 if self._lr_factor is None else self._lr_factor(step)
