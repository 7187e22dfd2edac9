"""What an evaluation publishes while it is under way, from the events that every listener gets."""

from __future__ import annotations

from typing import Any

from brim.evaluation.setup import SetupFacts
from brim.evaluation.start import HowSized
from brim.evaluation.worker import EvalListener, Lines
from brim.monitor.live import LiveRun
from brim.running.results import ExecutionFigures

__all__ = ["LiveEvaluation"]


class LiveEvaluation(EvalListener):
    """Keeps a `LiveRun` up to date. Of an evaluation inside a profile (`inside`) the progress is the `part`'s."""

    def __init__(self, live: LiveRun, *, inside: bool = False) -> None:
        self._live = live
        self._inside = inside
        self._start: HowSized | None = None
        self._metric: str | None = None
        self._scores, self._score_sum = 0, 0.0
        self._total = self._done_before = 0

    def opened(self, facts: SetupFacts) -> None:
        """What is evaluated, and where."""
        self._metric = facts.metric
        self._scores, self._score_sum, self._start = 0, 0.0, None
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
        scores = [line["score"] for line in lines if line.get("score") is not None]
        self._scores += len(scores)
        self._score_sum += sum(scores)
        if self._scores:
            self._live.update(metric={"name": self._metric, "value": self._score_sum / self._scores})

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
