"""A training run's figures for loggers: about a thousand points of its steps, every epoch, the summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from brim.monitor.loggers.loggers import LoggedRun

__all__ = ["LoggedTraining"]

MOST_POINTS = 1000  # of a run's steps
_PLACE = ("epoch", "step", "samples")  # of an epoch's row: where it is, not what it measured


class LoggedTraining:
    """Steps and epochs of one run, over the count of optimizer steps; without a run nothing happens."""

    def __init__(self, run: LoggedRun | None = None) -> None:
        self._run = run
        self._samples_between = 0.0
        self._next_samples = 0.0

    def begin(self, total_samples: int) -> None:
        """So many samples will be seen in all."""
        self._samples_between = total_samples / MOST_POINTS

    def step(self, record: Mapping[str, Any], *, peak_reserved_bytes: int | None = None) -> None:
        """A step as steps.jsonl has it; most steps of a long run are passed over."""
        if self._run is None or record["samples"] < self._next_samples:
            return
        self._next_samples = record["samples"] + self._samples_between
        self._run.log(
            {
                "loss": record["loss"],
                "learning_rate": record["learning_rate"],
                "samples_per_second": record["effective_batch"] / max(record["seconds"], 1e-9),
                "micro_batch": max(record["micro_batches"], default=0),
                "peak_reserved_bytes": peak_reserved_bytes or None,
                "oom_events": record["oom_events"],
            },
            step=record["step"],
        )

    def epoch(self, row: Mapping[str, Any]) -> None:
        """A row of epochs.csv."""
        if self._run is not None:
            figures = {f"epoch/{name}": value for name, value in row.items() if name not in _PLACE}
            self._run.log(figures, step=row["step"])

    def finished(self, steps: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> None:
        """A whole run that was not logged while it trained."""
        steps = list(steps)
        self.begin(steps[-1]["samples"] if steps else 0)
        ends = {row["step"]: row for row in rows}
        for record in steps:
            self.step(record)
            if record["step"] in ends:
                self.epoch(ends[record["step"]])
