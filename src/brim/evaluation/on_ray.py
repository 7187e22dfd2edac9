"""`--on ray`: the same evaluation by the workers of a Ray cluster, each with a GPU, or a part of one, of its own.

The driver, this process, shards the samples by their cost, which the first worker that has its model computes. It
writes each finished batch's lines into the journal as they come back. So the run's folder needs no shared
storage, and with a worker only the batch it was at is lost: what is left of its shard goes to the others and to a new
worker in its place. Model and data must lie at the same path on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import LostError, RequestError
from brim.evaluation.journals import Journals, check_contents
from brim.evaluation.live_figures import LiveEvaluation, LoggedEvaluation
from brim.evaluation.run import EvalResult, write_record
from brim.evaluation.scoring import RankFigures, plans_to_keep, summarise
from brim.evaluation.setup import SetupFacts, open_setup
from brim.evaluation.shard_by_cost import shard_by_cost, shards_in_rounds
from brim.evaluation.worker import EvalListener, Lines, Worker
from brim.memory.devices import DEFAULT_MARGIN, memory_of
from brim.models.placement import resolve_device
from brim.monitor.live import LiveRun, both
from brim.monitor.loggers.loggers import open_loggers
from brim.monitor.trace_file import TraceText
from brim.ranks.world import current_world
from brim.running.ray_cluster import RayCluster, WorkerLostError, connected_ray, forwarded_variables
from brim.running.results import ExecutionFigures, ThroughputCurve
from brim.settings.caller import given, named, written
from brim.settings.eval_settings import EvalRequest
from brim.storage.fingerprint import differing_parts
from brim.storage.run_lock import locked_folder

__all__ = ["RemoteWorker", "WorkerEvent", "WorkerResources", "evaluate_on_ray"]

MOST_LOSSES = 3  # in a row, with no line in between: then it is not the machines that are at fault
SHARD_BATCHES = 8  # the fewest in a shard: one of them is not full
ASSUMED_BATCH_SIZE = 32  # where the size is yet to be found
PLACE_SECONDS = 300.0  # how long Ray may take to start a worker while there is no other
EVENT_SECONDS = 5.0  # for an event, before checking whether Ray starts workers at all
END_SECONDS = 60.0  # for the last messages of a worker


def evaluate_on_ray(
    request: EvalRequest,
    *,
    output: Path | None,
    listener: EvalListener,
    workers: int | None = None,
    gpus_per_worker: float | None = None,
    log: Sequence[str] = (),
) -> EvalResult:
    """Evaluate on the cluster at `RAY_ADDRESS`, or on a Ray of this machine alone, and leave the run's folder behind.

    `workers` is by default as many as the cluster's GPUs allow, or 1 where there is none. A worker that has a part of
    a GPU keeps to that part of its memory.
    """
    started_at = datetime.datetime.now(datetime.UTC)
    if current_world().size > 1:
        raise RequestError(f"{written('on', 'ray')}: Ray starts the workers itself; leave torchrun out")
    if workers is not None and workers < 1:
        raise RequestError(f"{given('workers', workers)}: the smallest is 1")
    if gpus_per_worker is not None and not 0 < gpus_per_worker <= 1:
        raise RequestError(f"{given('gpus_per_worker', gpus_per_worker)}: give a part of one GPU, above 0 and up to 1")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(locked_folder(output, command="eval", note=listener.note))
        check_contents(folder, resume=request.resume)
        loggers = stack.enter_context(open_loggers(log, folder, listener.note))
        run = stack.enter_context(loggers.open_run(folder.absolute().name, request.to_json()))
        cluster = stack.enter_context(connected_ray(workers))
        resources = _worker_resources(cluster.resources(), request, workers, gpus_per_worker)
        live = stack.enter_context(LiveRun(folder, "eval"))
        listener = both(EvalListener, both(EvalListener, LiveEvaluation(live), LoggedEvaluation(run)), listener)
        pool = _WorkerPool(cluster, request, resources, listener)
        stack.callback(pool.end)  # also after Ctrl-C
        result = _run(pool, request, folder, listener, started_at)
        run.summary = result.summary
        return result


def _run(
    pool: _WorkerPool,
    request: EvalRequest,
    folder: Path,
    listener: EvalListener,
    started_at: datetime.datetime,
) -> EvalResult:
    facts, ids, costs = pool.gather()
    many = f"{pool.resources.workers} Ray worker{'s' if pool.resources.workers > 1 else ''}"
    listener.opened(dataclasses.replace(facts, device=f"{many} ({facts.device})"))
    journals = Journals(folder, fingerprint=facts.fingerprint)
    before = journals.gather_earlier(resume=request.resume, drop_failed=request.retry_failed)
    for note in journals.notes:
        listener.note(note)
    done = {str(entry.get("id")) for entry in before}
    left = [item for item, name in enumerate(ids) if name not in done]
    listener.started(len(ids), len(ids) - len(left))
    place = {name: item for item, name in enumerate(ids)}
    with journals:
        for lines in pool.evaluate(left, costs):
            journals.append(lines)
            listener.scored(lines)
            pool.finished(place[str(line["id"])] for line in lines)
            listener.batch(pool.progress(), cap=0, reserved_bytes=pool.peak_bytes())
    outcomes = pool.outcomes()
    entries, summary = pool.ask("summarise", journals.merged(), outcomes)
    journals.finalise(entries)
    pool.keep_plans(outcomes)
    pool.write_traces(folder)
    return write_record(folder, request, facts, entries, summary, outcomes, started_at)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Worker:
    """One worker as the driver knows it."""

    number: int
    actor: Any
    call: Any  # what it is asked to do; None: nothing
    state: str = "placing"  # placing, opening, open, lost
    where: str = "not yet placed"
    shard: list[int] = dataclasses.field(default_factory=list)
    figures: ExecutionFigures = dataclasses.field(default_factory=ExecutionFigures)
    outcome: RankFigures | None = None  # of its last finished shard


class _WorkerPool:
    """The workers: starts them, assigns shards, reassigns what a lost one left, and replaces it."""

    def __init__(
        self, cluster: RayCluster, request: EvalRequest, resources: WorkerResources, listener: EvalListener
    ) -> None:
        self.resources = resources
        self._cluster = cluster
        self._listener = listener
        self._smallest_shard = SHARD_BATCHES * (request.batch_size or ASSUMED_BATCH_SIZE)
        self._arguments = (request, resources, str(Path.cwd()), forwarded_variables())
        self._workers: list[_Worker] = []
        self._facts: SetupFacts | None = None
        self._shards: deque[list[int]] = deque()
        self._costs: Sequence[int] = ()
        self._done: set[int] = set()
        self._notes: list[str] = []
        self._losses = 0
        self._last_count = 0
        self._curve = ThroughputCurve()
        self._began = self._ended = time.monotonic()
        self._alive_at = time.monotonic()
        for _ in range(resources.workers):
            self._start_worker()

    def gather(self) -> tuple[SetupFacts, list[str], list[int]]:
        """Wait for the first worker to have its model: what is evaluated, and every sample's id and cost."""
        ids, costs = self.ask("sample_costs")
        assert self._facts is not None
        self._costs = costs
        return self._facts, ids, costs

    def evaluate(self, items: Sequence[int], costs: Sequence[int]) -> Iterator[Lines]:
        """Have the items done; gives the lines of each batch, which count as done once `finished` is called."""
        self._began = self._ended = time.monotonic()
        self._shards = deque(shards_in_rounds(items, costs, self.resources.workers, smallest=self._smallest_shard))
        while self._shards or any(worker.shard for worker in self._workers):
            for worker in self._workers:
                if worker.state == "open" and worker.call is None and self._shards:
                    worker.shard = self._shards.popleft()
                    worker.call = self._cluster.call(worker.actor, "evaluate", worker.shard)
            event = self._next_event()
            if event is not None and event.lines:
                yield event.lines
        self._ended = time.monotonic()

    def finished(self, items: Iterator[int]) -> None:
        """These are in the journal."""
        self._losses = 0
        self._done.update(items)
        self._curve.add(time.monotonic() - self._began, len(self._done))

    def progress(self) -> ExecutionFigures:
        """The workers' figures as one's."""
        figures = [worker.figures for worker in self._workers]
        return ExecutionFigures(
            items=sum(one.items for one in figures),
            failed=sum(one.failed for one in figures),
            oom_events=sum(one.oom_events for one in figures),
            seconds=time.monotonic() - self._began,
            batch_counts=[self._last_count],
        )

    def peak_bytes(self) -> int | None:
        """The most that any worker has reserved."""
        return max((worker.figures.peak_reserved_bytes for worker in self._workers), default=0) or None

    def outcomes(self) -> list[RankFigures]:
        """What every worker counted; one that was lost before it had done anything does not appear."""
        workers = [worker for worker in self._workers if worker.figures.items or worker.state == "open"]
        seconds = self._ended - self._began
        first, *others = [
            dataclasses.replace(
                worker.outcome or RankFigures(figures=worker.figures, seconds=seconds),
                figures=worker.figures,
                seconds=seconds,
                throughput=(),  # the driver's clock is that of all
            )
            for worker in workers
        ]
        curve = self._curve.points()
        return [dataclasses.replace(first, throughput=curve, notes=(*self._notes, *first.notes)), *others]

    def ask(self, question: str, *arguments: Any) -> Any:
        """Any one worker's answer; if it is lost on the way, another's."""
        while True:
            worker = next((one for one in self._workers if one.state == "open" and one.call is None), None)
            if worker is None:
                self._next_event()
                continue
            answer = self._cluster.next_result([self._cluster.call(worker.actor, question, *arguments)])
            assert answer is not None  # it is waited for without a limit
            if answer.error is None:
                return answer.value
            self._failed(worker, answer.error)

    def keep_plans(self, outcomes: Sequence[RankFigures]) -> None:
        """Have the sizes that were found filed where they were found."""
        kept = {id(outcomes[place].figures) for place in plans_to_keep(outcomes)}
        self._ask_all("keep_plan", [worker for worker in self._workers if id(worker.figures) in kept])

    def write_traces(self, folder: Path) -> None:
        """Every living worker's trace: monitor.csv for the first, monitor.rank-N.csv for the others."""
        for place, text in enumerate(self._ask_all("trace", self._workers)):
            name = "monitor.csv" if place == 0 else f"monitor.rank-{place}.csv"
            with contextlib.suppress(OSError):  # a run does not fail because of its trace
                (folder / name).write_text(text, encoding="utf-8")

    def end(self) -> None:
        """End every worker."""
        for worker in self._workers:
            self._cluster.end_actor(worker.actor)

    def _ask_all(self, question: str, workers: Sequence[_Worker]) -> list[Any]:
        """The answers of the workers that still answer, at the end, when none is replaced any more."""
        calls = [self._cluster.call(worker.actor, question) for worker in workers if worker.state == "open"]
        answers = [self._cluster.next_result([call], seconds=END_SECONDS) for call in calls]
        return [answer.value for answer in answers if answer is not None and answer.error is None]

    def _start_worker(self) -> None:
        each = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus}
        actor = self._cluster.start_actor(RemoteWorker, *self._arguments, **each)
        call = self._cluster.call(actor, "place")
        self._workers.append(_Worker(number=len(self._workers), actor=actor, call=call))

    def _next_event(self) -> WorkerEvent | None:
        """Wait for the next message of any worker and handle it; returns the event, if it was one."""
        calling = [worker for worker in self._workers if worker.call is not None]
        answer = self._cluster.next_result([worker.call for worker in calling], seconds=EVENT_SECONDS)
        self._give_up_placing()
        if answer is None:
            return None
        worker = next(worker for worker in calling if worker.call == answer.call)
        if answer.error is not None:
            self._failed(worker, answer.error)
        elif worker.state == "placing":
            worker.state, worker.where = "opening", answer.value
            worker.call = self._cluster.call(worker.actor, "open")
        elif worker.state == "opening":
            self._check_facts(worker, answer.value)
            worker.state, worker.call = "open", None
        else:
            return self._heard(worker, answer.value)
        return None

    def _check_facts(self, worker: _Worker, facts: SetupFacts) -> None:
        """A worker has loaded its model: it must be that of the others, and its data too."""
        self._facts = self._facts or facts
        if facts.fingerprint != self._facts.fingerprint:
            parts = " and ".join(differing_parts(self._facts.fingerprint, facts.fingerprint))
            raise RequestError(
                f"worker {worker.number} ({worker.where}) does not have the same {parts} as the others: put the same "
                "files at the same path on every machine"
            )

    def _heard(self, worker: _Worker, event: WorkerEvent) -> WorkerEvent:
        if event.figures is not None:
            counts = [*worker.figures.batch_counts, *event.figures.batch_counts]
            worker.figures = dataclasses.replace(event.figures, batch_counts=counts)
            self._last_count = counts[-1] if counts else len(event.lines)
        if event.note is not None:
            self._note(event.note)
        if event.outcome is not None:
            worker.outcome, worker.shard, worker.call = event.outcome, [], None
        return event

    def _failed(self, worker: _Worker, error: Exception) -> None:
        """A worker failed: an error of its own ends the run, one that is lost is replaced."""
        if not isinstance(error, WorkerLostError):
            raise error
        left = [item for item in worker.shard if item not in self._done]
        worker.state, worker.shard, worker.call = "lost", [], None
        self._cluster.end_actor(worker.actor)
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            raise LostError(
                f"{self._losses} workers in a row were lost, the last of them worker {worker.number} "
                f"({worker.where}): {error}. What is finished is kept: start again with {named('resume')}"
            )
        others = sum(one.state == "open" for one in self._workers)
        self._shards.extendleft(shard for shard in shard_by_cost(left, self._costs, others + 1) if shard)
        self._note(
            f"worker {worker.number} ({worker.where}) was lost: {error}; {len(left)} samples of its shard go to the "
            "others, and a new worker is started"
        )
        self._start_worker()

    def _give_up_placing(self) -> None:
        """Raise if Ray has started no worker for long, and there is none at work either."""
        if any(worker.state in ("opening", "open") for worker in self._workers):
            self._alive_at = time.monotonic()
        if time.monotonic() - self._alive_at > PLACE_SECONDS:
            free = {name: self._cluster.free_resources().get(name, 0) for name in ("CPU", "GPU")}
            raise LostError(
                f"Ray has started no worker for {PLACE_SECONDS:g} s; each needs {self.resources.gpus:g} GPUs and "
                f"{self.resources.cpus} CPUs, free are {free}. Wait until the cluster is free, then start again"
            )

    def _note(self, line: str) -> None:
        if line not in self._notes:
            self._notes.append(line)
            self._listener.note(line)


