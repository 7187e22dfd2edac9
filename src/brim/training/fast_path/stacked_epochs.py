"""Trains a stack of runs epoch by epoch: the backend of the loop for rows on the device and captured steps.

`EpochRunner` makes the steps of an epoch; on CUDA, after two real steps, each further one is the replay of a captured
graph. The steps that warm a graph up are steps of the run itself. `StackTrainer` is what the loop sees of it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from brim.generation.graphs import CaptureFailedError, capture, graphs_work_on, shared_pool
from brim.training.fast_path.row_feed import RowFeed
from brim.training.fast_path.runs import Runs
from brim.training.fast_path.task import FIGURE, Counts, EpochPlan, RunOutcome, RunsListener, Settings, TrainingTask
from brim.training.loop import EndedEpoch, EpochBackend, EpochRules, Progress, run_epochs

__all__ = ["EpochRunner", "StackFigures", "train_together"]

WARM_UP_STEPS = 2  # eager ones of the same size, so that libraries have set themselves up
IDS_SHOWN = 5


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


@dataclasses.dataclass(kw_only=True)
class StackFigures:
    """Times and counts of the training of one stack."""

    train_seconds: float = 0.0
    validation_seconds: float = 0.0
    steps: int = 0  # of one run
    rows: int = 0  # over all runs, those that were stopped not counted
    rows_of_longest: int = 0  # as above, of the longest stream only: pairs, for matched pairs
    graph: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)


def train_together(
    runner: EpochRunner, settings: Settings, task: TrainingTask, listener: RunsListener
) -> tuple[list[RunOutcome], StackFigures]:
    """Train every run of the runner's stack; one whose loss is not a number ends with an error, the others continue."""
    trainer = StackTrainer(runner, settings, task, listener)
    run_epochs(trainer, task.rules or _rules(settings, task))
    trainer.figures.graph = runner.captured
    if runner.graph_failure is not None:
        trainer.figures.notes.append(f"steps ran eagerly, without a CUDA graph: {runner.graph_failure}")
    return [trainer.outcome(run) for run in range(runner.runs.count)], trainer.figures


def _rules(settings: Settings, task: TrainingTask) -> EpochRules:
    """The higher the figure the better, the first of equals; without a validation the last epoch is the best."""
    return EpochRules(
        epochs=settings.epochs,
        eval_every=settings.validate_every,
        validated=task.validate is not None,
        monitor=None if task.validate is None else FIGURE,
        higher_is_better=True,
        loss_breaks_ties=False,
        early_stopping=settings.patience,
    )


