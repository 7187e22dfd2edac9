"""Trains a stack of runs from the first epoch to the last: validation, best weights and early stopping run by run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import torch

from brim.training.fast_path.epoch import EpochRunner
from brim.training.fast_path.problem import EpochEnd, Problem, RunOutcome, RunsListener, Settings

__all__ = ["TrainingFigures", "train_together"]

IDS_SHOWN = 5


@dataclasses.dataclass(kw_only=True)
class TrainingFigures:
    """What the training of one stack came to."""

    train_seconds: float = 0.0
    validation_seconds: float = 0.0
    steps: int = 0  # of one run
    rows: int = 0  # over all runs, those that were stopped not counted
    rows_of_longest: int = 0  # as above, of the longest stream only: pairs, for matched pairs
    graph: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class _Progress:
    """Where one run stands."""

    losses: list[float] = dataclasses.field(default_factory=list)
    validations: list[float] = dataclasses.field(default_factory=list)
    best: float = -math.inf
    best_epoch: int = 0
    since_best: int = 0
    stopped: bool = False
    error: str | None = None

    def judge(self, figure: float, epoch: int, patience: int | None) -> bool:
        """Take a validation in; whether it is the best so far."""
        self.validations.append(figure)
        if figure > self.best:
            self.best, self.best_epoch, self.since_best = figure, epoch, 0
            return True
        self.since_best += 1
        self.stopped = patience is not None and self.since_best >= patience
        return False


def train_together(
    runner: EpochRunner, settings: Settings, problem: Problem, listener: RunsListener
) -> tuple[list[RunOutcome], TrainingFigures]:
    """Train every run of the runner's stack; one whose loss is no number comes out with an error, the others go on."""
    return _Training(runner, settings, problem, listener).run()


