"""The training loop: which samples a step takes, when runs are validated, their best epoch, when they stop.

`run_epochs` is the one loop over epochs. Two backends do its work:

    trainer.Trainer                            one run of any model in micro-batches, on one rank or several
    fast_path.stacked_epochs.StackTrainer      many runs of a small model as one, their rows on the device

The loop hands a backend one epoch at a time, not one window: the steps of a captured CUDA graph follow each other
without the host, and asking after each of them would make the device wait. What a window holds, how an epoch's loss is
averaged, and every rule about epochs is here and nowhere else. It knows neither devices nor files.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brim.settings.train_settings import TrainSettings
from brim.training.objective import Objective, choose_monitor

__all__ = [
    "EndedEpoch",
    "EpochBackend",
    "EpochRules",
    "Progress",
    "Window",
    "epoch_order",
    "epoch_permutation",
    "epoch_rules",
    "next_window",
    "run_epochs",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """The places [start, stop) of an epoch's order: one optimizer step over all ranks.

    A window is as long as the effective batch. A rank has every `ranks`-th place of it, so that its share does not
    depend on where windows begin.
    """

    start: int
    stop: int

    @property
    def samples(self) -> int:
        """How many samples all ranks have together."""
        return self.stop - self.start

    def share(self, order: Sequence[int], *, rank: int, ranks: int) -> list[int]:
        """The samples of one rank; shares differ by one at most."""
        first = self.start + (rank - self.start) % ranks
        return [int(order[place]) for place in range(first, self.stop, ranks)]


def epoch_order(count: int, *, seed: int, epoch: int) -> list[int]:
    """Every sample once, in an order that follows from seed and epoch alone: a resumed run finds it again."""
    order: list[int] = epoch_permutation(count, seed=seed, epoch=epoch).tolist()
    return order


def epoch_permutation(count: int, *, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The same order as an array, [samples]."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def next_window(position: int, count: int, effective_batch: int, *, smallest: int = 1) -> Window:
    """The window that begins at `position`; a remainder too small for a window of its own is added to it."""
    stop = min(position + effective_batch, count)
    return Window(start=position, stop=count if count - stop < smallest else stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochRules:
    """How long runs train, when they are validated, and which epoch is their best."""

    epochs: int
    max_steps: int | None = None
    eval_every: int = 1  # epochs between validations; the last one is always validated
    validated: bool = True  # False: there is nothing to validate on, and `loss` is the training loss
    monitor: str | None = "loss"  # the figure that is compared; None: every epoch replaces the one before
    higher_is_better: bool = False
    loss_breaks_ties: bool = True  # of two epochs with the same figure the one with the lower loss is the better
    early_stopping: int | None = None  # validations without a gain
    early_stopping_min_delta: float = 0.0

    def enough_steps(self, progress: Progress) -> bool:
        """Whether `max_steps` are made, perhaps in the middle of an epoch."""
        return self.max_steps is not None and progress.step >= self.max_steps

    def stops_early(self, progress: Progress) -> bool:
        """Whether no validation has been a gain for long enough."""
        return self.early_stopping is not None and progress.waited >= self.early_stopping

    def finished(self, progress: Progress) -> bool:
        """Whether a run has ended its last epoch."""
        enough = self.enough_steps(progress) and progress.position == 0
        return progress.epoch >= self.epochs or progress.stopped_early or enough

    def validates(self, progress: Progress) -> bool:
        """Whether the epoch under way ends with a validation."""
        return self.validated and (self.enough_steps(progress) or self.validates_after(progress.epoch))

    def validates_after(self, epoch: int) -> bool:
        """Whether a validation follows an epoch, unless the run ends before."""
        return self.validated and (epoch + 1 >= self.epochs or (epoch + 1) % self.eval_every == 0)


def epoch_rules(settings: TrainSettings, objective: Objective, *, validated: bool) -> EpochRules:
    """The rules that the settings of a run ask for."""
    hp, training = settings.hp, settings.training
    monitor = choose_monitor(training.monitor, objective, validated=validated)
    return EpochRules(
        epochs=hp.epochs,
        max_steps=hp.max_steps,
        eval_every=training.eval_every,
        validated=validated,
        monitor=monitor,
        higher_is_better=monitor in objective.higher_is_better,
        early_stopping=training.early_stopping,
        early_stopping_min_delta=training.early_stopping_min_delta,
    )


@dataclasses.dataclass(kw_only=True)
class Progress:
    """How far a run is, the rows of its epochs.csv, its best epoch; the same on every rank. Checkpoints keep it."""

    step: int = 0  # optimizer steps made
    epoch: int = 0  # epochs finished
    position: int = 0  # samples of the epoch under way that have been trained on
    samples: int = 0  # in all
    train_seconds: float = 0.0
    epoch_seconds: float = 0.0  # of the steps of the epoch under way
    loss_total: float = 0.0  # over the epoch under way
    loss_weight: float = 0.0
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # one per epoch
    batches: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # changes of the effective batch
    best_epoch: int | None = None  # from 0
    best_value: float | None = None
    best_loss: float | None = None
    waited: int = 0  # validations without a gain
    stopped_early: bool = False

    def add_steps(self, samples: int, *, steps: int = 1) -> None:
        """Optimizer steps over so many samples were made."""
        self.step += steps
        self.position += samples
        self.samples += samples

    def add_seconds(self, seconds: float) -> None:
        """Training took so long."""
        self.train_seconds += seconds
        self.epoch_seconds += seconds

    def add_loss(self, total: float, weight: float) -> None:
        """The loss of one or more steps is known: its sum, and what it is divided by."""
        self.loss_total += total
        self.loss_weight += weight

    def end_epoch(self, figures: Mapping[str, float], **facts: Any) -> dict[str, Any]:
        """Close the epoch under way, with its figures of validation if there are any; gives its row."""
        row = {
            "epoch": self.epoch,
            "step": self.step,
            "samples": self.samples,
            "train_loss": self.loss_total / self.loss_weight if self.loss_weight else None,
            **{f"val_{name}": value for name, value in figures.items()},
            "seconds": self.epoch_seconds,
            "samples_per_second": self.position / self.epoch_seconds if self.epoch_seconds else None,
            **facts,
        }
        self.rows.append(row)
        self.epoch += 1
        self.position = 0
        self.epoch_seconds = self.loss_total = self.loss_weight = 0.0
        return row

    def judge(self, figures: Mapping[str, float], rules: EpochRules) -> bool:
        """Whether the epoch just ended is the best so far; sets `stopped_early` when none has been for long enough.

        An epoch without the monitored figure is not judged. A figure that is not a number is never the best. Among
        equals the lower loss wins, but that is no gain for early stopping.
        """
        train_loss: float | None = self.rows[-1]["train_loss"]
        if rules.monitor is None:
            self.best_epoch = self.epoch - 1
            return True
        only_loss = rules.monitor == "loss" and not rules.validated
        value = figures.get(rules.monitor, train_loss if only_loss else None)
        if value is None:
            return False
        loss, before = figures.get("loss", train_loss), self.best_value
        if before is None or math.isnan(before):
            gained = not math.isnan(value)
        else:
            gained = (value - before if rules.higher_is_better else before - value) > rules.early_stopping_min_delta
        tied = rules.loss_breaks_ties and value == before
        better = gained or (tied and loss is not None and self.best_loss is not None and loss < self.best_loss)
        if better:
            self.best_value, self.best_loss, self.best_epoch = value, loss, self.epoch - 1
        self.waited = 0 if gained else self.waited + 1
        self.stopped_early = rules.stops_early(self)
        return better

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """Read it back; fields of a later version are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndedEpoch:
    """An epoch of one run, and what follows from it."""

    run: int
    row: dict[str, Any]  # of epochs.csv
    figures: Mapping[str, float]  # of validation; empty where there was none
    better: bool  # its weights are the best so far
    stopped: bool  # early: the run trains no further


