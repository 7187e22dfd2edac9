"""`--on slurm`: each experiment a Slurm job of one GPU, submitted through submitit as one array.

Slurm decides what runs where and when. The sweep's folder must be on storage that the nodes share. The only file that
imports submitit.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.settings.caller import named, pair, written
from brim.sweeps.experiment import CHILD_COMMAND
from brim.sweeps.job import Job
from brim.sweeps.launch_remote import Delivery, RemoteLauncher, RemoteWork

__all__ = ["SlurmLauncher"]

POLL_SECONDS = 5.0  # between two checks of the queue
LOCAL_POLL_SECONDS = 0.3
DEFAULT_HOURS = 24  # of a job without --timeout
SPARE_MINUTES = 10  # a job's own time for starting and for writing its checkpoint
_PLAIN = ("timeout_min", "gpus_per_node", "cpus_per_task", "mem_gb", "nodes", "tasks_per_node", "name")


class SlurmLauncher(RemoteLauncher):
    """Runs jobs in Slurm's queue. `settings` are sbatch's options: partition, account, mem_gb, cpus_per_task, …

    `cluster: local` among them runs everything on this machine instead, one process each, to try a file out.
    """

    worker = "Slurm job"
    _executor: Any

    def __init__(
        self,
        *,
        settings: Mapping[str, Any],
        timeout_seconds: float | None = None,
        command: Sequence[str] = CHILD_COMMAND,
    ) -> None:
        super().__init__(timeout_seconds=timeout_seconds, command=command)
        self._settings = dict(settings)
        self._cluster = str(self._settings.pop("cluster", "slurm"))
        if self._cluster not in ("slurm", "local"):
            raise RequestError(f"{pair('slurm', 'cluster', self._cluster)}: it must be slurm or local")

    @contextlib.contextmanager
    def _connected(self, sweep: Path) -> Iterator[None]:
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
        self._executor = submitit.AutoExecutor(folder=sweep / "slurm", cluster=self._cluster)
        try:
            self._executor.update_parameters(**self._parameters())
        except (ValueError, TypeError, NameError) as error:
            raise RequestError(f"{named('slurm')}: {error}") from error
        yield

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

    def _submit(self, jobs: Sequence[Job], work: RemoteWork) -> list[tuple[Any, str]]:
        with self._executor.batch():  # one array instead of many calls of sbatch
            handles = [self._executor.submit(_do, job, work) for job in jobs]
        return [(handle, self._cluster) for handle in handles]

    def _wait(self, handles: Sequence[Any]) -> list[tuple[Any, Delivery | Exception]]:
        time.sleep(LOCAL_POLL_SECONDS if self._cluster == "local" else POLL_SECONDS)
        return [(handle, _result(handle)) for handle in handles if handle.done()]

    def _cancel(self, handle: Any) -> None:
        handle.cancel()


def _result(handle: Any) -> Delivery | Exception:
    try:
        delivery: Delivery = handle.result()
    except Exception as error:  # submitit has kinds of its own for a job that vanished, and wraps a job's error
        return error
    return delivery


def _do(job: Job, work: RemoteWork) -> Delivery:
    """In a job of Slurm's."""
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        del os.environ[name]  # srun's wrapper may set them: an experiment is no rank
    return work.do(job)