class _Training:
    def __init__(self, runner: EpochRunner, settings: Settings, problem: Problem, listener: RunsListener) -> None:
        self.runner = runner
        self.runs = runner.runs
        self.settings = settings
        self.validate = problem.validate
        self.follow = None if problem.follow is None else problem.follow(runner.runs.specs)
        self.listener = listener
        self.figures = TrainingFigures()
        self.progress = [_Progress() for _ in range(self.runs.count)]

    def run(self) -> tuple[list[RunOutcome], TrainingFigures]:
        feed, epochs = self.runner.feed, self.settings.epochs
        orders: Sequence[torch.Tensor] = feed.orders(0)
        for epoch in range(epochs):
            started = time.perf_counter()
            losses, following = self._epoch(epoch, orders)
            self._take_losses(losses, orders, epoch)
            seconds = time.perf_counter() - started
            self.figures.train_seconds += seconds
            if self.follow is not None:
                self._ask(epoch + 1, losses, seconds)
            elif (epoch + 1) % self.settings.validate_every == 0 or epoch + 1 == epochs:
                self._validate(epoch + 1)
            stopped = sum(one.stopped for one in self.progress)
            self.listener.epoch(runs=self.runs.count, epoch=epoch + 1, epochs=epochs, stopped=stopped)
            if stopped == self.runs.count:
                break
            orders = following
        self.figures.graph = self.runner.captured
        if self.runner.graph_failure is not None:
            self.figures.notes.append(f"steps ran eagerly, without a CUDA graph: {self.runner.graph_failure}")
        return [self._outcome(run) for run in range(self.runs.count)], self.figures

    def _epoch(self, epoch: int, orders: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The losses of the epoch, `[runs, steps]` on the host, and the next epoch's orders, made meanwhile."""
        feed, last = self.runner.feed, epoch + 1 == self.settings.epochs
        before = self.runs.snapshot() if self.runner.may_replay else None
        feed.begin(orders)
        losses = self.runner.run(epoch)
        following = orders if last else feed.orders(epoch + 1)
        found = losses.cpu()
        if before is not None and not bool(found[self._running()].isfinite().all()):
            # A captured step cannot look at its numbers and choose another way to compute; an eager one can.
            self.runs.restore(before)
            feed.begin(orders)
            found = self.runner.run(epoch, eager=True).cpu()
            if bool(found[self._running()].isfinite().all()):
                self.runner.stop_replaying(f"from epoch {epoch + 1} on energies lie too far apart for one")
        return found, following

    def _running(self) -> list[int]:
        return [run for run, one in enumerate(self.progress) if not one.stopped]

    def _take_losses(self, losses: torch.Tensor, orders: Sequence[torch.Tensor], epoch: int) -> None:
        plan, running = self.runner.plan, self._running()
        self.figures.steps += plan.steps
        self.figures.rows += len(running) * sum(plan.spans)
        self.figures.rows_of_longest += len(running) * max(plan.spans)
        for run in running:
            row = losses[run]
            finite = row.isfinite()
            # With scaled gradients an infinite loss is a step that was skipped, unless nothing else is left.
            lenient = self.settings.loss_scaling and self.follow is None
            if bool(finite.all()) or (lenient and bool(finite.any())):
                self.progress[run].losses.append(float(row[finite].double().mean()))
                continue
            self._give_up(run, int((~finite).nonzero()[0]), float(row[~finite][0]), orders, epoch)

    def _give_up(self, run: int, step: int, loss: float, orders: Sequence[torch.Tensor], epoch: int) -> None:
        one = self.progress[run]
        streams = self.runner.feed.names(orders, run, step)
        shown = "; ".join(", ".join(names[:IDS_SHOWN]) + (" …" if len(names) > IDS_SHOWN else "") for names in streams)
        kept = f"the weights of epoch {one.best_epoch} are kept" if one.best_epoch else "no earlier weights are kept"
        one.error = (
            f"seed {self.runs.specs[run].seed}: the loss became {loss} in epoch {epoch + 1}, step "
            f"{epoch * self.runner.plan.steps + step + 1}, on rows {shown}; {kept}. A lower learning rate, "
            "clipped gradients, or features without infinite values may help"
        )
        one.stopped = True
        self.runs.freeze(run)

    def _ask(self, epoch: int, losses: torch.Tensor, seconds: float) -> None:
        """Who follows the runs decides which weights are kept and which runs stop."""
        assert self.follow is not None
        running = tuple(self._running())
        if not running:
            return
        started = time.perf_counter()
        verdict = self.follow(
            EpochEnd(
                epoch=epoch, last=epoch == self.settings.epochs, running=running, losses=losses, seconds=seconds,
                outputs=self.runs.outputs,
            )
        )  # fmt: skip
        if verdict.better:
            self.runs.remember(verdict.better)
        for run in verdict.better:
            self.progress[run].best_epoch = epoch
        for run in verdict.stopped:
            self.progress[run].stopped = True
            self.runs.freeze(run)
        self.figures.validation_seconds += time.perf_counter() - started

    def _validate(self, epoch: int) -> None:
        running = self._running()
        started = time.perf_counter()
        if not running:
            return
        if self.validate is None:
            self.runs.remember(running)
            for run in running:
                self.progress[run].best_epoch = epoch
            return
        figures = self.validate(self.runs.outputs)
        better = [run for run in running if self.progress[run].judge(figures[run], epoch, self.settings.patience)]
        if better:
            self.runs.remember(better)
        for run in running:
            if self.progress[run].stopped:
                self.runs.freeze(run)
        self.figures.validation_seconds += time.perf_counter() - started

    def _outcome(self, run: int) -> RunOutcome:
        one = self.progress[run]
        return RunOutcome(
            spec=self.runs.specs[run],
            weights=self.runs.weights(run, remembered=True) if one.best_epoch else {},
            epochs=len(one.losses),
            best_epoch=one.best_epoch,
            losses=tuple(one.losses),
            validations=tuple(one.validations),
            skipped_steps=self.runs.skipped_steps()[run],
            error=one.error,
            last_weights=self.runs.weights(run) if self.follow is not None and one.error is None else {},
        )