class StackTrainer(EpochBackend):
    """Runs of one stack, which take every step together; best weights stay on the device until the end."""

    def __init__(self, runner: EpochRunner, settings: Settings, task: TrainingTask, listener: RunsListener) -> None:
        self.figures = StackFigures()
        self.progress = [Progress() for _ in range(runner.runs.count)]
        self._runner, self._runs, self._plan = runner, runner.runs, runner.plan
        self._settings, self._task, self._listener = settings, task, listener
        self._orders: Sequence[torch.Tensor] = runner.feed.orders(0)
        self._step_losses: list[list[torch.Tensor]] = [[] for _ in self.progress]
        self._errors: dict[int, str] = {}
        self._epoch = 0  # the one under way, from 1
        counts = [max(self._plan.counts(step)) for step in range(self._plan.steps)]
        self._rows = torch.tensor(counts, dtype=torch.float64)  # of the longest stream in each step, [steps]

    def train_epoch(self, running: Sequence[int]) -> list[int]:
        """All steps of an epoch at once; their losses are read when the last of them has been handed to the device."""
        started = time.perf_counter()
        epoch, orders, spans = self.progress[running[0]].epoch, self._orders, self._plan.spans
        self._epoch = epoch + 1
        losses = self._make_steps(epoch, running)  # [runs, steps]
        self.figures.steps += self._plan.steps
        self.figures.rows += len(running) * sum(spans)
        self.figures.rows_of_longest += len(running) * max(spans)
        finite = losses.isfinite()
        every = bool(finite.all()) or bool(finite[list(running)].all())  # those that failed before are in it too
        trained = list(running)
        if not every:
            trained = [run for run in running if self._usable(finite[run])]
            for run in sorted(set(running) - set(trained)):
                self._fail(run, epoch, losses[run], orders)
        seconds = time.perf_counter() - started
        self.figures.train_seconds += seconds
        for run in trained:
            own_seconds = seconds / len(trained)  # its share of the stack's time
            self._record(run, losses[run], None if every else finite[run], own_seconds)
        return trained

    def validate(self, running: Sequence[int]) -> dict[int, Mapping[str, float]]:
        """The figures of every run, computed for the whole stack."""
        assert self._task.validate is not None
        started = time.perf_counter()
        every = self._task.validate(self._runs.outputs)
        self.figures.validation_seconds += time.perf_counter() - started
        return {run: one if isinstance(one := every[run], Mapping) else {FIGURE: one} for run in running}

    def epoch_facts(self, run: int) -> Mapping[str, Any]:
        """As the task has them."""
        facts = self._task.epoch_facts
        return {} if facts is None else facts(self._runs.specs[run], self.progress[run].step)

    def epoch_ended(self, ended: Sequence[EndedEpoch]) -> None:
        """Remember the best weights; runs that stop are frozen, and take part in no further step."""
        started = time.perf_counter()
        better = [epoch.run for epoch in ended if epoch.better]
        if better:
            self._runs.remember(better)
        for epoch in ended:
            if epoch.stopped:
                self._runs.freeze(epoch.run)
        self.figures.validation_seconds += time.perf_counter() - started
        stopped = sum(one.stopped_early or run in self._errors for run, one in enumerate(self.progress))
        epochs = self._settings.epochs
        self._listener.epoch(runs=self._runs.count, epoch=self._epoch, epochs=epochs, stopped=stopped)

    def outcome(self, run: int) -> RunOutcome:
        """The result of a run, its weights copied to the CPU."""
        best, error = self.progress[run].best_epoch, self._errors.get(run)
        return RunOutcome(
            spec=self._runs.specs[run],
            weights={} if best is None else self._runs.weights(run, remembered=True),
            best_epoch=0 if best is None else best + 1,
            progress=self.progress[run],
            step_losses=tuple(self._step_losses[run]),
            skipped_steps=self._runs.skipped_steps()[run],
            error=error,
            last_weights=self._runs.weights(run) if error is None else {},
        )

    def _make_steps(self, epoch: int, running: Sequence[int]) -> torch.Tensor:
        """The losses of the epoch, `[runs, steps]` on the host; the next epoch's orders are made meanwhile."""
        runner, feed, orders = self._runner, self._runner.feed, self._orders
        before = self._runs.snapshot() if runner.may_replay else None
        feed.begin(orders)
        losses = runner.run(epoch)
        if epoch + 1 < self._settings.epochs:
            self._orders = feed.orders(epoch + 1)
        found = losses.cpu()
        if before is not None and not bool(found[list(running)].isfinite().all()):
            # A captured step cannot look at its numbers and choose another way to compute; an eager one can.
            self._runs.restore(before)
            feed.begin(orders)
            found = runner.run(epoch, eager=True).cpu()
            if bool(found[list(running)].isfinite().all()):
                runner.stop_replaying(f"from epoch {epoch + 1} on energies lie too far apart for one")
        return found

    def _usable(self, finite: torch.Tensor) -> bool:
        """With scaled gradients an infinite loss is a step that was skipped, unless nothing else is left."""
        skips = self._settings.loss_scaling and self._settings.skips_infinite_losses
        return bool(finite.all()) or (skips and bool(finite.any()))

    def _record(self, run: int, losses: torch.Tensor, finite: torch.Tensor | None, seconds: float) -> None:
        """The losses of an epoch's steps; of skipped ones, which are not `finite`, nothing is counted."""
        progress, rows = self.progress[run], self._rows
        self._step_losses[run].append(losses.clone())
        total = float(max(self._plan.spans)) if finite is None else float(rows[finite].sum())
        losses, rows = (losses.double(), rows) if finite is None else (losses[finite].double(), rows[finite])
        progress.add_steps(max(self._plan.spans), steps=self._plan.steps)
        progress.add_seconds(seconds)
        progress.add_loss(float(losses @ rows), total)

    def _fail(self, run: int, epoch: int, losses: torch.Tensor, orders: Sequence[torch.Tensor]) -> None:
        step = int((~losses.isfinite()).nonzero()[0])
        streams = self._runner.feed.names(orders, run, step)
        shown = "; ".join(", ".join(names[:IDS_SHOWN]) + (" …" if len(names) > IDS_SHOWN else "") for names in streams)
        best = self.progress[run].best_epoch
        kept = "no earlier weights are kept" if best is None else f"the weights of epoch {best + 1} are kept"
        self._errors[run] = (
            f"seed {self._runs.specs[run].seed}: the loss became {float(losses[step])} in epoch {epoch + 1}, step "
            f"{epoch * self._plan.steps + step + 1}, on rows {shown}; {kept}. A lower learning rate, clipped "
            "gradients, or features without infinite values may help"
        )
        self._runs.freeze(run)
