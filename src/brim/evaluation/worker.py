"""What one process does of an evaluation: it runs samples on its device and yields their lines, batch by batch.

It knows neither the run's folder nor the other processes: a rank writes the lines into its journal, a worker of a
cluster sends them to the driver.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import DoesNotFitError, RequestError, plural
from brim.evaluation.scoring import RankFigures, Scorer
from brim.evaluation.setup import EvaluationSetup, SetupFacts
from brim.evaluation.start import HowSized, MakeForecast, PoolStart, Start, StartingPoint, forecast_first_batch
from brim.evaluation.timing import IdleClock, StageClock
from brim.memory.devices import DeviceMemory, ModelMemory, as_current, device_uuid, memory_of, resolve_limit
from brim.monitor.sampler import Sampler
from brim.monitor.trace_file import TraceText
from brim.records import Plan
from brim.running.executor import BatchWork, ExecutionPolicy, Executor, Finished, ItemFailure, Pending
from brim.running.loader import Loader, LoaderSettings, NotPrepared
from brim.running.pooled import PooledExecutor, PoolSource, PoolWork
from brim.running.results import ExecutionFigures, ThroughputCurve, one_for_each
from brim.settings.caller import named, written
from brim.settings.eval_settings import EvalRequest
from brim.sizing.live import LiveSizer
from brim.sizing.priors import Prior

__all__ = ["EvalListener", "Lines", "Offload", "Worker"]

Lines = list[dict[str, Any]]


class EvalListener:
    """Is called as the run proceeds; each method does nothing by default."""

    def opened(self, facts: SetupFacts) -> None:
        """Model and data are there."""

    def started(self, total: int, done: int) -> None:
        """So many samples are this process's to do, of which so many were done by an earlier run."""

    def sized(self, start: HowSized) -> None:
        """What is known of the batch size before the first batch; it follows the run."""

    def scored(self, lines: Lines) -> None:
        """These samples are done and in the journal."""

    def batch(self, figures: ExecutionFigures, *, cap: int, reserved_bytes: int | None) -> None:
        """A batch was recorded."""

    def note(self, line: str) -> None:
        """Something that the user should know, in one line."""


class Offload:
    """Moves the weights to host memory once, where that was asked for: the last resort where a sample does not fit."""

    def __init__(self, request: EvalRequest, setup: EvaluationSetup, note: Callable[[str], None]) -> None:
        self._wanted = request.offload == "cpu"
        self._setup = setup
        self._note = note
        self._applied = False

    def apply(self) -> bool:
        """Whether the weights were moved just now, so that the sample is worth another try."""
        if self._applied or not self._wanted:
            return False
        self._applied = True
        device = self._setup.device
        if device.type == "cpu":
            self._note(f"{written('offload', 'cpu')}: the model is on the CPU already; there is nothing to move")
            return False
        try:
            from accelerate import cpu_offload
        except ImportError as error:
            raise RequestError(f"{written('offload', 'cpu')} needs accelerate: pip install accelerate") from error
        self._setup.task.release()
        module = self._setup.model.module.to("cpu")
        cpu_offload(module, execution_device=device)
        self._note("a sample does not fit even alone: the weights are in host memory from here on, which is slower")
        return True


