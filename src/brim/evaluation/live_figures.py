"""What an evaluation publishes and sends to loggers while it is under way, from the events that listeners get."""

from __future__ import annotations

import time
from typing import Any

from brim.evaluation.scoring import RunningMean
from brim.evaluation.setup import SetupFacts
from brim.evaluation.start import HowSized
from brim.evaluation.worker import EvalListener, Lines
from brim.monitor.live import LiveRun
from brim.monitor.loggers.loggers import LoggedRun
from brim.running.results import ExecutionFigures

__all__ = ["LiveEvaluation", "LoggedEvaluation"]

SECONDS_BETWEEN_POINTS = 1.0  # of a logger, at least


class LiveEvaluation(EvalListener):
    """Keeps a `LiveRun` up to date. Of an evaluation inside a profile (`inside`) the progress is the `part`'s."""

    def __init__(self, live: LiveRun, *, inside: bool = False) -> None:
        self._live = live
        self._inside = inside
        self._start: HowSized | None = None
        self._mean = RunningMean()
        self._total = self._done_before = 0

    def opened(self, facts: SetupFacts) -> None:
        """What is evaluated, and where."""
        self._mean, self._start = RunningMean(facts.metric), None
        self._live.update(state="running", device=facts.device, device_uuid=facts.device_uuid)

    def started(self, total: int, done: int) -> None:
        """How much there is to do."""
        self._total, self._done_before = total, done
        self._progress(done)

    def sized(self, start: HowSized) -> None:
        """How the size is found."""
        self._start = start
        self._live.update(batch_size_found=start.size_found)

    def scored(self, lines: Lines) -> None:
        """The running mean of the first metric, over the samples of this start."""
        self._mean.add(lines)
        if self._mean.value is not None:
            self._live.update(metric={"name": self._mean.name, "value": self._mean.value})

    def batch(self, figures: ExecutionFigures, *, cap: int, reserved_bytes: int | None) -> None:
        """How far it is."""
        del cap
        seconds = figures.seconds
        self._progress(self._done_before + figures.items)
        self._live.update(
            batch_size=figures.batch_counts[-1] if figures.batch_counts else None,
            batch_size_found=None if self._start is None else self._start.size_found,
            samples_per_second=figures.items / seconds if seconds else None,
            oom_events=figures.oom_events,
            waiting_fraction=max(0.0, 1 - figures.busy_seconds / seconds) if seconds else None,
            peak_reserved_bytes=reserved_bytes,
        )

    def note(self, line: str) -> None:
        """The last one is shown."""
        self._live.update(note=line)

    def _progress(self, done: int) -> None:
        progress: dict[str, Any] = {"done": done, "total": self._total, "unit": "samples"}
        if self._inside:
            self._live.update(part=progress)
        else:
            self._live.update(**progress)


class LoggedEvaluation(EvalListener):
    """Points of one run; steps are samples that this start has finished."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._mean = RunningMean()
        self._logged_samples, self._logged_at = 0, time.monotonic()

    def opened(self, facts: SetupFacts) -> None:
        """Which metric the mean is of."""
        self._mean = RunningMean(facts.metric)

    def scored(self, lines: Lines) -> None:
        """The mean follows the journal."""
        self._mean.add(lines)

    def batch(self, figures: ExecutionFigures, *, cap: int, reserved_bytes: int | None) -> None:
        """Log a point, unless the last one was just now."""
        del cap
        now = time.monotonic()
        seconds = now - self._logged_at
        if seconds < SECONDS_BETWEEN_POINTS:
            return
        self._run.log(
            {
                f"{self._mean.name}_so_far": self._mean.value,
                "samples_per_second": (figures.items - self._logged_samples) / max(seconds, 1e-9),
                "batch_size": figures.batch_counts[-1] if figures.batch_counts else None,
                "oom_events": figures.oom_events,
                "peak_reserved_bytes": reserved_bytes,
            },
            step=figures.items,
        )
        self._logged_samples, self._logged_at = figures.items, now
