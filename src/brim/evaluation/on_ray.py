"""`--on ray`: the same evaluation by the workers of a Ray cluster, each with a GPU, or a part of one, of its own.

The driver, this process, deals shares of the samples by their cost, which the first worker to have its model works
out; it writes each finished batch's lines into the journal as they come back. So the run's folder needs no shared
storage, and with a worker only the batch it was at is lost: what is left of its share goes to the others and to a new
worker in its place. Model and data must lie at the same path on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import LostError, RequestError
from brim.evaluation.deal import deal, deal_in_rounds
from brim.evaluation.journals import Journals, check_contents
from brim.evaluation.listener import EvalListener
from brim.evaluation.remote_worker import Means, News, RemoteWorker
from brim.evaluation.run import EvalResult, write_record
from brim.evaluation.subject import SubjectFacts
from brim.evaluation.summary import RankFigures, plans_to_keep
from brim.evaluation.worker import Lines
from brim.ranks.world import current_world
from brim.running.figures import ExecutionFigures
from brim.running.ray_cluster import connected_ray, exit_detail
from brim.settings.caller import given, named, written
from brim.settings.eval_settings import EvalRequest
from brim.storage.fingerprint import differing_parts
from brim.storage.run_lock import locked_folder

__all__ = ["evaluate_on_ray"]

MOST_LOSSES = 3  # in a row, with no line in between: then it is not the machines that are at fault
SHARE_BATCHES = 8  # the fewest in a share: one of them is not full
USUAL_BATCH = 32  # where the size is yet to be found
PLACE_SECONDS = 300.0  # how long Ray may take to start a worker while there is no other
FORWARDED = ("HF_", "TRANSFORMERS_", "TOKENIZERS_")  # the driver's variables that decide what a worker loads


def evaluate_on_ray(
    request: EvalRequest,
    *,
    output: Path | None,
    listener: EvalListener,
    workers: int | None = None,
    gpus_per_worker: float | None = None,
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
        ray = stack.enter_context(connected_ray(workers))
        means = _means(ray.cluster_resources(), request, workers, gpus_per_worker)
        crew = _Crew(ray, request, means, listener)
        try:
            return _run(crew, request, folder, listener, started_at)
        finally:
            crew.dismiss()  # also after Ctrl-C


def _run(
    crew: _Crew, request: EvalRequest, folder: Path, listener: EvalListener, started_at: datetime.datetime
) -> EvalResult:
    facts, ids, costs = crew.gather()
    many = f"{crew.means.workers} Ray worker{'s' if crew.means.workers > 1 else ''}"
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
        for lines in crew.evaluate(left, costs):
            journals.append(lines)
            crew.finished(place[str(line["id"])] for line in lines)
            listener.batch(crew.progress(), cap=0, reserved_bytes=crew.peak_bytes())
    outcomes = crew.outcomes()
    entries, summary = crew.ask("summarise", journals.merged(), outcomes)
    journals.finalise(entries)
    crew.keep_plans(outcomes)
    crew.write_traces(folder)
    return write_record(folder, request, facts, entries, summary, outcomes, started_at)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Seat:
    """One worker as the driver knows it."""

    number: int
    actor: Any
    waiting: Any  # for this reference or stream; None: there is nothing to do
    state: str = "placing"  # placing, opening, open, lost
    where: str = "not yet placed"
    share: list[int] = dataclasses.field(default_factory=list)
    figures: ExecutionFigures = dataclasses.field(default_factory=ExecutionFigures)
    outcome: RankFigures | None = None  # of its last finished share


class _Crew:
    """The workers: starts them, hands out shares, takes back what a lost one left, and replaces it."""

    def __init__(self, ray: Any, request: EvalRequest, means: Means, listener: EvalListener) -> None:
        self.means = means
        self._ray = ray
        self._listener = listener
        options = {"num_cpus": means.cpus, "num_gpus": means.gpus, "max_restarts": 0}
        self._kind: Any = ray.remote(RemoteWorker).options(**options)
        variables = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        self._smallest_share = SHARE_BATCHES * (request.batch_size or USUAL_BATCH)
        self._arguments = (request, means, str(Path.cwd()), variables)
        self._seats: list[_Seat] = []
        self._facts: SubjectFacts | None = None
        self._shares: deque[list[int]] = deque()
        self._costs: Sequence[int] = ()
        self._done: set[int] = set()
        self._notes: list[str] = []
        self._losses = 0
        self._last_count = 0
        self._began = self._ended = time.monotonic()
        self._alive_at = time.monotonic()
        for _ in range(means.workers):
            self._hire()

    def gather(self) -> tuple[SubjectFacts, list[str], list[int]]:
        """Wait for the first worker to have its model: what is evaluated, and every sample's id and cost."""
        ids, costs = self.ask("dealing")
        assert self._facts is not None
        self._costs = costs
        return self._facts, ids, costs

    def evaluate(self, items: Sequence[int], costs: Sequence[int]) -> Iterator[Lines]:
        """Have the items done; gives the lines of each batch, which count as done once `finished` is told."""
        self._began = self._ended = time.monotonic()
        self._shares = deque(deal_in_rounds(items, costs, self.means.workers, smallest=self._smallest_share))
        while self._shares or any(seat.share for seat in self._seats):
            for seat in self._seats:
                if seat.state == "open" and seat.waiting is None and self._shares:
                    seat.share = self._shares.popleft()
                    seat.waiting = seat.actor.evaluate.remote(seat.share)
            news = self._next_news()
            if news is not None and news.lines:
                yield news.lines
        self._ended = time.monotonic()

    def finished(self, items: Iterator[int]) -> None:
        """These are in the journal."""
        self._losses = 0
        self._done.update(items)

    def progress(self) -> ExecutionFigures:
        """The workers' figures as one's."""
        figures = [seat.figures for seat in self._seats]
        return ExecutionFigures(
            items=sum(one.items for one in figures),
            failed=sum(one.failed for one in figures),
            oom_events=sum(one.oom_events for one in figures),
            seconds=time.monotonic() - self._began,
            batch_counts=[self._last_count],
        )

    def peak_bytes(self) -> int | None:
        """The most that any worker has reserved."""
        return max((seat.figures.peak_reserved_bytes for seat in self._seats), default=0) or None

    def outcomes(self) -> list[RankFigures]:
        """What every worker counted; one that was lost before it had done anything does not appear."""
        seats = [seat for seat in self._seats if seat.figures.items or seat.state == "open"]
        seconds = self._ended - self._began
        found = [seat.outcome or RankFigures(figures=seat.figures, seconds=seconds) for seat in seats]
        counted = [
            dataclasses.replace(one, figures=seat.figures, seconds=seconds)
            for seat, one in zip(seats, found, strict=True)
        ]
        return [dataclasses.replace(counted[0], notes=(*self._notes, *counted[0].notes)), *counted[1:]]

    def ask(self, question: str, *arguments: Any) -> Any:
        """Any one worker's answer; if it is lost on the way, another's."""
        while True:
            seat = next((seat for seat in self._seats if seat.state == "open" and seat.waiting is None), None)
            if seat is None:
                self._next_news()
                continue
            try:
                return self._ray.get(getattr(seat.actor, question).remote(*arguments))
            except self._ray.exceptions.RayError as error:
                self._after(seat, error)

    def keep_plans(self, outcomes: Sequence[RankFigures]) -> None:
        """Have the sizes that were found filed where they were found."""
        kept = {id(outcomes[place].figures) for place in plans_to_keep(outcomes)}
        self._ask_all("keep_plan", [seat for seat in self._seats if id(seat.figures) in kept])

    def write_traces(self, folder: Path) -> None:
        """Every living worker's trace: monitor.csv for the first, monitor.rank-N.csv for the others."""
        for place, text in enumerate(self._ask_all("trace", self._seats)):
            name = "monitor.csv" if place == 0 else f"monitor.rank-{place}.csv"
            with contextlib.suppress(OSError):  # a trace is not worth a run
                (folder / name).write_text(text, encoding="utf-8")

    def dismiss(self) -> None:
        """End every worker."""
        for seat in self._seats:
            with contextlib.suppress(Exception):  # it may be gone already, or Ray with it
                self._ray.kill(seat.actor)

    def _ask_all(self, question: str, seats: Sequence[_Seat]) -> list[Any]:
        """What those who can answer do answer, at the end, when nobody is replaced any more."""
        asked = [getattr(seat.actor, question).remote() for seat in seats if seat.state == "open"]
        answers = []
        for one in asked:
            with contextlib.suppress(self._ray.exceptions.RayError):
                answers.append(self._ray.get(one, timeout=60))
        return answers

    def _hire(self) -> None:
        actor = self._kind.remote(*self._arguments)
        self._seats.append(_Seat(number=len(self._seats), actor=actor, waiting=actor.hello.remote()))

    def _next_news(self) -> News | None:
        """Wait until something happens somewhere, and see to it; gives a worker's news, if that is what it was."""
        waiting = [seat for seat in self._seats if seat.waiting is not None]
        ready, _ = self._ray.wait([seat.waiting for seat in waiting], timeout=5.0, fetch_local=False)
        self._give_up_placing()
        if not ready:
            return None
        seat = next(seat for seat in waiting if seat.waiting == ready[0])
        streaming = bool(seat.share)
        try:
            told = self._ray.get(next(seat.waiting) if streaming else seat.waiting)
        except self._ray.exceptions.RayError as error:
            self._after(seat, error)
            return None
        if streaming:
            return self._heard(seat, told)
        self._settle_in(seat, told)
        return None

    def _settle_in(self, seat: _Seat, told: Any) -> None:
        """A worker has been placed, or has loaded its model."""
        if seat.state == "placing":
            seat.state, seat.where, seat.waiting = "opening", told, seat.actor.open.remote()
            return
        facts: SubjectFacts = told
        self._facts = self._facts or facts
        if facts.fingerprint != self._facts.fingerprint:
            parts = " and ".join(differing_parts(self._facts.fingerprint, facts.fingerprint))
            raise RequestError(
                f"worker {seat.number} ({seat.where}) does not have the same {parts} as the others: put the same files "
                "at the same path on every machine"
            )
        seat.state, seat.waiting = "open", None

    def _heard(self, seat: _Seat, news: News) -> News:
        if news.figures is not None:
            counts = [*seat.figures.batch_counts, *news.figures.batch_counts]
            seat.figures = dataclasses.replace(news.figures, batch_counts=counts)
            self._last_count = counts[-1] if counts else len(news.lines)
        if news.note is not None:
            self._tell(news.note)
        if news.outcome is not None:
            seat.outcome, seat.share, seat.waiting = news.outcome, [], None
        return news

    def _after(self, seat: _Seat, error: Exception) -> None:
        """A worker failed: its own error is raised, unless that, or no word at all, means that it is lost."""
        cause = getattr(error, "cause", None)  # of a RayTaskError: what the worker raised
        if isinstance(cause, Exception) and not isinstance(cause, LostError):
            raise cause
        left = [item for item in seat.share if item not in self._done]
        seat.state, seat.share, seat.waiting = "lost", [], None
        with contextlib.suppress(Exception):
            self._ray.kill(seat.actor)
        reason = str(cause) if isinstance(cause, LostError) else exit_detail(error)
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            raise LostError(
                f"{self._losses} workers in a row were lost, the last of them worker {seat.number} ({seat.where}): "
                f"{reason}. What is finished is kept: start again with {named('resume')}"
            )
        open_seats = sum(one.state == "open" for one in self._seats)
        self._shares.extendleft(share for share in deal(left, self._costs, open_seats + 1) if share)
        self._tell(
            f"worker {seat.number} ({seat.where}) was lost: {reason}; {len(left)} samples of its share go to the "
            "others, and a new worker is started"
        )
        self._hire()

    def _give_up_placing(self) -> None:
        """Raise if Ray has started no worker for long, and there is none at work either."""
        if any(seat.state in ("opening", "open") for seat in self._seats):
            self._alive_at = time.monotonic()
        if time.monotonic() - self._alive_at > PLACE_SECONDS:
            free = {name: self._ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
            raise LostError(
                f"Ray has started no worker for {PLACE_SECONDS:g} s; each needs {self.means.gpus:g} GPUs and "
                f"{self.means.cpus} CPUs, free are {free}. Wait until the cluster is free, then start again"
            )

    def _tell(self, line: str) -> None:
        if line not in self._notes:
            self._notes.append(line)
            self._listener.note(line)


def _means(
    resources: Mapping[str, float], request: EvalRequest, workers: int | None, gpus_per_worker: float | None
) -> Means:
    """How many workers with how much each; more than the cluster has is a `RequestError`, not a wait without end."""
    gpus, cpus = resources.get("GPU", 0.0), int(resources.get("CPU", 1))
    if request.device == "cpu" or (gpus == 0 and gpus_per_worker is None):
        count = workers or 1
        if count > cpus:
            raise RequestError(
                f"{given('workers', count)}: the Ray cluster has {cpus} CPUs and no GPU for them; ask for fewer"
            )
        return Means(workers=count, gpus=0, cpus=max(cpus // count, 1))
    each = 1.0 if gpus_per_worker is None else gpus_per_worker
    most = int(gpus) * int(1 / each + 1e-9)  # a worker's part lies on one GPU
    if (workers or 1) > most:
        asked = given("workers", workers) if workers else f"{given('gpus_per_worker', each)}"
        raise RequestError(f"{asked}: the Ray cluster has {gpus:g} GPUs, enough for {most} workers with {each:g} each")
    return Means(workers=workers or most, gpus=each, cpus=1)