def _worker_resources(
    resources: Mapping[str, float], request: EvalRequest, workers: int | None, gpus_per_worker: float | None
) -> WorkerResources:
    """How many workers with how much each; more than the cluster has is a `RequestError`, not a wait without end."""
    gpus, cpus = resources.get("GPU", 0.0), int(resources.get("CPU", 1))
    if request.device == "cpu" or (gpus == 0 and gpus_per_worker is None):
        count = workers or 1
        if count > cpus:
            raise RequestError(
                f"{given('workers', count)}: the Ray cluster has {cpus} CPUs and no GPU for them; ask for fewer"
            )
        return WorkerResources(workers=count, gpus=0, cpus=max(cpus // count, 1))
    each = 1.0 if gpus_per_worker is None else gpus_per_worker
    most = int(gpus) * int(1 / each + 1e-9)  # a worker's part lies on one GPU
    if (workers or 1) > most:
        asked = given("workers", workers) if workers else f"{given('gpus_per_worker', each)}"
        raise RequestError(f"{asked}: the Ray cluster has {gpus:g} GPUs, enough for {most} workers with {each:g} each")
    return WorkerResources(workers=workers or most, gpus=each, cpus=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """How many workers, and what each is given."""

    workers: int
    gpus: float  # of each
    cpus: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerEvent:
    """What a worker sends to the driver while it works on a shard."""

    lines: Lines = dataclasses.field(default_factory=list)
    figures: ExecutionFigures | None = None  # of all its shards; but of the batch sizes only the new ones
    note: str | None = None
    outcome: RankFigures | None = None  # the shard is done


class RemoteWorker:
    """Made where it is to run; `open` loads the model, `evaluate` runs one shard, and may be called again.

    It knows nothing of Ray: its methods are called from another process, and take and return plain data.
    """

    def __init__(
        self, request: EvalRequest, resources: WorkerResources, folder: str, variables: Mapping[str, str]
    ) -> None:
        os.environ.update(variables)
        with contextlib.suppress(OSError):  # relative paths of the request mean the driver's, where that folder exists
            os.chdir(folder)
        self._request = request
        self._resources = resources
        self._trace = TraceText()
        self._relay = _Relay()
        self._sent = 0  # batch sizes

    def place(self) -> str:
        """Where this worker has been placed."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def open(self) -> SetupFacts:
        """Load the model and read the data."""
        request = self._request
        device = resolve_device(request.device)
        if self._resources.gpus < 1 and device.type == "cuda" and request.memory_limit is None:
            part = int(memory_of(device).total_bytes() * self._resources.gpus * (1 - DEFAULT_MARGIN))
            request = dataclasses.replace(request, memory_limit=part)
        setup = open_setup(request)
        self._worker = Worker(request, setup, self._relay, monitor=self._trace)
        self._worker.__enter__()
        return setup.facts()

    def sample_costs(self) -> tuple[list[str], list[int]]:
        """Every sample's id and cost."""
        setup = self._worker.setup
        return [sample.id for sample in setup.data.samples], list(setup.costs)

    def evaluate(self, items: list[int]) -> Iterator[WorkerEvent]:
        """Run a shard; an event for every batch as it is done, the outcome last."""
        with contextlib.closing(self._worker.run(items)) as finished:
            for lines in finished:
                yield from self._notes()
                counted = self._worker.counted
                new = counted.batch_counts[self._sent :]  # all of them with every batch would be the bulk
                self._sent += len(new)
                yield WorkerEvent(lines=lines, figures=dataclasses.replace(counted, batch_counts=new))
        yield from self._notes()
        yield WorkerEvent(outcome=self._worker.figures())

    def _notes(self) -> Iterator[WorkerEvent]:
        notes, self._relay.notes = self._relay.notes, []
        for note in notes:
            yield WorkerEvent(note=note)

    def summarise(self, lines: Lines, outcomes: Sequence[RankFigures]) -> tuple[Lines, dict[str, Any]]:
        """All lines in the data's order, and the summary of the run."""
        scorer = self._worker.scorer
        entries = scorer.ordered(lines)
        return entries, summarise(entries, scorer, outcomes, bad=len(self._worker.setup.data.bad))

    def keep_plan(self) -> None:
        """File the size found on this machine."""
        self._worker.remember_plan()

    def trace(self) -> str:
        """End the monitor's trace, and give it."""
        self._worker.__exit__(None, None, None)
        return self._trace.text()


class _Relay(EvalListener):
    """Collects a worker's notes until they are sent."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        """Keep it."""
        self.notes.append(line)
