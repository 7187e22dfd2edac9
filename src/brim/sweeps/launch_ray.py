"""`--on ray`: each experiment a Ray task with the part of a GPU that its forecast memory needs.

Ray decides what runs where and when; this file only states what each task needs. A task that is lost with its worker or
its node is submitted again. Works on the cluster at `RAY_ADDRESS`, or on a Ray of this machine alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import BrimError, LostError, first_line
from brim.running.ray_cluster import RayCluster, connected_ray, forwarded_variables
from brim.sweeps.experiment import CHILD_COMMAND
from brim.sweeps.job import Job
from brim.sweeps.launch_remote import Delivery, RemoteLauncher, RemoteWork

__all__ = ["ClusterCard", "RayLauncher", "task_resources"]

SMALLEST_PART = 0.05  # of a GPU
USABLE_CARD_FRACTION = 0.95  # of a card's memory
WAIT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterCard:
    """The cards of one node of the cluster."""

    memory_bytes: int
    kind: str | None = None  # as Ray names it: A100, H100; None: Ray does not know


def task_resources(job: Job, cards: Sequence[ClusterCard], *, jobs_per_gpu: int | None = None) -> dict[str, Any]:
    """The resources that a job asks Ray for: cores, the part of a GPU, and the kind of card if not all are enough."""
    if not cards or job.device == "cpu":
        return {"num_cpus": 1, "num_gpus": 0}
    if job.alone or job.bytes_needed is None:
        return {"num_cpus": 1, "num_gpus": 1 if jobs_per_gpu is None or job.alone else 1 / jobs_per_gpu}
    enough = [card for card in cards if card.memory_bytes * USABLE_CARD_FRACTION >= job.bytes_needed]
    chosen = min(enough or cards, key=lambda card: card.memory_bytes * (1 if enough else -1))
    part = min(
        max(job.bytes_needed / (chosen.memory_bytes * USABLE_CARD_FRACTION), SMALLEST_PART, 1 / (jobs_per_gpu or 100)),
        1.0,
    )
    part = math.ceil(part * 100) / 100  # Ray counts in ten-thousandths; rounded up, never over
    if part > 0.5:
        part = 1.0  # nothing as large fits beside it
    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": part}
    too_small = {card.kind for card in cards if card.memory_bytes * USABLE_CARD_FRACTION < job.bytes_needed}
    if too_small and chosen.kind is not None and chosen.kind not in too_small:
        resources["accelerator_type"] = chosen.kind
    return resources


class RayLauncher(RemoteLauncher):
    """Runs jobs as tasks of a Ray cluster."""

    worker = "worker"
    _cluster: RayCluster

    def __init__(
        self,
        *,
        timeout_seconds: float | None = None,
        command: Sequence[str] = CHILD_COMMAND,
        jobs_per_gpu: int | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__(timeout_seconds=timeout_seconds, command=command)
        self._jobs_per_gpu = jobs_per_gpu
        self._workers = workers
        self._cards: list[ClusterCard] = []

    @contextlib.contextmanager
    def _connected(self, sweep: Path) -> Iterator[None]:
        del sweep
        with connected_ray(self._workers) as self._cluster:
            self._cards = _cards(self._cluster)
            yield

    def _submit(self, jobs: Sequence[Job], work: RemoteWork) -> list[tuple[Any, str]]:
        found = []
        for job in jobs:
            resources = task_resources(job, self._cards, jobs_per_gpu=self._jobs_per_gpu)
            limited = _within(job, resources, self._cards)
            task = self._cluster.start_task(_do, limited, work, forwarded_variables(), **resources)
            gpus = resources["num_gpus"]
            found.append((task, f"ray ({gpus:g} GPU)" if gpus else "ray"))
        return found

    def _wait(self, handles: Sequence[Any]) -> list[tuple[Any, Delivery | Exception]]:
        answer = self._cluster.next_result(handles, seconds=WAIT_SECONDS)
        if answer is None:
            return []
        error = answer.error
        if error is not None and not isinstance(error, BrimError):
            error = LostError(f"{type(error).__name__}: {first_line(error)}")
        return [(answer.call, error or answer.value)]

    def _cancel(self, handle: Any) -> None:
        self._cluster.cancel(handle)


def _do(job: Job, work: RemoteWork, variables: Mapping[str, str]) -> Delivery:
    """On a worker."""
    os.environ.update(variables)
    return work.do(job)


def _within(job: Job, resources: Mapping[str, Any], cards: Sequence[ClusterCard]) -> Job:
    """A job that has a part of a GPU keeps to what it has reserved."""
    if not cards or not 0 < resources["num_gpus"] < 1:
        return job
    smallest = min(card.memory_bytes for card in cards)
    return job.limited_to(job.bytes_needed or int(smallest * USABLE_CARD_FRACTION * resources["num_gpus"]))


def _cards(cluster: RayCluster) -> list[ClusterCard]:
    """The cards of the cluster, asked of every node that has some."""
    found = []
    for resources, memory in cluster.ask_nodes(_card_memory, having="GPU"):
        kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        if memory:
            found.append(ClusterCard(memory_bytes=memory, kind=kinds[0] if kinds else None))
    return found


def _card_memory() -> int | None:
    """On a worker: the memory of its machine's first card, as the driver has it."""
    from brim.monitor.nvml import device_memory

    memory = device_memory()
    return None if memory is None else memory.total_bytes
