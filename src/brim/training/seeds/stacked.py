"""Trains several seeds and learning rates of one model on rows of features through the fast path.

Each run has the loop's own initial weights, order of samples, batch, schedule, clipping and rules for the best epoch
and early stopping, so its result is that of `brim train CONFIG hp.seed=N`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from brim.memory.devices import DeviceMemory, memory_of
from brim.training.fast_path.row_feed import InPasses
from brim.training.fast_path.task import (
    Batch,
    Counts,
    Outputs,
    RowData,
    RunOutcome,
    RunsListener,
    RunSpec,
    RunsRequest,
    Settings,
    TrainingTask,
)
from brim.training.fast_path.train_runs import TrainedRuns, train_runs
from brim.training.items import TensorItems
from brim.training.loop import epoch_permutation, epoch_rules
from brim.training.objective import Classification, Regression
from brim.training.seeds.suitability import StackSetup
from brim.training.seeds.variants import Variant

__all__ = ["TrainedStack", "ValidationSet", "train_stacked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedStack:
    """Runs that were trained together, and how."""

    variants: tuple[Variant, ...]
    outcomes: tuple[RunOutcome, ...]
    trained: TrainedRuns
    eval_batch_size: int | None
    oom_events: int
    alloc_retries: int


def train_stacked(
    setup: StackSetup,
    variants: Sequence[Variant],
    *,
    listener: RunsListener,
    keep: Callable[[TrainedStack], None],
) -> None:
    """Train these runs; those of every stack are handed to `keep` as soon as they are done.

    Runs whose learning rates have the same course, up to a factor, make up one stack; others follow.
    """
    courses: dict[tuple[float, ...], list[Variant]] = {}
    for variant in variants:
        course = setup.tables[variant.learning_rate].factors(variant.learning_rate)
        courses.setdefault(course, []).append(variant)
    for course, together in courses.items():
        _Stack(setup, together, course, listener, keep).train()


class ValidationSet:
    """The validation rows on the device of the runs, judged for a whole stack in passes that fit."""

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


class _Stack:
    """Runs with one course of the learning rate."""

    def __init__(
        self,
        setup: StackSetup,
        variants: Sequence[Variant],
        course: tuple[float, ...],
        listener: RunsListener,
        keep: Callable[[TrainedStack], None],
    ) -> None:
        assert isinstance(setup.subject.objective, (Classification, Regression))
        self.subject, self.request, self.setup = setup.subject, setup.request, setup
        self.objective = setup.subject.objective
        self.variants = {variant.spec: variant for variant in variants}
        self.course = course
        self.listener, self.keep = listener, keep
        self.memory = memory_of(setup.subject.device)
        self.validation = self._validation()
        self.task = self._task()
        self._reported = (0, 0)  # OOM events and allocator retries of the stacks before

    def train(self) -> None:
        """To the end."""
        asked = RunsRequest(
            task=self.task,
            specs=list(self.variants),
            settings=self._settings(),
            device=self.subject.device,
            path=self.request.fast_path,
            memory_limit_bytes=self.request.memory_limit_bytes,
            margin=self.request.settings.training.margin,
        )
        train_runs(asked, listener=self.listener, keep=self._done)

    def _done(self, trained: TrainedRuns) -> None:
        passes = None if self.validation is None else self.validation.passes
        before, (events, retries) = self._reported, (trained.oom_events, trained.alloc_retries)
        events += 0 if passes is None else passes.oom_events
        self.keep(
            TrainedStack(
                variants=tuple(self.variants[outcome.spec] for outcome in trained.outcomes),
                outcomes=trained.outcomes,
                trained=trained,
                eval_batch_size=None if passes is None else passes.largest or None,
                oom_events=events - before[0],
                alloc_retries=retries - before[1],
            )
        )
        self._reported = (events, retries)

    def _task(self) -> TrainingTask:
        items, objective, validation = self.subject.data.train, self.objective, self.validation
        assert isinstance(items, TensorItems)
        assert items.labels is not None
        count = len(items)

        def criterion(outputs: torch.Tensor, batch: Batch, counts: Counts) -> torch.Tensor:
            return objective.loss_of(outputs, batch["labels"]).total / counts[0]

        def orders(seed: int, epoch: int) -> list[torch.Tensor]:
            return [torch.from_numpy(epoch_permutation(count, seed=seed, epoch=epoch))]

        return TrainingTask(
            make_model=self.subject.model_with_seed,
            data=RowData(
                tensors={"features": items.rows, "labels": items.labels}, lengths=(count,), ids=items.ids
            ),
            criterion=criterion,
            validate=None if validation is None else validation.figures,
            orders=orders,
            rules=epoch_rules(self.request.settings, objective, validated=validation is not None),
            epoch_facts=self._epoch_facts,
        )  # fmt: skip

    def _epoch_facts(self, spec: RunSpec, step: int) -> dict[str, Any]:
        batch = self.setup.effective.batch
        return {
            "learning_rate": self.setup.tables[spec.lr].rates[step - 1],
            "effective_batch": batch,
            "micro_batch": batch,
            "eval_batch": None if self.validation is None else self.validation.passes.largest or None,
        }

    def _settings(self) -> Settings:
        settings, course = self.request.settings, self.course
        first = next(iter(self.setup.tables.values()))
        return Settings(
            epochs=self.setup.epochs,
            batch_size=self.setup.effective.batch,
            optimizer=settings.optimizer.name,
            optimizer_options=first.options,
            clip_norm=settings.training.gradient_clip,
            autocast_dtype=self.subject.autocast,
            loss_scaling=self.subject.loss_scaling,
            lr_factor=None if set(course) == {1.0} else course.__getitem__,
            skips_infinite_losses=False,
        )

    def _validation(self) -> ValidationSet | None:
        items = self.subject.data.validation
        if items is None or not self.request.validate:
            return None
        assert isinstance(items, TensorItems)
        asked = self.request.settings.training.eval_batch_size
        return ValidationSet(items, self.objective, self.memory, batch_size=asked if isinstance(asked, int) else None)