class EpochBackend(abc.ABC):
    """Trains one run, or several at once that are always in the same epoch."""

    progress: Sequence[Progress]  # of each run; the backend counts steps, seconds and losses, the loop ends epochs

    @abc.abstractmethod
    def train_epoch(self, running: Sequence[int]) -> Sequence[int]:
        """Make the steps that are left of the epoch; gives the runs whose losses are numbers, the others are over."""

    @abc.abstractmethod
    def validate(self, running: Sequence[int]) -> Mapping[int, Mapping[str, float]]:
        """Each run's figures on the validation samples."""

    @abc.abstractmethod
    def epoch_facts(self, run: int) -> Mapping[str, Any]:
        """What the epoch's row has beside losses, figures and times: sizes, learning rate, memory."""

    @abc.abstractmethod
    def epoch_ended(self, ended: Sequence[EndedEpoch]) -> None:
        """Keep the weights of the best epochs, write what is to be written, freeze the runs that stop."""


def run_epochs(backend: EpochBackend, rules: EpochRules) -> None:
    """Train every run from where it is to its last epoch."""
    running: Sequence[int] = range(len(backend.progress))
    while running := [run for run in running if not rules.finished(backend.progress[run])]:
        running = backend.train_epoch(running)
        validated = bool(running) and rules.validates(backend.progress[running[0]])
        every = backend.validate(running) if validated else {}
        ended = []
        for run in running:
            progress, figures = backend.progress[run], every.get(run, {})
            row = progress.end_epoch(figures, **backend.epoch_facts(run))
            better = progress.judge(figures, rules)
            ended.append(EndedEpoch(run=run, row=row, figures=figures, better=better, stopped=progress.stopped_early))
        backend.epoch_ended(ended)
