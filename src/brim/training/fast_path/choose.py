"""Which path trains these runs: from host memory, resident on the device, or stacked; by a short measurement.

A trial runs the first steps of real epochs on copies of the models and is thrown away: nothing of it reaches the runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import BrimError, DoesNotFitError, RequestError, first_line, plural
from brim.memory.devices import DeviceMemory
from brim.memory.failures import FailureKind, classify, memory_remedies, memory_savings
from brim.settings.caller import given, written
from brim.settings.shared import FAST_PATHS, FastPath
from brim.settings.sizes import format_bytes
from brim.training.fast_path.row_feed import RowFeed
from brim.training.fast_path.runs import NotStackableError, PlainRun, Runs
from brim.training.fast_path.stacked_epochs import WARM_UP_STEPS, EpochRunner
from brim.training.fast_path.stacked_runs import StackedRuns
from brim.training.fast_path.task import RowData, RunSpec, RunsRequest, Settings

__all__ = ["PathChoice", "PathChooser", "PathTrial", "is_memory_failure"]

MAX_STACKED_TIME_RATIO = 0.95  # a stack must take less than this of the time of single runs
TRIAL_SECONDS, MOST_STEPS, TIMINGS = 0.05, 20, 3  # of each timing, of its steps, of each trial
LONG_STEP_SECONDS = 1.0  # of which one is enough
SHORT_TRAINING_SECONDS = 1.0  # for which one timing is enough: a trial must not take longer than what it speeds up
CACHE_SIZED_STACK = 4  # runs at once that a processor's cache may take better than all of them
USABLE_MEMORY_FRACTION = 0.5  # of the memory: what resident rows may take, and what a stack may be expected to


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathTrial:
    """The time and memory measured on one path."""

    path: FastPath
    runs: int  # at once
    seconds_per_step: float | None = None  # of one run; None: it did not run
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    reason: str = ""  # why it did not run

    def to_json(self) -> dict[str, Any]:
        """The trial as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathChoice:
    """How runs are trained: the path, how many at once, and in what micro-batches where one pass is too much."""

    path: FastPath
    stack: int = 1
    micro_batch_size: int | None = None  # None: the whole batch in one pass
    torch_optimizer: bool = False  # the optimizer is torch's own: it has no stacked form, or none is wanted
    reason: str = ""

    def smaller(self, rows: int) -> PathChoice | None:
        """What takes less memory: half the stack, then half the micro-batch; None when nothing does."""
        if self.stack > 1:
            stack = self.stack // 2
            path: FastPath = self.path if stack > 1 else "resident"
            return dataclasses.replace(self, stack=stack, path=path)
        micro = (rows if self.micro_batch_size is None else self.micro_batch_size) // 2
        return dataclasses.replace(self, micro_batch_size=micro, torch_optimizer=True) if micro else None


