"""Experiments on this machine: as many at once as the devices hold, each in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence

from brim.monitor.host import CORES_VARIABLE, own_cores
from brim.running.child_process import wait_for_messages
from brim.sweeps.experiment import CHILD_COMMAND, ExperimentProcess
from brim.sweeps.job import Job, Recorder
from brim.sweeps.scheduler import Device, Need, Packing, ThroughputWatch

__all__ = ["LocalLauncher"]

WAIT_SECONDS = 0.2  # for events, before processes are checked again
GRACE_SECONDS = 60.0  # for the step under way and a checkpoint, after Ctrl-C


@dataclasses.dataclass(kw_only=True, eq=False)
class _Running:
    child: ExperimentProcess
    device: Device
    trains: bool = False  # it has reported a rate


class LocalLauncher:
    """Runs the jobs of one sweep on devices of this machine.

    `shares`: experiments of unknown need share a device in equal parts, as `--jobs-per-gpu` says.
    """

    _recorder: Recorder

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        shares: bool = False,
        timeout_seconds: float | None = None,
        command: Sequence[str] = CHILD_COMMAND,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._command = tuple(command)
        self._waiting: list[Job] = []
        self._running: list[_Running] = []
        self._packing = Packing(tuple(devices), shares=shares)
        self._watch = ThroughputWatch()
        self._stopping = False

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        """Every job to its end, and what is to be tried again as well. Ctrl-C: children finish their step and stop."""
        self._waiting, self._recorder = list(jobs), recorder
        try:
            while self._waiting or self._running:
                self._fill()
                self._listen()
                for running in self._running:
                    running.child.end_if_over(self._timeout_seconds)
                self._collect()
        except KeyboardInterrupt:
            recorder.note("stopping: every experiment finishes its step; Ctrl-C again ends them at once")
            self._stop(GRACE_SECONDS)
            raise
        except BaseException:
            self._stop(0.0)
            raise

    def _stop(self, grace_seconds: float) -> None:
        """Ask every child to stop, give it that long, then end it."""
        self._waiting.clear()
        self._stopping = True
        for running in self._running:
            running.child.interrupt()
        deadline = time.monotonic() + grace_seconds
        try:
            while any(running.child.running for running in self._running) and time.monotonic() < deadline:
                self._listen()
        except KeyboardInterrupt:
            pass  # at once, then
        for running in self._running:
            running.child.end()
        self._collect(retry=False)

    def _fill(self) -> None:
        """Start all that fits."""
        while self._waiting:
            needs = [_need(job) for job in self._waiting]
            chosen = self._packing.choose(needs)
            if chosen is None:
                return
            need, device = chosen
            place = next(place for place, other in enumerate(needs) if other is need)
            held = self._packing.start(need, device, before=needs[:place])
            at_once = self._at_once(need, held, device)
            job = self._waiting.pop(place)
            self._recorder.started(job, device.name)
            self._start(_within(job, held, device), device, at_once)

    def _at_once(self, need: Need, held_bytes: int | None, device: Device) -> int:
        """How many run on this machine at a time, if all are like this one, which is still among those that wait."""
        on_one = 1 if need.alone else device.slots
        if held_bytes and device.memory_bytes is not None:
            on_one = min(on_one, max(device.memory_bytes // held_bytes, 1))
        room = on_one * sum(other.kind == device.kind for other in self._packing.devices)
        return min(room, len(self._waiting) + len(self._running))

    def _start(self, job: Job, device: Device, at_once: int) -> None:
        child = ExperimentProcess(job, environment=_environment(device, job, at_once), command=self._command)
        self._running.append(_Running(child=child, device=device))

    def _listen(self) -> None:
        """Wait a moment for events, and pass them on."""
        wait_for_messages([running.child for running in self._running], WAIT_SECONDS)
        for running in self._running:
            self._pass_on(running)

    def _pass_on(self, running: _Running) -> None:
        for event in running.child.events():
            self._take_event(running, event)

    def _take_event(self, running: _Running, event: dict[str, object]) -> None:
        job, device = running.child.job, running.device
        if not self._stopping:  # a run's own hint on how to resume it does not apply to the sweep
            self._recorder.event(job, event)
        if event["event"] != "rate" or device.slots < 2:
            return
        now = time.monotonic()
        if not running.trains:
            running.trains = True
            self._count(device, now)
        rate = event.get("samples_per_second")
        if not isinstance(rate, (int, float)):
            return
        most = self._watch.add_rate(device.name, job.id, float(rate), now)
        if most is not None and most < self._packing.cap(device.name):
            self._packing.limit(device.name, most)
            self._recorder.note(f"{device.name}: more than {most} at once brought no more in all; no more are started")

    def _count(self, device: Device, now: float) -> None:
        count = sum(one.trains for one in self._running if one.device is device)
        self._watch.changed(device.name, count, now)

    def _collect(self, *, retry: bool = True) -> None:
        """See to the processes that have ended."""
        for running in [one for one in self._running if not one.child.running or not retry]:
            self._running.remove(running)
            self._pass_on(running)
            outcome = running.child.outcome()
            self._packing.end(outcome.id)
            self._count(running.device, time.monotonic())
            again = self._recorder.ended(running.child.job, outcome)
            if again is not None and retry:
                self._waiting.insert(0, again)


def _need(job: Job) -> Need:
    return Need(id=job.id, bytes=job.bytes_needed, alone=job.alone, device=job.device)


def _within(job: Job, held_bytes: int | None, device: Device) -> Job:
    """The job with the memory it has reserved on a card as its limit."""
    if held_bytes is None or device.kind != "cuda":
        return job
    return job.limited_to(max(held_bytes - device.context_bytes, 1))


def _environment(device: Device, job: Job, at_once: int) -> dict[str, str]:
    """What is set for one child alone, its share of the cores too; what the user has set stays, but for the card."""
    found: dict[str, str] = {}
    if device.visible is not None and not (job.device or "").startswith("cuda:"):
        found["CUDA_VISIBLE_DEVICES"] = device.visible
    if at_once > 1:
        share = str(max(own_cores() // at_once, 1))
        found |= {name: share for name in ("OMP_NUM_THREADS", CORES_VARIABLE) if name not in os.environ}
    return found
