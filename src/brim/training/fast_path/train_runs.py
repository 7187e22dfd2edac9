"""`train_runs`: many seeds (and learning rates) of one small model, on the path that is fastest here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from brim.errors import plural
from brim.memory.devices import DeviceMemory, MemoryReading, memory_of, resolve_limit
from brim.training.fast_path.choose import (
    PathChoice,
    PathChooser,
    PathTrial,
    does_not_fit,
    is_memory_failure,
)
from brim.training.fast_path.stacked_epochs import StackFigures, train_together
from brim.training.fast_path.task import RunOutcome, RunsListener, RunsRequest

__all__ = ["TrainedRuns", "train_runs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRuns:
    """Every run's outcome, in the order asked for, and how they were trained."""

    outcomes: tuple[RunOutcome, ...]
    path: str  # off, resident or stacked
    stack: int  # runs trained at once
    graph: bool  # steps were replayed from a CUDA graph
    reason: str
    trials: tuple[PathTrial, ...]
    effective_batch_size: int  # rows of the longest stream in a step: at most what there is
    rows_per_step: int  # of all streams
    micro_batch_size: int  # rows in one pass
    accumulation_steps: int
    steps_per_epoch: int
    rows: int  # trained on, over all runs
    pairs: int  # as above, of the longest stream only
    train_seconds: float
    validation_seconds: float
    oom_events: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    alloc_retries: int = 0  # where memory was measured
    notes: tuple[str, ...] = ()

    def path_to_json(self) -> dict[str, Any]:
        """How the path was chosen, as plain JSON values."""
        return {
            "path": self.path,
            "stack": self.stack,
            "cuda_graph": self.graph,
            "reason": self.reason,
            "trials": [trial.to_json() for trial in self.trials],
        }


def train_runs(
    request: RunsRequest,
    *,
    listener: RunsListener | None = None,
    keep: Callable[[TrainedRuns], None] | None = None,
) -> TrainedRuns:
    """Train every run of the task; each comes out as if it had been trained alone.

    As a loop over seeds, but with the rows on the device, and where that is faster with all runs stacked into one and
    their steps replayed from a CUDA graph. What runs out of memory is started again with half the stack, and at last in
    micro-batches, which leave the step as it is. `keep` is given the runs of every stack as soon as they are done.

        specs = [RunSpec(seed=s, lr=1e-3) for s in range(10)]
        settings = Settings(epochs=50, batch_size=512)
        trained = train_runs(RunsRequest(task=task, specs=specs, settings=settings, device="cuda"))
        trained.outcomes[3].weights
    """
    memory = memory_of(request.device)
    limit = resolve_limit(memory, asked_bytes=request.memory_limit_bytes, margin=request.margin).usable_bytes
    limited = contextlib.nullcontext() if request.memory_limit_bytes is None else memory.limited(limit)
    with limited:
        return _TrainRuns(request, memory, limit, listener or RunsListener(), keep).run()


class _TrainRuns:
    def __init__(
        self,
        request: RunsRequest,
        memory: DeviceMemory,
        limit_bytes: int,
        listener: RunsListener,
        keep: Callable[[TrainedRuns], None] | None,
    ) -> None:
        self.request, self.specs, self.settings = request, request.specs, request.settings
        self.memory, self.listener, self.keep = memory, listener, keep
        self.notes: list[str] = []
        self.readings: list[MemoryReading] = []
        self.oom_events = 0
        self._metered = request.memory_limit_bytes is not None or not memory.meter_slows
        self.paths = PathChooser(request, memory, limit_bytes, self._note)

    def run(self) -> TrainedRuns:
        choice = self.paths.choose(self.request.path)
        done: dict[int, RunOutcome] = {}
        figures: list[StackFigures] = []
        while len(done) < len(self.specs):
            group = [run for run in range(len(self.specs)) if run not in done][: choice.stack]
            outcomes, found, failure = self._train(choice, group)
            if failure is not None:
                choice = self._smaller(choice, failure)
                continue
            done.update(zip(group, outcomes, strict=True))
            figures.append(found)
            if self.keep is not None:
                self.keep(self._trained(outcomes, [found], choice))
        return self._trained([done[run] for run in sorted(done)], figures, choice)

    def _train(
        self, choice: PathChoice, group: Sequence[int]
    ) -> tuple[list[RunOutcome], StackFigures, Exception | None]:
        """The group trained from its beginning; out of memory is given back, everything else raised."""
        failure: Exception | None = None
        try:
            with self._measured():
                torch.manual_seed(self.specs[group[0]].seed)  # dropout: the same noise whenever the same are stacked
                runner = self.paths.runner(choice, group)
                outcomes, figures = train_together(runner, self.settings, self.request.task, self.listener)
            for note in figures.notes:
                self._note(note)
            return outcomes, figures, None
        except Exception as error:
            if not is_memory_failure(error):
                raise
            failure = error.with_traceback(None)
        failure.__context__ = failure.__cause__ = None
        self.memory.release()
        return [], StackFigures(), failure

    def _smaller(self, choice: PathChoice, failure: Exception) -> PathChoice:
        self.oom_events += 1
        smaller = choice.smaller(self.paths.rows)
        if smaller is None:
            raise does_not_fit(self.paths.rows, failure, self.settings) from failure
        micro = smaller.micro_batch_size
        now = f"micro-batches of {micro}" if micro is not None else f"{smaller.stack} at once"
        self._note(f"out of memory while training {plural(choice.stack, 'run')} at once; begun again with {now}")
        return smaller

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        if not self._metered:
            yield
            return
        with self.memory.metered() as reading:
            yield
        self.readings.append(reading)

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)
            self.listener.note(line)

    def _trained(
        self, outcomes: Sequence[RunOutcome], figures: Sequence[StackFigures], choice: PathChoice
    ) -> TrainedRuns:
        rows = self.paths.rows
        micro = rows if choice.micro_batch_size is None else min(choice.micro_batch_size, rows)
        return TrainedRuns(
            outcomes=tuple(outcomes),
            path=choice.path,
            stack=choice.stack,
            graph=any(one.graph for one in figures),
            reason=choice.reason,
            trials=tuple(self.paths.trials),
            effective_batch_size=self.paths.plan.size,
            rows_per_step=rows,
            micro_batch_size=micro,
            accumulation_steps=-(-rows // micro),
            steps_per_epoch=self.paths.plan.steps,
            rows=sum(one.rows for one in figures),
            pairs=sum(one.rows_of_longest for one in figures),
            train_seconds=sum(one.train_seconds for one in figures),
            validation_seconds=sum(one.validation_seconds for one in figures),
            oom_events=self.oom_events + self.paths.oom_events,
            peak_allocated_bytes=self._peak("peak_allocated_bytes", choice),
            peak_reserved_bytes=self._peak("peak_reserved_bytes", choice),
            alloc_retries=sum(reading.alloc_retries for reading in self.readings),
            notes=tuple(self.notes),
        )

    def _peak(self, name: str, choice: PathChoice) -> int | None:
        """Of the training where that was measured, else of the first step of the trial."""
        tried = [trial for trial in self.paths.trials if (trial.path, trial.runs) == (choice.path, choice.stack)]
        return max((getattr(one, name) or 0 for one in (*self.readings, *tried)), default=0) or None
