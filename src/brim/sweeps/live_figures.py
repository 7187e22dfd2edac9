"""What a sweep publishes while it is under way, from the events that every listener gets."""

from __future__ import annotations

from brim.monitor.live import LiveRun
from brim.sweeps.job import AttemptOutcome, Job, SweepListener

__all__ = ["LiveSweep"]


class LiveSweep(SweepListener):
    """Publishes how far a sweep is; its experiments publish themselves."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._done = self._oom_events = 0

    def forecasting(self, what: str) -> None:
        """Before the experiments."""
        self._live.update(label=f"forecasting memory {what}")

    def planned(self, experiments: int, done: int) -> None:
        """How much there is to do."""
        self._done = done
        self._live.update(state="running", done=done, total=experiments, unit="experiments", label=None)

    def ended(self, job: Job, outcome: AttemptOutcome, retried: Job | None) -> None:
        """One more, unless it is tried again."""
        del job
        self._done += retried is None and outcome.state != "interrupted"
        self._oom_events += outcome.failure == "out_of_memory"
        self._live.update(done=self._done, oom_events=self._oom_events)

    def note(self, line: str) -> None:
        """The last one is shown."""
        self._live.update(note=line)