class PathChooser:
    """Makes runners of a task for any path, tries them, and chooses."""

    def __init__(
        self, request: RunsRequest, memory: DeviceMemory, limit_bytes: int, note: Callable[[str], None]
    ) -> None:
        self.task, self.specs, self.settings = request.task, tuple(request.specs), request.settings
        self.memory, self.device = memory, memory.device
        self.plan = self.task.plan(self.settings)
        self.trials: list[PathTrial] = []
        self.oom_events = 0
        self._request, self._limit_bytes, self._note = request, limit_bytes, note
        self._resident: RowData | None = None

    @property
    def rows(self) -> int:
        """Rows in a full step of one run."""
        return sum(self.plan.full)

    def runner(self, choice: PathChoice, runs: Sequence[int]) -> EpochRunner:
        """A runner for these runs, freshly initialised."""
        specs = [self.specs[run] for run in runs]
        made = self._runs(choice, specs)
        resident = choice.path != "off"
        data = (self._data_on_device() if resident else self.task.data).of_runs(runs)
        feed = RowFeed(
            data, self.plan, specs, stacked=made.stacked, device=self.device, resident=resident,
            order_of=self.task.orders,
        )  # fmt: skip
        return EpochRunner(made, feed, self.plan, lr_factor=self.settings.lr_factor, graphs=self._request.graphs)

    def choose(self, asked: str) -> PathChoice:
        """The path that was asked for where it can be had, or the fastest; a note says why one is not possible."""
        if asked not in ("auto", *FAST_PATHS):
            raise RequestError(f"{given('fast_path', asked)}: it must be auto, {', '.join(FAST_PATHS)}")
        if asked == "off":
            return self._fitting(PathChoice(path="off", torch_optimizer=True, reason="asked for"))[0]
        if self.task.data.bytes > USABLE_MEMORY_FRACTION * self._limit_bytes:
            self._note(
                f"the rows take {format_bytes(self.task.data.bytes)} and stay in host memory: the device has "
                f"{format_bytes(self._limit_bytes)}"
            )
            return self._fitting(PathChoice(path="off", torch_optimizer=True, reason="the rows are too many"))[0]
        alone, trial = self._fitting(self._alone())
        if len(self.specs) == 1 or asked == "resident" or alone.torch_optimizer:
            why = "asked for" if asked == "resident" else "there is one run" if len(self.specs) == 1 else alone.reason
            return dataclasses.replace(alone, reason=why)
        return self._stacked_or(alone, trial, asked)

    def _data_on_device(self) -> RowData:
        """The rows, copied over once for all trials and runs."""
        if self._resident is None:
            self._resident = self.task.data.on(self.device)
        return self._resident

    def _alone(self) -> PathChoice:
        """A single run on the device, in the stacked form where it has one."""
        micro = self._request.micro_batch_size
        if micro is not None and micro < self.rows:
            return PathChoice(
                path="resident", torch_optimizer=True, micro_batch_size=micro,
                reason="batches in several passes are not stacked",
            )  # fmt: skip
        if self._request.not_stacked:
            return self._not_stacked(self._request.not_stacked)
        try:
            first = self.task.make_model(self.specs[0].seed)
            StackedRuns([first], self.specs[:1], self.task, self.settings, torch.device("cpu"))
        except NotStackableError as error:
            return self._not_stacked(str(error))
        return PathChoice(path="resident")

    def _not_stacked(self, why: str) -> PathChoice:
        self._note(f"runs are not stacked: {why}")
        return PathChoice(path="resident", torch_optimizer=True, reason=f"cannot be stacked: {why}")

    def _stacked_or(self, alone: PathChoice, alone_trial: PathTrial, asked: str) -> PathChoice:
        """Stacked if that is faster or was asked for, and can be had."""
        choice = PathChoice(path="stacked", stack=self._stack_that_fits(alone_trial))
        while choice.stack > 1:
            trial, failure = self._try(choice)
            if failure is None:
                break
            if not is_memory_failure(failure):
                self._note(f"runs are not stacked: {first_line(failure)}")
                return dataclasses.replace(alone, reason=f"cannot be stacked: {first_line(failure)}")
            choice = dataclasses.replace(choice, stack=choice.stack // 2)
        if choice.stack <= 1:
            return dataclasses.replace(alone, reason="two runs at once do not fit")
        if self.device.type == "cpu" and choice.stack > CACHE_SIZED_STACK:
            smaller, failure = self._try(dataclasses.replace(choice, stack=CACHE_SIZED_STACK))
            if failure is None and (smaller.seconds_per_step or 0) < (trial.seconds_per_step or 0):
                choice, trial = dataclasses.replace(choice, stack=CACHE_SIZED_STACK), smaller
        assert trial.seconds_per_step is not None
        assert alone_trial.seconds_per_step is not None
        ratio = alone_trial.seconds_per_step / trial.seconds_per_step
        if asked == "stacked":
            return dataclasses.replace(choice, reason="asked for")
        if trial.seconds_per_step < MAX_STACKED_TIME_RATIO * alone_trial.seconds_per_step:
            return dataclasses.replace(choice, reason=f"{ratio:.2f} times the rate of single runs")
        return dataclasses.replace(alone, reason=f"a stack of {choice.stack} has {ratio:.2f} times the rate")

    def _stack_that_fits(self, alone: PathTrial) -> int:
        """All runs, or as many as the bytes of one suggest; the trial decides."""
        peak = alone.peak_allocated_bytes
        if not peak:
            return len(self.specs)
        room = USABLE_MEMORY_FRACTION * self._limit_bytes - self.task.data.bytes
        own = max(peak - self.task.data.bytes, 1)
        return max(2, min(len(self.specs), int(room / own)))

    def _fitting(self, choice: PathChoice) -> tuple[PathChoice, PathTrial]:
        """The choice, or the nearest smaller one whose first steps run."""
        while True:
            trial, failure = self._try(choice)
            if failure is None:
                return choice, trial
            if isinstance(failure, NotStackableError):
                choice = self._not_stacked(str(failure))
                continue
            if not is_memory_failure(failure):
                raise failure
            smaller = choice.smaller(self.rows)
            if smaller is None:
                raise does_not_fit(self.rows, failure, self.settings) from failure
            self._note(
                f"a batch of {plural(self.rows, 'row')} does not fit in one pass; continuing with micro-batches of "
                f"{smaller.micro_batch_size}"
            )
            choice = smaller

    def _try(self, choice: PathChoice) -> tuple[PathTrial, Exception | None]:
        """The first steps on this path; a failure is given back once its traceback pins nothing any more."""
        failure: Exception | None = None
        trial = PathTrial(path=choice.path, runs=choice.stack)
        try:
            trial = self._time(choice)
        except Exception as error:
            if isinstance(error, BrimError):
                raise
            failure = error.with_traceback(None)
            trial = dataclasses.replace(trial, reason=first_line(error))
        if failure is not None:
            failure.__context__ = failure.__cause__ = None
            self.oom_events += is_memory_failure(failure)
            self.memory.release()
        self.trials.append(trial)
        return trial, failure

    def _time(self, choice: PathChoice) -> PathTrial:
        runner = self.runner(choice, range(choice.stack))
        orders = runner.feed.orders(0)
        runner.prepare(0)
        steps = itertools.cycle(range(self.plan.steps))

        def advance() -> None:
            step = next(steps)
            if step == 0:
                runner.feed.begin(orders)
            runner.take(step)

        with self.memory.metered() as reading:
            advance()
        for _ in range(WARM_UP_STEPS + 1 if self.device.type == "cuda" else 0):
            advance()
        # The quickest of three timings: other work on the machine only ever makes one longer.
        timings = [self.memory.timed(advance, repeats=1)]
        steps_per_timing = max(1, min(MOST_STEPS, round(TRIAL_SECONDS / max(timings[0], 1e-6))))
        whole_seconds = timings[0] * self.plan.steps * self.settings.epochs * len(self.specs) / choice.stack
        if timings[0] < LONG_STEP_SECONDS and whole_seconds > SHORT_TRAINING_SECONDS:
            timings = [self.memory.timed(advance, repeats=steps_per_timing) / steps_per_timing for _ in range(TIMINGS)]
        return PathTrial(
            path=choice.path,
            runs=choice.stack,
            seconds_per_step=min(timings) / choice.stack,
            peak_allocated_bytes=reading.peak_allocated_bytes or None,
            peak_reserved_bytes=reading.peak_reserved_bytes or None,
        )

    def _runs(self, choice: PathChoice, specs: Sequence[RunSpec]) -> Runs:
        models, micro = [self.task.make_model(spec.seed) for spec in specs], choice.micro_batch_size
        if not choice.torch_optimizer:
            return StackedRuns(models, specs, self.task, self.settings, self.device)
        if micro is not None and _normalises_batches(models[0]):
            self._note("batch normalisation sees micro-batches: the step is not quite the whole batch's")
        return PlainRun(models[0], specs[0], self.task, self.settings, self.device, micro_batch_size=micro)


def _normalises_batches(model: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())


def is_memory_failure(error: Exception) -> bool:
    """Whether a smaller stack or batch may help."""
    return classify(error).kind in (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT, FailureKind.AMBIGUOUS)


def does_not_fit(rows: int, error: Exception, settings: Settings) -> DoesNotFitError:
    """Not even single rows fit."""
    savings = memory_savings(half_precision=written("dtype", "bfloat16") if settings.autocast_dtype is None else "")
    remedies = "\n  - ".join(memory_remedies(savings, batch_size=rows))
    return DoesNotFitError(f"not even one row at a time fits ({first_line(error)}).\nWhat may help:\n  - {remedies}")
