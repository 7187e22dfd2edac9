"""`--on ray`: each experiment a Ray task with the part of a GPU that its forecast memory needs.

Ray decides what runs where and when; here is only said what each task needs. A task that is lost with its worker or
its node is handed in again. Works on the cluster at `RAY_ADDRESS`, or on a Ray of this machine alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import LostError, RequestError
from brim.running.ray_cluster import connected_ray, exit_detail, stay_on_node
from brim.sweeps.job import Job, Outcome
from brim.sweeps.listener import Recorder
from brim.sweeps.remote_job import Delivery, do_remotely, mark_of, receive

__all__ = ["ClusterCard", "RayLauncher", "task_resources"]

MOST_LOSSES = 3  # of one experiment: then it is the experiment that kills its workers
SMALLEST_PART = 0.05  # of a GPU
USABLE = 0.95  # of a card's memory
WAIT_SECONDS = 2.0
FORWARDED = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "XDG_CACHE_HOME", "OMP_NUM_THREADS")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterCard:
    """The cards of one node of the cluster."""

    memory_bytes: int
    kind: str | None = None  # as Ray names it: A100, H100; None: Ray does not know


def task_resources(job: Job, cards: Sequence[ClusterCard], *, jobs_per_gpu: int | None = None) -> dict[str, Any]:
    """What Ray is told that a job needs: processors, the part of a GPU, and the kind of card if not all are enough."""
    if not cards or job.device == "cpu":
        return {"num_cpus": 1, "num_gpus": 0}
    if job.alone or job.bytes_needed is None:
        return {"num_cpus": 1, "num_gpus": 1 if jobs_per_gpu is None or job.alone else 1 / jobs_per_gpu}
    enough = [card for card in cards if card.memory_bytes * USABLE >= job.bytes_needed]
    chosen = min(enough or cards, key=lambda card: card.memory_bytes * (1 if enough else -1))
    part = min(max(job.bytes_needed / (chosen.memory_bytes * USABLE), SMALLEST_PART, 1 / (jobs_per_gpu or 100)), 1.0)
    part = math.ceil(part * 100) / 100  # Ray counts in ten-thousandths; rounded up, never over
    if part > 0.5:
        part = 1.0  # nothing as large fits beside it
    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": part}
    too_small = {card.kind for card in cards if card.memory_bytes * USABLE < job.bytes_needed}
    if too_small and chosen.kind is not None and chosen.kind not in too_small:
        resources["accelerator_type"] = chosen.kind
    return resources


@dataclasses.dataclass(kw_only=True, eq=False)
class _Task:
    job: Job
    handle: Any
    losses: int = 0


class RayLauncher:
    """Runs jobs as tasks of a Ray cluster."""

    def __init__(
        self,
        *,
        timeout_seconds: float | None = None,
        jobs_per_gpu: int | None = None,
        workers: int | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._jobs_per_gpu = jobs_per_gpu
        self._workers = workers
        self._command = None if command is None else tuple(command)

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        """Every job to its end. Ctrl-C ends the tasks; what is finished is kept."""
        if not jobs:
            return
        with connected_ray(self._workers) as ray:
            cards = _cards(ray)
            tasks = [_Task(job=job, handle=self._submit(ray, job, cards, recorder)) for job in jobs]
            try:
                self._wait(ray, tasks, cards, recorder)
            except BaseException:
                for task in tasks:
                    with contextlib.suppress(Exception):  # it may be done, or Ray gone
                        ray.cancel(task.handle, force=True)
                raise

    def _wait(self, ray: Any, tasks: list[_Task], cards: Sequence[ClusterCard], recorder: Recorder) -> None:
        while tasks:
            ready, _ = ray.wait([task.handle for task in tasks], timeout=WAIT_SECONDS)
            for task in [task for task in tasks if task.handle in ready]:
                again = self._after(ray, task, recorder)
                if again is None:
                    tasks.remove(task)
                    continue
                if again.retries != task.job.retries:  # a new size: what was lost before is no evidence
                    task.losses = 0
                task.job = again
                task.handle = self._submit(ray, again, cards, recorder)

    def _after(self, ray: Any, task: _Task, recorder: Recorder) -> Job | None:
        """See to a task that is over: its outcome, or that it was lost; gives the job to hand in next."""
        job = task.job
        try:
            delivery: Delivery = ray.get(task.handle)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RequestError):
                raise cause from error
            task.losses += 1
            reason = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else exit_detail(error)
            if task.losses < MOST_LOSSES:
                recorder.note(f"{job.id}: its worker was lost ({reason}); it is started again")
                return dataclasses.replace(job, attempt=job.attempt + 1)
            told = f"{task.losses} workers were lost at it, the last: {reason}"
            lost = Outcome(id=job.id, attempt=job.attempt, state="failed", failure="killed", error=told)
            return recorder.ended(job, lost)
        receive(delivery, Path(job.folder))
        for path in delivery.left_behind:
            recorder.note(f"{job.id}: too large to be sent back, left on {delivery.host}: {path}")
        return recorder.ended(job, delivery.outcome)

    def _submit(self, ray: Any, job: Job, cards: Sequence[ClusterCard], recorder: Recorder) -> Any:
        resources = task_resources(job, cards, jobs_per_gpu=self._jobs_per_gpu)
        limited = _within(job, resources, cards)
        variables = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        task = ray.remote(max_calls=1)(_run_task).options(**resources, max_retries=0)  # a process for each
        recorder.started(job, _told(resources))
        return task.remote(
            limited.to_json(),
            variables,
            mark=mark_of(Path(job.folder)),
            timeout_seconds=self._timeout_seconds,
            command=self._command,
            place=str(Path.cwd()),
        )


def _run_task(job: Mapping[str, Any], variables: Mapping[str, str], **settings: Any) -> Delivery:
    os.environ.update(variables)
    return do_remotely(Job.from_json(job), **settings)


def _within(job: Job, resources: Mapping[str, Any], cards: Sequence[ClusterCard]) -> Job:
    """A job that has a part of a GPU keeps to what it has reserved."""
    named = (job.settings.get("training") or {}).get("memory_limit")
    if not cards or not 0 < resources["num_gpus"] < 1 or named is not None:
        return job
    if job.bytes_needed is not None:
        limit = job.bytes_needed
    else:
        limit = int(min(card.memory_bytes for card in cards) * USABLE * resources["num_gpus"])
    return dataclasses.replace(job, changes={**job.changes, "training.memory_limit": str(limit)})


def _cards(ray: Any) -> list[ClusterCard]:
    """The cards of the cluster, asked of every node that has some."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    ask = ray.remote(_card_memory)
    answers = [ask.options(num_cpus=0, scheduling_strategy=stay_on_node(node["NodeID"])).remote() for node in nodes]
    found = []
    for node, answer in zip(nodes, answers, strict=True):
        try:
            memory = ray.get(answer, timeout=60)
        except ray.exceptions.RayError as error:
            raise LostError(f"a node of the cluster does not answer: {exit_detail(error)}") from error
        kinds = [name.partition(":")[2] for name in node["Resources"] if name.startswith("accelerator_type:")]
        if memory:
            found.append(ClusterCard(memory_bytes=memory, kind=kinds[0] if kinds else None))
    return found


def _card_memory() -> int | None:
    """On a worker: the memory of its machine's first card, as the driver has it."""
    from brim.monitor.nvml import device_memory

    memory = device_memory()
    return None if memory is None else memory.total_bytes


def _told(resources: Mapping[str, Any]) -> str:
    gpus = resources["num_gpus"]
    return "ray" if not gpus else f"ray ({gpus:g} GPU)"
