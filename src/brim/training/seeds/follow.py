"""Follows the runs of a stack epoch by epoch with the loop's own rules: figures, best epoch, early stopping, rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from brim.memory.devices import DeviceMemory
from brim.training.fast_path.in_passes import InPasses
from brim.training.fast_path.order import EpochPlan
from brim.training.fast_path.problem import EpochEnd, Outputs, RunSpec, Verdict
from brim.training.items import TensorItems
from brim.training.listener import StepRecord
from brim.training.objective import Classification, Regression
from brim.training.progress import Progress

__all__ = ["FollowRules", "Follower", "HeldOut", "Track"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowRules:
    """When runs are validated, and by what they are judged; as the loop has it."""

    plan: EpochPlan
    rates: Callable[[RunSpec], Sequence[float]]  # by the optimizer step
    eval_every: int
    monitor: str
    higher_is_better: bool
    patience: int | None
    min_delta: float

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """Rows of each step of an epoch, [steps]."""
        return torch.tensor([self.plan.counts(step)[0] for step in range(self.plan.steps)], dtype=torch.float64)


@dataclasses.dataclass(kw_only=True)
class Track:
    """How one run went: its epochs, and the loss of every step as numbers in a row."""

    spec: RunSpec
    rules: FollowRules
    progress: Progress = dataclasses.field(default_factory=Progress)
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of each epoch, [steps]

    def learn(self, losses: torch.Tensor, seconds: float) -> None:
        """An epoch's steps were made."""
        progress, rows = self.progress, self.rules.rows
        self.losses.append(losses)
        progress.step += len(rows)
        progress.position = int(rows.sum())
        progress.samples += progress.position
        progress.spent(seconds)
        progress.learnt(float(losses.double() @ rows), float(progress.position))

    def lines(self) -> Iterator[dict[str, Any]]:
        """Every step as steps.jsonl has it; its seconds are an even share of the epoch's."""
        rows = [int(count) for count in self.rules.rows.tolist()]
        rates, step, samples = self.rules.rates(self.spec), 0, 0
        for epoch, losses in enumerate(self.losses):
            seconds = self.progress.rows[epoch]["seconds"] / len(rows)
            for loss, count in zip(losses.tolist(), rows, strict=True):
                step, samples = step + 1, samples + count
                yield StepRecord(
                    step=step, epoch=epoch, samples=samples, loss=loss, learning_rate=rates[step - 1],
                    effective_batch=count, micro_batches=(count,), seconds=seconds,
                ).to_json()  # fmt: skip


class HeldOut:
    """The validation rows where the runs are, judged for a whole stack in passes that fit."""

    def __init__(
        self,
        items: TensorItems,
        objective: Classification | Regression,
        memory: DeviceMemory,
        *,
        batch_size: int | None,
    ) -> None:
        assert items.labels is not None
        self.objective = objective
        self.passes = InPasses(memory, batch_size=batch_size, dim=1)
        self._rows, self._labels = items.rows.to(memory.device), items.labels.to(memory.device)

    def figures(self, outputs: Outputs) -> list[dict[str, float]]:
        """Every run's figures over all rows."""

        def judged(places: torch.Tensor) -> torch.Tensor:
            given = outputs(self._rows[places])  # [runs, rows, …]
            labels = self._labels[places].repeat(len(given))
            found = self.objective.sample_metrics_of(given.flatten(0, 1), labels)
            return found.reshape(*given.shape[:2], -1)  # [runs, rows, figures and weight]

        every = self.passes(judged, torch.arange(len(self._rows), device=self._rows.device))
        wide = every if every.device.type == "mps" else every.double()
        sums = wide.sum(dim=1).tolist()
        return [
            {name: value / run[-1] for name, value in zip(self.objective.metrics, run, strict=False)} for run in sums
        ]


class Follower:
    """Follows one stack from its first epoch on."""

    def __init__(self, specs: Sequence[RunSpec], rules: FollowRules, held_out: HeldOut | None) -> None:
        self.tracks = [Track(spec=spec, rules=rules) for spec in specs]
        self._rules = rules
        self._held_out = held_out

    def __call__(self, end: EpochEnd) -> Verdict:
        rules = self._rules
        validated = self._held_out is not None and (end.last or end.epoch % rules.eval_every == 0)
        every = self._held_out.figures(end.outputs) if self._held_out is not None and validated else None
        better, stopped = [], []
        for run in end.running:
            track = self.tracks[run]
            track.learn(end.losses[run].clone(), end.seconds / len(end.running))  # its share of the stack's time
            figures = {} if every is None else every[run]
            row = self._row(track, figures)
            if self._judge(track, figures, row):
                better.append(run)
            if track.progress.stopped_early:
                stopped.append(run)
        return Verdict(better=tuple(better), stopped=tuple(stopped))

    def _row(self, track: Track, figures: dict[str, float]) -> dict[str, Any]:
        held_out = self._held_out
        return track.progress.end_epoch(
            figures,
            learning_rate=self._rules.rates(track.spec)[track.progress.step - 1],
            effective_batch=self._rules.plan.size,
            micro_batch=self._rules.plan.size,
            eval_batch=None if held_out is None else held_out.passes.largest or None,
        )

    def _judge(self, track: Track, figures: dict[str, float], row: dict[str, Any]) -> bool:
        rules = self._rules
        no_validation = rules.monitor == "loss" and self._held_out is None
        value = figures.get(rules.monitor, row["train_loss"] if no_validation else None)
        if value is None:
            return False
        return track.progress.judge(
            value,
            figures.get("loss", row["train_loss"]),
            higher_is_better=rules.higher_is_better,
            min_delta=rules.min_delta,
            patience=rules.patience,
        )
