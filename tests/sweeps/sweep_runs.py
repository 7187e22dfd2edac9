"""Sweeps that several tests share: experiments that need no torch, and launchers that start no process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.settings.config_files import SweepFile, read_sweep
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.experiment import run_job, train_run
from brim.sweeps.forecast_process import ForecastProcess
from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.job import AttemptOutcome, Job, Recorder, SweepListener, read_outcome
from brim.sweeps.run import SweepPlan, SweepResult, run_sweep

GIB = 2**30

# The process of an experiment without torch: it leaves a line for every time it really does the work.
CHILD = """
import os, pathlib, signal, sys, time
from brim.running.child_main import serve_parent
from brim.sweeps.experiment import run_job
from brim.sweeps.job import Job

def train(job, send):
    folder = pathlib.Path(job.folder)
    what = job.settings["model"]["type"]
    send({"event": "opened", "effective_batch": 64, "device": "cpu"})
    for step in range(int(os.environ.get("STEPS", "4"))):
        with (folder / "steps.txt").open("a") as file:
            file.write(f"{os.getpid()} {job.attempt} {step}\\n")
        send({"event": "rate", "samples": step, "total": 4, "samples_per_second": 10.0, "loss": 1.0, "micro_batch": 2})
        time.sleep(float(os.environ.get("PAUSE", "0.02")))
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        time.sleep(600)
    if what == "broken":
        raise ValueError("no such [layer]")
    if what == "memory" and job.run_settings["hp"]["batch_size"] > 8:
        raise MemoryError("out of memory")
    with (folder / "finished.txt").open("a") as file:
        file.write(f"{job.attempt}\\n")
    return {"best": {"top1": 0.5}, "final": {"top1": 0.4}, "epochs": 1}, [{"epoch": 0, "train_loss": 1.0}], "as asked"

sys.exit(serve_parent(lambda requests, send: run_job(Job.from_json(next(requests)), send, train)))
"""


def write_child(folder: Path) -> Path:
    path = folder / "child.py"
    path.write_text(CHILD, encoding="utf-8")
    return path


def sweep_of(grid: Mapping[str, Any], **shared: Any) -> SweepFile:
    return read_sweep({"grid_search": {"grid": dict(grid), "fixed": shared}})


class Watcher(SweepListener):
    """Keeps what it is notified of."""

    def __init__(self) -> None:
        self.counts: tuple[int, int] | None = None
        self.starts: list[tuple[str, str]] = []
        self.ends: list[tuple[str, str, bool]] = []
        self.notes: list[str] = []

    def planned(self, experiments: int, done: int) -> None:
        self.counts = (experiments, done)

    def started(self, job: Job, device: str) -> None:
        self.starts.append((job.id, device))

    def ended(self, job: Job, outcome: AttemptOutcome, retried: Job | None) -> None:
        self.ends.append((job.id, outcome.state, retried is not None))

    def note(self, line: str) -> None:
        self.notes.append(line)


class FakeLauncher:
    """Calls a function for every job instead of starting a process."""

    def __init__(self, play: Callable[[Job], AttemptOutcome]) -> None:
        self.jobs: list[Job] = []
        self._play = play

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        waiting = list(jobs)
        while waiting:
            job = waiting.pop(0)
            self.jobs.append(job)
            recorder.started(job, "cpu")
            recorder.event(job, {"event": "opened", "effective_batch": 48})
            again = recorder.ended(job, self._play(job))
            if again is not None:
                waiting.insert(0, again)


def done(job: Job, *, top1: float = 0.5, **figures: Any) -> AttemptOutcome:
    results = {"best": {"top1": top1, "val_loss": 1 - top1}, "final": {"top1": top1 / 2}, **figures}
    return AttemptOutcome(
        id=job.id,
        attempt=job.attempt,
        state="completed",
        seconds=2.0,
        batch_size_reason="as asked",
        figures=results,
        epochs=({"epoch": 0, "train_loss": 1.0}, {"epoch": 1, "train_loss": 0.5}),
    )


def failed(job: Job, failure: Any = "error", error: str = "ValueError: no\nmore") -> AttemptOutcome:
    return AttemptOutcome(id=job.id, attempt=job.attempt, state="failed", failure=failure, error=error, seconds=1.0)


def run_fake(
    sweep: SweepFile,
    folder: Path,
    play: Callable[[Job], AttemptOutcome],
    *,
    forecasts: Mapping[str, SizeForecast] | None = None,
    listener: SweepListener | None = None,
    **request: Any,
) -> tuple[SweepResult, FakeLauncher]:
    launcher = FakeLauncher(play)
    plan = SweepPlan(expansion=sweep.expand(), forecasts=forecasts or {})
    result = run_sweep(plan, SweepRequest(file="grid.yaml", **request), launcher, output=folder, listener=listener)
    return result, launcher


def journal_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[1:]]


class ForecastsHere(ForecastProcess):
    """Forecasts for real, in this process; no device is there."""

    def devices(self) -> list[dict[str, Any]]:
        return []

    def check_model(self, model: str) -> None:
        del model

    def forecast(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> dict[str, Any]:
        from brim.sweeps.forecast_process import forecast_workload

        return forecast_workload(settings, sizes, card=self.card)


class LauncherHere:
    """Trains every experiment in this process."""

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        for job in jobs:
            recorder.started(job, "cpu")
            run_job(job, lambda event, job=job: recorder.event(job, event), train_run)
            outcome = read_outcome(Path(job.folder), id=job.id)
            assert outcome is not None
            recorder.ended(job, outcome)
