"""`--on slurm`: each experiment a Slurm job of one GPU, handed in through submitit as one array.

Slurm decides what runs where and when. The sweep's folder must be on storage that the nodes share. The only file that
imports submitit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.settings.caller import named, pair, written
from brim.sweeps.job import Job, Outcome
from brim.sweeps.listener import Recorder
from brim.sweeps.remote_job import Delivery, do_remotely, mark_of, receive

__all__ = ["SlurmLauncher"]

MOST_LOSSES = 3  # of one experiment
POLL_SECONDS = 5.0  # between two looks at the queue
LOCAL_POLL_SECONDS = 0.3
DEFAULT_HOURS = 24  # of a job without --timeout
SPARE_MINUTES = 10  # a job's own time for starting and for writing its checkpoint
_PLAIN = ("timeout_min", "gpus_per_node", "cpus_per_task", "mem_gb", "nodes", "tasks_per_node", "name")


@dataclasses.dataclass(kw_only=True, eq=False)
class _Task:
    job: Job
    handle: Any
    losses: int = 0


class SlurmLauncher:
    """Runs jobs in Slurm's queue. `settings` are sbatch's options: partition, account, mem_gb, cpus_per_task, …

    `cluster: local` among them runs everything on this machine instead, one process each, to try a file out.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, Any],
        timeout_seconds: float | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._settings = dict(settings)
        self._cluster = str(self._settings.pop("cluster", "slurm"))
        self._timeout_seconds = timeout_seconds
        self._command = None if command is None else tuple(command)
        if self._cluster not in ("slurm", "local"):
            raise RequestError(f"{pair('slurm', 'cluster', self._cluster)}: it must be slurm or local")

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        """Every job to its end. Ctrl-C cancels what waits or runs; what is finished is kept."""
        if not jobs:
            return
        executor = self._executor(Path(jobs[0].folder).parent.parent / "slurm")
        tasks = self._submit(executor, jobs, recorder)
        try:
            while tasks:
                time.sleep(LOCAL_POLL_SECONDS if self._cluster == "local" else POLL_SECONDS)
                for task in [task for task in tasks if task.handle.done()]:
                    tasks.remove(task)
                    again = self._after(task, recorder)
                    if again is not None:
                        (fresh,) = self._submit(executor, [again], recorder)
                        fresh.losses = task.losses if again.retries == task.job.retries else 0
                        tasks.append(fresh)
        except BaseException:
            for task in tasks:
                with contextlib.suppress(Exception):  # it may be done already
                    task.handle.cancel()
            raise

    def _executor(self, folder: Path) -> Any:
        try:
            import submitit
        except ImportError as error:
            raise RequestError(f"{written('on', 'slurm')} needs submitit: pip install 'brim[slurm]'") from error
        if self._cluster == "slurm" and shutil.which("sbatch") is None:
            raise RequestError(
                f"{written('on', 'slurm')}: there is no sbatch here; run it on a machine of the cluster, or try it "
                "with "
                f"{written('slurm', 'cluster=local')}"
            )
        executor = submitit.AutoExecutor(folder=folder, cluster=self._cluster)
        try:
            executor.update_parameters(**self._parameters())
        except (ValueError, TypeError, NameError) as error:
            raise RequestError(f"{named('slurm')}: {error}") from error
        return executor

    def _parameters(self) -> dict[str, Any]:
        """Of submitit: its own names as they are, all others are sbatch's."""
        seconds = self._timeout_seconds or DEFAULT_HOURS * 3600
        found: dict[str, Any] = {"timeout_min": math.ceil(seconds / 60) + SPARE_MINUTES, "name": "brim-sweep"}
        if self._cluster == "slurm":
            found["gpus_per_node"] = 1
        for name, value in self._settings.items():
            plain = name in _PLAIN or name.startswith("slurm_")
            found[name if plain else f"slurm_{name}"] = value
        return found

    def _submit(self, executor: Any, jobs: Sequence[Job], recorder: Recorder) -> list[_Task]:
        settings = {
            "mark": mark_of(Path(jobs[0].folder)),
            "timeout_seconds": self._timeout_seconds,
            "command": self._command,
            "place": str(Path.cwd()),
        }
        with executor.batch():  # one array instead of many calls of sbatch
            handles = [executor.submit(_run_task, job.to_json(), settings) for job in jobs]
        for job in jobs:
            recorder.started(job, self._cluster)
        return [_Task(job=job, handle=handle) for job, handle in zip(jobs, handles, strict=True)]

    def _after(self, task: _Task, recorder: Recorder) -> Job | None:
        job = task.job
        try:
            delivery: Delivery = task.handle.result()
        except Exception as error:  # submitit has kinds of its own for a job that vanished, and wraps a job's error
            task.losses += 1
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            if task.losses < MOST_LOSSES:
                recorder.note(f"{job.id}: its Slurm job was lost ({reason.strip()[:200]}); it is handed in again")
                return dataclasses.replace(job, attempt=job.attempt + 1)
            told = f"{task.losses} Slurm jobs were lost at it, the last: {reason.strip()[:500]}"
            lost = Outcome(id=job.id, attempt=job.attempt, state="failed", failure="killed", error=told)
            return recorder.ended(job, lost)
        receive(delivery, Path(job.folder))
        return recorder.ended(job, delivery.outcome)


def _run_task(job: Mapping[str, Any], settings: Mapping[str, Any]) -> Delivery:
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        del os.environ[name]  # srun's wrapper may set them: an experiment is no rank
    return do_remotely(Job.from_json(job), **settings)
