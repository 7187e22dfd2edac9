"""An evaluation's figures for loggers: a point a second at most while it runs, the summary at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from brim.monitor.loggers.loggers import LoggedRun
from brim.running.results import ExecutionFigures

__all__ = ["LoggedEvaluation"]

SECONDS_BETWEEN_POINTS = 1.0


class LoggedEvaluation:
    """What the samples of this process have shown so far; steps are samples that this start has finished."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._samples = self._logged_samples = 0
        self._scores: dict[str, float] = {}  # the sum for the first metric, by its name
        self._logged_at = time.monotonic()

    def lines(self, lines: Sequence[Mapping[str, Any]], figures: ExecutionFigures) -> None:
        """These samples are in the journal."""
        self._samples += len(lines)
        for line in lines:
            for name, score in list(line["scores"].items())[:1]:
                self._scores[name] = self._scores.get(name, 0.0) + score
        seconds = time.monotonic() - self._logged_at
        if seconds >= SECONDS_BETWEEN_POINTS and lines:
            self._log(seconds, lines[-1]["batch_size"], figures)

    def _log(self, seconds: float, batch_size: int | None, figures: ExecutionFigures) -> None:
        self._run.log(
            {
                **{f"{name}_so_far": total / self._samples for name, total in self._scores.items()},
                "samples_per_second": (self._samples - self._logged_samples) / seconds,
                "batch_size": batch_size,
                "oom_events": figures.oom_events,
                "peak_reserved_bytes": figures.peak_reserved_bytes or None,
            },
            step=self._samples,
        )
        self._logged_at, self._logged_samples = time.monotonic(), self._samples
