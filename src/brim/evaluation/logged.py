"""What an evaluation sends to loggers, from the events that every listener gets: a point a second at most."""

from __future__ import annotations

import time

from brim.evaluation.scoring import RunningMean
from brim.evaluation.setup import SetupFacts
from brim.evaluation.worker import EvalListener, Lines
from brim.monitor.loggers.loggers import LoggedRun
from brim.running.results import ExecutionFigures

__all__ = ["LoggedEvaluation"]

SECONDS_BETWEEN_POINTS = 1.0


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
