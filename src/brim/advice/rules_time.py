"""Advice on time that a device waits: for samples, for validation, for checkpoints."""

from __future__ import annotations

import math

from brim.advice.base import Advice, figure
from brim.advice.run_reader import Run, value_at
from brim.monitor.host import own_cores
from brim.units import duration_text, fraction_text

__all__ = ["checkpoints", "loading", "validation"]

LEAST_WAITING = 0.1  # of a run's time
MOST_WORKERS = 16
MOST_WAITING = 8  # of them, where they wait for something else than a core
START_SECONDS = 0.5  # that loading processes take to start
IDLE_HOST = 0.5  # of its cores: below it preparing a sample waits for disks or the network
VALIDATION_SHARE = 0.05  # of the time, once less is validated
CHECKPOINT_SHARE = 0.02


def loading(run: Run) -> Advice | None:
    """The device waits for samples: more processes prepare them."""
    seconds, waited = figure(run, "seconds"), figure(run, "loader.wait_seconds")
    if not seconds or waited is None or waited < LEAST_WAITING * seconds or waited < START_SECONDS:
        return None
    idle = figure(run, "gpu_wait_causes.loading")
    if idle is not None and idle < LEAST_WAITING / 2:  # the device had work meanwhile
        return None
    before = int(figure(run, "loader.num_workers") or 0)
    busy = max(seconds - waited, 0.01 * seconds)
    work = waited if before == 0 else seconds * before  # of one process
    host = figure(run, "monitor.host_cpu_mean")
    spare = int(own_cores()) - (busy > waited)  # a core for the process that feeds the device, unless that one waits
    if host is not None and host < IDLE_HOST:
        spare = max(spare, MOST_WAITING)
    workers = min(math.ceil(work / busy), max(spare, 2), MOST_WORKERS)
    part = fraction_text(waited / seconds)
    seen = f"{duration_text(waited)} of {duration_text(seconds)} ({part}) was spent waiting for samples"
    cores = "" if host is None else f"; the host's cores were {fraction_text(host)} busy"
    if workers <= before:
        return Advice(
            name="loading",
            cause=f"samples are prepared too slowly for the device, and {before} processes are all that pay here",
            evidence=f"{seen}{cores}; smaller files, decoded or resized once, are what is left: not measured",
        )
    after = max(busy, work / workers) + (START_SECONDS if before == 0 else 0.0)
    key = "num_workers" if run.kind == "eval" else "data.num_workers"
    return Advice(
        name="loading",
        cause=f"the device waits for samples, which {_processes(before)}",
        evidence=f"{seen}{cores}; {workers} processes prepare them beside it (decoding pictures is the usual work)",
        expected_gain=seconds / after,
        measured=True,
        settings={key: workers},
    )


def _processes(count: int) -> str:
    return "are prepared by the process that feeds it" if count == 0 else f"{count} processes prepare"


def _total_seconds(run: Run) -> float:
    return sum(figure(run, name) or 0.0 for name in ("seconds", "eval_seconds", "checkpoint_seconds"))


def validation(run: Run) -> Advice | None:
    """A large part of the time is spent on validation: every few epochs is enough."""
    spent, epochs = figure(run, "eval_seconds"), int(figure(run, "epochs") or 0)
    total = _total_seconds(run)
    if run.kind != "train" or not spent or spent < 2 * VALIDATION_SHARE * total or epochs < 2:
        return None
    every = int(value_at(run.request, "settings.training.eval_every") or 1)
    wished = math.ceil(every * spent / (VALIDATION_SHARE * max(total - spent, 1e-9)))
    wished = min(wished, epochs)
    if wished <= every:
        return None
    left = spent * math.ceil(epochs / wished) / math.ceil(epochs / every)
    return Advice(
        name="validation",
        cause=f"{fraction_text(spent / total)} of the time is spent on validation",
        evidence=f"{duration_text(spent)} of {duration_text(total)} in {math.ceil(epochs / every)} validations; the "
        "best epoch and early stopping are then chosen among fewer",
        expected_gain=total / (total - spent + left),
        measured=True,
        settings={"training.eval_every": wished},
    )


def checkpoints(run: Run) -> Advice | None:
    """A large part of the time is spent on checkpoints within epochs."""
    spent, steps, epochs = (figure(run, name) for name in ("checkpoint_seconds", "steps", "epochs"))
    every = value_at(run.request, "settings.training.checkpoint_every")
    total = _total_seconds(run)
    if run.kind != "train" or not spent or not steps or not epochs or not isinstance(every, int):
        return None
    within = steps // every
    each = spent / (within + epochs)
    if each * within < 2 * CHECKPOINT_SHARE * total:
        return None
    wished: int | None = math.ceil(every * each * within / (CHECKPOINT_SHARE * max(total - spent, 1e-9)))
    if wished is not None and wished >= steps / epochs:
        wished = None
    left = 0.0 if wished is None else each * (steps // wished)
    instead = "each epoch has one anyway" if wished is None else f"one every {wished} steps is enough"
    return Advice(
        name="checkpoints",
        cause=f"{fraction_text(spent / total)} of the time is spent on writing checkpoints",
        evidence=f"{duration_text(spent)} of {duration_text(total)}, one every {every} steps; {instead}, and a run "
        "that is killed loses the steps since the last one",
        expected_gain=total / (total - each * within + left),
        measured=True,
        settings={"training.checkpoint_every": wished},
    )
