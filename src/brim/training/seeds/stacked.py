"""Trains several seeds and learning rates of one model on rows of features through the fast path.

Each run has the loop's own initial weights, order of samples, batch, schedule, clipping and rules for the best epoch
and early stopping, so it comes out as `brim train CONFIG hp.seed=N` would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from brim.memory.devices import memory_of
from brim.settings.train_request import TrainRequest
from brim.training.fast_path.order import Counts
from brim.training.fast_path.problem import (
    Batch,
    EpochEnd,
    Problem,
    RowData,
    RunOutcome,
    RunsListener,
    RunSpec,
    Settings,
    Verdict,
)
from brim.training.fast_path.train_runs import TrainedRuns, train_runs
from brim.training.items import TensorItems
from brim.training.listener import TrainListener
from brim.training.objective import Classification, Regression, choose_monitor
from brim.training.seeds.follow import Follower, FollowRules, HeldOut, Track
from brim.training.seeds.suitability import Suitable
from brim.training.seeds.variants import Variant
from brim.training.setup import TrainingSetup
from brim.training.windows import epoch_permutation

__all__ = ["StackDone", "train_stacked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackDone:
    """Runs that were trained together, and how."""

    variants: tuple[Variant, ...]
    outcomes: tuple[RunOutcome, ...]
    tracks: tuple[Track, ...]
    trained: TrainedRuns
    eval_batch_size: int | None
    oom_events: int
    alloc_retries: int


def train_stacked(
    subject: TrainingSetup,
    request: TrainRequest,
    suitable: Suitable,
    variants: Sequence[Variant],
    *,
    listener: TrainListener,
    keep: Callable[[StackDone], None],
) -> None:
    """Train these runs; those of every stack are handed to `keep` as soon as they are done.

    Runs whose learning rates have the same course, up to a factor, make up one stack; others follow.
    """
    courses: dict[tuple[float, ...], list[Variant]] = {}
    for variant in variants:
        course = suitable.tables[variant.learning_rate].factors(variant.learning_rate)
        courses.setdefault(course, []).append(variant)
    for course, together in courses.items():
        _Stack(subject, request, suitable, together, course, listener, keep).train()


class _Told(RunsListener):
    def __init__(self, listener: TrainListener) -> None:
        self._listener = listener

    def epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        self._listener.stack_epoch(runs=runs, epoch=epoch, epochs=epochs, stopped=stopped)

    def note(self, line: str) -> None:
        self._listener.note(line)


class _Stack:
    """Runs with one course of the learning rate."""

    def __init__(
        self,
        subject: TrainingSetup,
        request: TrainRequest,
        suitable: Suitable,
        variants: Sequence[Variant],
        course: tuple[float, ...],
        listener: TrainListener,
        keep: Callable[[StackDone], None],
    ) -> None:
        assert isinstance(subject.objective, (Classification, Regression))
        self.subject, self.request, self.suitable = subject, request, suitable
        self.objective = subject.objective
        self.variants = {variant.spec: variant for variant in variants}
        self.course = course
        self.listener, self.keep = listener, keep
        self.memory = memory_of(subject.device)
        self.tracks: dict[RunSpec, Track] = {}
        self.problem, self.settings = self._problem(), self._settings()
        self.held_out = self._held_out()
        self.rules = self._rules()
        self._told = (0, 0)  # OOM events and allocator retries of the stacks before

    def train(self) -> None:
        """To the end."""
        training = self.request.settings.training
        train_runs(
            dataclasses.replace(self.problem, follow=self._follow),
            list(self.variants),
            self.settings,
            device=self.subject.device,
            path=self.request.fast_path,
            memory_limit_bytes=self.request.memory_limit_bytes,
            margin=training.margin,
            listener=_Told(self.listener),
            keep=self._done,
        )

    def _follow(self, specs: Sequence[RunSpec]) -> Callable[[EpochEnd], Verdict]:
        follower = Follower(specs, self.rules, self.held_out)
        self.tracks.update(zip(specs, follower.tracks, strict=True))
        return follower

    def _done(self, trained: TrainedRuns) -> None:
        specs = [outcome.spec for outcome in trained.outcomes]
        passes = None if self.held_out is None else self.held_out.passes
        told, (events, retries) = self._told, (trained.oom_events, trained.alloc_retries)
        events += 0 if passes is None else passes.oom_events
        self.keep(
            StackDone(
                variants=tuple(self.variants[spec] for spec in specs),
                outcomes=trained.outcomes,
                tracks=tuple(self.tracks[spec] for spec in specs),
                trained=trained,
                eval_batch_size=None if passes is None else passes.largest or None,
                oom_events=events - told[0],
                alloc_retries=retries - told[1],
            )
        )
        self._told = (events, retries)

    def _problem(self) -> Problem:
        items, objective = self.subject.data.train, self.objective
        assert isinstance(items, TensorItems)
        assert items.labels is not None
        count = len(items)

        def criterion(outputs: torch.Tensor, batch: Batch, counts: Counts) -> torch.Tensor:
            return objective.loss_of(outputs, batch["labels"]).total / counts[0]

        def orders(seed: int, epoch: int) -> list[torch.Tensor]:
            return [torch.from_numpy(epoch_permutation(count, seed=seed, epoch=epoch))]

        return Problem(
            make_model=self.subject.model_with_seed,
            data=RowData(
                tensors={"features": items.rows, "labels": items.labels}, lengths=(count,), ids=items.ids
            ),
            criterion=criterion,
            orders=orders,
        )  # fmt: skip

    def _settings(self) -> Settings:
        settings, course = self.request.settings, self.course
        first = next(iter(self.suitable.tables.values()))
        return Settings(
            epochs=self.suitable.epochs,
            batch_size=self.suitable.effective.batch,
            optimizer=settings.optimizer.name,
            optimizer_options=first.options,
            clip_norm=settings.training.gradient_clip,
            autocast_dtype=self.subject.autocast,
            loss_scaling=self.subject.loss_scaling,
            lr_factor=None if set(course) == {1.0} else course.__getitem__,
        )

    def _held_out(self) -> HeldOut | None:
        items = self.subject.data.validation
        if items is None or not self.request.validate:
            return None
        assert isinstance(items, TensorItems)
        asked = self.request.settings.training.eval_batch_size
        return HeldOut(items, self.objective, self.memory, batch_size=asked if isinstance(asked, int) else None)

    def _rules(self) -> FollowRules:
        training = self.request.settings.training
        monitor = choose_monitor(training.monitor, self.objective, validated=self.held_out is not None)
        tables = self.suitable.tables
        return FollowRules(
            plan=self.problem.plan(self.settings),
            rates=lambda spec: tables[spec.lr].rates,
            eval_every=training.eval_every,
            monitor=monitor,
            higher_is_better=monitor in self.objective.higher_is_better,
            patience=training.early_stopping,
            min_delta=training.early_stopping_min_delta,
        )