class Worker:
    """One setup on one device.

        with Worker(request, setup, listener, monitor=folder / "monitor.csv") as worker:
            for lines in worker.run(items):
                journal.append(lines)
            worker.figures()

    `run` may be called again with other items: the size found is kept, and the figures are those of all calls.
    """

    def __init__(
        self,
        request: EvalRequest,
        setup: EvaluationSetup,
        listener: EvalListener,
        *,
        monitor: Path | TraceText | None = None,
        prior: Prior | None = None,
        stages: StageClock | None = None,
        forecast: MakeForecast = forecast_first_batch,
    ) -> None:
        self.request = request
        self.setup = setup
        self.listener = listener
        self.scorer = Scorer(setup.task, setup.metrics)
        self.memory: DeviceMemory = memory_of(setup.device)
        limit = resolve_limit(self.memory, asked_bytes=request.memory_limit_bytes, margin=request.margin)
        self.starting = StartingPoint(
            request=request,
            setup=setup,
            memory=self.memory,
            limit_bytes=limit.usable_bytes,
            prior=prior if prior is not None else Prior(),
            forecast=forecast,
        )
        self._stages = stages
        self._clock = IdleClock(setup.device)
        self._offload = Offload(request, setup, self._note)
        self._sampler = Sampler(monitor, device_uuid=device_uuid(setup.device))
        self._notes: list[str] = []
        self._start: Start | None = None
        self._executor: Executor | None = None
        self._pooled: PooledExecutor | None = None
        with as_current(setup.device), self._limited():
            self._pools = setup.task.pool_source() if stages is None else None
        if request.batch_invariant and self._pools is None:
            raise RequestError(
                f"{named('batch_invariant')}: only answers that are generated in a pool are independent of the batch; "
                "that takes a language model on CUDA in half precision (see how generation works, in the docs)"
            )
        self._loader: Loader | None = None
        self._seconds = self._loader_wait_seconds = 0.0
        self._curve = ThroughputCurve()
        self._figures = ExecutionFigures(alloc_retries=0 if self.memory.counts_retries and self._measured() else None)

    def __enter__(self) -> Self:
        self._sampler.__enter__()
        if self._stages is not None:
            self._stages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stages is not None:
            self._stages.__exit__(kind, error, trace)
        self._sampler.__exit__(kind, error, trace)

    def run(self, items: Sequence[int]) -> Generator[Lines, None, None]:
        """Do these samples; the lines of those that end together are given out as soon as they end."""
        request, setup = self.request, self.setup
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_current(setup.device))
            stack.enter_context(self._limited())
            settings = LoaderSettings(
                num_workers=request.num_workers, pin_memory=request.pin_memory, prefetch_factor=request.prefetch_factor
            )
            pin = setup.device.type == "cuda"
            self._loader = stack.enter_context(Loader(setup.task.prepare, items, settings, pin=pin))
            started = time.perf_counter()
            for finished in stack.enter_context(contextlib.closing(self._finished(items))):
                self._curve.add(self._seconds + time.perf_counter() - started, self._figures.items)
                yield [self.scorer.entry(one) for one in finished]
                self._loader.done([one.item for one in finished])
                figures = self._figures
                self.listener.batch(figures, cap=self._cap, reserved_bytes=figures.peak_reserved_bytes or None)
            self._seconds += time.perf_counter() - started
        self._loader_wait_seconds += self._loader.wait_seconds
        for note in (*self._loader.notes, *setup.task.notes, *setup.model.notes):
            self._note(note)

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        """Where a limit or a margin was asked for, it is kept inside."""
        if self.request.memory_limit is None and self.request.margin is None:
            return contextlib.nullcontext()
        return self.memory.limited(self.starting.limit_bytes)

    def _finished(self, items: Sequence[int]) -> Generator[list[Finished], None, None]:
        """In a pool where the task has one, and what that leaves in batches."""
        left = list(items)
        if self._pools is not None and left:
            self._pooled = self._make_pool(self._pools, left)
            yield from self._pooled.run(left)
            left = self._pooled.left
            for note in self._pools.notes:
                self._note(note)
            if left and self.request.batch_invariant:
                raise DoesNotFitError(
                    f"{named('batch_invariant')}: {plural(len(left), 'sample')} cannot be answered in the pool; give "
                    f"more memory, or leave {named('batch_invariant')} out: batches then take over"
                )
            if left:
                self._pools = None  # it has given up: so would the next
                if self._pooled.sizer.hopeless:
                    self._note("there is too little memory for a pool of answers: batches take over")
        if left or self._pooled is None:
            if self._executor is None:
                self._executor = self._begin(self.starting.start(left))
            yield from self._executor.run(left)

    @property
    def _cap(self) -> int:
        """The size of now, in the unit of the plan."""
        if self._executor is not None:
            return self._executor.sizer.size
        return 0 if self._pooled is None else self._pooled.kv_bytes

    def remember_plan(self) -> None:
        """File the size found, for the next run to start from."""
        if self._start is not None and (plan := self.figures().plan) is not None:
            self.starting.remember(plan, self._start.sizer)

    @property
    def counted(self) -> ExecutionFigures:
        """What the batches so far have counted, of all calls."""
        return self._figures

    def figures(self) -> RankFigures:
        """What this process has counted, once a run has ended."""
        assert self._loader is not None
        figures = self._figures
        return RankFigures(
            figures=figures,
            seconds=self._seconds,
            plan=self._plan(),
            wait_fraction=self._clock.wait_fraction(),
            loader_wait_seconds=self._loader_wait_seconds,
            workers=self._loader.workers or 0,
            monitor=self._sampler.summary(),
            measured=self._measured(),
            throughput=self._curve.points(),
            notes=tuple(self._notes),
        )

    def _plan(self) -> Plan:
        """What the batches settled at; without any, the pool."""
        peak = self._figures.peak_reserved_bytes or None
        if self._executor is None:
            assert self._pooled is not None
            return self.starting.pool_plan(self._pooled.kv_bytes, self._pooled.sizer, peak, tuple(self._pooled.trials))
        assert self._start is not None
        trials = tuple(self._executor.trials)
        return self.starting.plan(self._start, self._figures.largest_padded_cost, peak, trials)

    def _make_pool(self, source: PoolSource, items: list[int]) -> PooledExecutor:
        """A pool for these samples, its size by the memory that is free."""
        self.listener.sized(PoolStart(given=self.starting.given))
        return PooledExecutor(
            PoolWork(
                source=source,
                take=self._take,
                costs=self.setup.costs,
                note=self._note,
                set_aside=self._set_aside,
                ahead=self._prepares_ahead,
                begin=self._clock.begin,
                end=self._clock.end,
            ),
            sizer=self.starting.pool_sizer(source.needs(items)),
            memory=ModelMemory(self.memory, self.setup.model.module),
            figures=self._figures,
            policy=self._policy(),
        )

    def _take(self, items: list[int]) -> list[Any]:
        """The prepared samples; the first that could not be prepared ends the run, if that was asked for."""
        assert self._loader is not None
        prepared = self._loader.take(items)
        bad = next((place for place, one in enumerate(prepared) if isinstance(one, NotPrepared)), None)
        if self.request.fail_fast and bad is not None:
            raise RequestError(
                f"{named('fail_fast')}: sample {self.setup.task.samples[items[bad]].id}: {prepared[bad].message}"
            )
        return prepared

    def _begin(self, start: Start) -> Executor:
        """The executor of all calls; what a forecast took counts as part of the run, and as planning."""
        self._start = start
        executor = self._make_executor(start.sizer)
        self.listener.sized(start)
        for note in start.notes:
            self._note(note)
        if start.forecast is not None:
            self._seconds += start.forecast.seconds
            self._figures.lost_seconds += start.forecast.seconds
            if start.forecast.note is not None:
                self._note(start.forecast.note)
        return executor

    def _make_executor(self, sizer: LiveSizer) -> Executor:
        return Executor(
            BatchWork(
                launch=self._launch,
                costs=self.setup.costs,
                note=self._note,
                set_aside=self._forget_prepared,
                last_resort=self._offload.apply,
            ),
            sizer=sizer,
            memory=ModelMemory(self.memory, self.setup.model.module),
            metered=self._measured(),
            policy=self._policy(),
            figures=self._figures,
        )

    def _policy(self) -> ExecutionPolicy:
        request = self.request
        return ExecutionPolicy(
            by_count=self.starting.by_count,
            packed=self.setup.task.packs,
            fixed=request.fixed,
            overlap=request.overlap,
            fail_fast=request.fail_fast,
            fail_on_oom=request.fail_on_oom,
            stop_if_hopeless=True,
        )

    def _set_aside(self, items: list[int]) -> None:
        """Samples that a pool has read are needed again only if it fails, and are prepared again then."""
        assert self._loader is not None
        self._loader.set_aside(items)

    def _prepares_ahead(self) -> bool:
        return self._loader is not None and self._loader.running

    def _forget_prepared(self, items: list[int]) -> None:
        """Samples that are tried again at the very end are prepared again then: many would fill the host's memory."""
        assert self._loader is not None
        self._loader.done(items)

    def _launch(self, items: list[int]) -> Pending:
        """Start a batch; what could not be prepared is set aside, and the rest runs without it."""
        prepared = self._take(items)
        good = [place for place, one in enumerate(prepared) if not isinstance(one, NotPrepared)]
        self._clock.begin()
        pending: Pending | None = None
        if good:
            with self._timed_stages(len(good)):
                pending = self.setup.task.launch([items[place] for place in good], [prepared[place] for place in good])
        return _WithFailures(pending, prepared, busy_seconds=self._clock.end())

    def _timed_stages(self, batch_size: int) -> contextlib.AbstractContextManager[Any]:
        if self._stages is None:
            return contextlib.nullcontext()
        settled = self._start is not None and self._start.sizer.settled
        return self._stages.batch(batch_size, settled=settled)

    def _measured(self) -> bool:
        """Peaks are taken where that costs nothing, or where a limit is to be kept."""
        return not self.memory.meter_slows or self.request.memory_limit is not None

    def _note(self, line: str) -> None:
        if line not in self._notes:
            self._notes.append(line)
            self.listener.note(line)


class _WithFailures(Pending):
    """A batch whose unprepared samples are failures, in their places among the answers."""

    def __init__(self, pending: Pending | None, prepared: Sequence[Any], *, busy_seconds: Callable[[], float]) -> None:
        self._pending = pending
        self._prepared = prepared
        self._busy_seconds = busy_seconds

    def result(self) -> list[Any]:
        """One answer or failure per sample."""
        expected = sum(not isinstance(one, NotPrepared) for one in self._prepared)
        results = [] if self._pending is None else self._pending.result()
        answers = iter(one_for_each(results, expected, source="the task"))
        return [
            ItemFailure(reason="error", message=one.message) if isinstance(one, NotPrepared) else next(answers)
            for one in self._prepared
        ]

    def busy_seconds(self) -> float:
        """From the first work given to the device to the end of the last."""
        return self._busy_seconds()
