"""One evaluation: every sample once, journalled as it comes, summed up at the end.

The flow: request → setup → worker (sizing, executor) → journal → summary. The samples are sharded over the ranks by
cost, and each rank keeps a journal of its own; rank 0 merges them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import BrimError, DoesNotFitError, RankError
from brim.evaluation.journals import Journals, check_contents
from brim.evaluation.live_figures import LiveEvaluation, LoggedEvaluation
from brim.evaluation.scoring import RankFigures, merge_plans, plans_to_keep, summarise
from brim.evaluation.setup import EvaluationSetup, SetupFacts, evaluation_savings, open_setup
from brim.evaluation.shard_by_cost import shard_by_cost
from brim.evaluation.worker import EvalListener, Lines, Worker
from brim.memory.failures import memory_remedies
from brim.monitor.live import LiveRun, both
from brim.monitor.loggers.loggers import check_loggers, open_loggers
from brim.ranks.agreement import Agreement, check_same_work, shared_folder, stop_signal_as_error
from brim.records import Plan
from brim.settings.caller import resume_with
from brim.settings.eval_settings import EvalRequest, EvaluateSettings, failed_fast
from brim.storage.run_folder import write_run

__all__ = [
    "EvalResult",
    "SetupRun",
    "WorkerOpener",
    "evaluate",
    "evaluate_as",
    "evaluate_together",
    "open_worker",
    "run_setup",
    "write_record",
]

WorkerOpener = Callable[[EvalRequest, EvalListener, Path], Worker]  # the last: where the monitor writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The result of an evaluation.

    `summary` has the fields of docs/interface.md; `samples` one line per sample in the data's order.
    """

    summary: dict[str, Any]
    folder: Path
    plan: Plan | None
    samples: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, Any]:
        """Every metric's figure with its spread."""
        metrics: dict[str, Any] = self.summary["metrics"]
        return metrics


def evaluate(
    request: EvalRequest,
    *,
    output: Path | None = None,
    listener: EvalListener | None = None,
    log: Sequence[str] = (),
) -> EvalResult:
    """Evaluate, and leave the run's folder behind; on every rank but 0 the result has neither summary nor samples."""
    watcher = listener or EvalListener()

    def check(folder: Path) -> None:
        check_contents(folder, resume=request.resume)
        check_loggers(log, folder)

    with (
        Agreement(patient=True, purpose="an evaluation") as agreement,
        shared_folder(agreement, output, command="eval", check=check, note=watcher.note) as folder,
        LiveRun(folder, "eval", publishes=agreement.world.rank == 0) as live,
        open_loggers(log if agreement.world.rank == 0 else (), folder, watcher.note) as loggers,
        loggers.open_run(folder.absolute().name, request.to_json()) as run,
    ):
        live.update(ranks=agreement.world.size, rank_pids=agreement.processes_here())
        published = both(EvalListener, both(EvalListener, LiveEvaluation(live), LoggedEvaluation(run)), watcher)
        try:
            with stop_signal_as_error(agreement):
                result = evaluate_together(agreement, request, folder, published, open_worker)
                run.summary = result.summary
                return result
        except RankError as error:
            if error.exit_code == RankError.exit_code and (folder / "samples.jsonl").exists():
                error.args = (f"{error}\nWhat is finished is kept: continue with {resume_with(folder)}",)
            raise
        except KeyboardInterrupt:
            if agreement.world.rank == 0 and (folder / "samples.jsonl").exists():
                watcher.note(f"what is finished is kept: continue with {resume_with(folder)}")
            raise


def open_worker(request: EvalRequest, listener: EvalListener, monitor: Path) -> Worker:
    """Data and model read for this run alone."""
    return Worker(request, open_setup(request), listener, monitor=monitor)


def evaluate_together(
    agreement: Agreement,
    request: EvalRequest,
    folder: Path,
    listener: EvalListener,
    opener: WorkerOpener,
) -> EvalResult:
    """One evaluation by all ranks; `opener` may keep what several evaluations share, such as the model."""
    started_at = datetime.datetime.now(datetime.UTC)
    rank = agreement.world.rank
    with agreement.step(str) as opening:  # the same model and data on all, or the same error; nothing is written yet
        worker = opener(request, listener, folder / ("monitor.csv" if rank == 0 else f"monitor.rank-{rank}.csv"))
        opening.value = worker.setup.fingerprint()
    check_same_work(opening.values)
    facts = worker.setup.facts()
    journals = Journals(folder, fingerprint=facts.fingerprint, rank=rank, ranks=agreement.world.size)
    listener.opened(facts)
    items = _shard_of_work(agreement, worker, journals)
    with agreement.step(RankFigures) as working, _fail_fast_by_name(agreement, request):
        with journals, worker, contextlib.closing(worker.run(items)) as finished:
            for lines in finished:
                journals.append(lines)
                listener.scored(lines)
                agreement.check()
        working.value = worker.figures()
    outcomes = working.values  # no rank writes any more: each has closed its journal
    if rank in plans_to_keep(outcomes):
        worker.remember_plan()
    if rank > 0:
        return EvalResult(summary={}, folder=folder, plan=outcomes[rank].plan, samples=())
    entries = worker.scorer.ordered(journals.merged())
    journals.finalise(entries)
    summary = summarise(entries, worker.scorer, outcomes, bad=len(worker.setup.data.bad))
    for number, outcome in enumerate(outcomes[1:], start=1):
        for note in outcome.notes:
            if note not in outcomes[0].notes:
                listener.note(f"rank {number}: {note}")
    return write_record(folder, request, facts, entries, summary, outcomes, started_at)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetupRun:
    """What an evaluation that leaves no folder behind gave."""

    summary: dict[str, Any]
    lines: Lines
    plan: Plan | None


def run_setup(request: EvalRequest, setup: EvaluationSetup, folder: Path, listener: EvalListener) -> SetupRun:
    """Evaluate a loaded setup in this process alone; for comparisons. The folder is for the monitor's trace."""
    lines: Lines = []
    with Worker(request, setup, listener, monitor=folder / "monitor.csv") as worker:
        items = range(len(setup.costs))
        listener.started(len(items), 0)
        for some in worker.run(items):
            lines += some
    figures = worker.figures()
    summary = summarise(worker.scorer.ordered(lines), worker.scorer, [figures])
    return SetupRun(summary=summary, lines=lines, plan=figures.plan)


@contextlib.contextmanager
def _fail_fast_by_name(agreement: Agreement, request: EvalRequest) -> Iterator[None]:
    """Report to the other ranks that an error ends the run because of `fail_fast`; alone it is raised unchanged."""
    try:
        yield
    except Exception as error:
        if agreement.world.size == 1 or not request.fail_fast or isinstance(error, BrimError):
            raise
        raise failed_fast(error) from error


def _shard_of_work(agreement: Agreement, worker: Worker, journals: Journals) -> list[int]:
    """This rank's samples: rank 0 knows which are left, and every rank computes the same shards."""
    request, costs, world = worker.request, worker.setup.costs, agreement.world
    with agreement.step(list[int]) as step:
        if world.rank == 0:
            before = journals.gather_earlier(resume=request.resume, drop_failed=request.retry_failed)
            for note in journals.notes:
                worker.listener.note(note)
            finished = {item for entry in before if (item := worker.scorer.item_of(entry)) is not None}
            step.value = [item for item in range(len(costs)) if item not in finished]
    left = step.values[0]
    done = len(costs) - len(left)
    shard = shard_by_cost(left, costs, world.size)[world.rank]
    if world.size == 1:
        worker.listener.started(len(shard) + done, done)
    else:
        worker.listener.started(len(shard), 0)
        before_now = f" ({done:,} were done already)" if done else ""
        worker.listener.note(f"{world.size} ranks; this one has {len(shard):,} of {len(left):,} samples{before_now}")
    return shard


def write_record(
    folder: Path,
    request: EvalRequest,
    facts: SetupFacts,
    entries: Sequence[Mapping[str, Any]],
    summary: dict[str, Any],
    outcomes: Sequence[RankFigures],
    started_at: datetime.datetime,
) -> EvalResult:
    """Write run.json; a run of which no sample fitted even alone is a `DoesNotFitError` all the same."""
    notes = tuple(dict.fromkeys(note for outcome in outcomes for note in outcome.notes))
    plan = merge_plans(outcomes)
    write_run(
        folder,
        kind="eval",
        request={**request.to_json(), "command": "eval", "task": facts.task},
        environment=dict(facts.environment),
        plan=None if plan is None else plan.to_json(),
        summary={**summary, "notes": list(notes), "fingerprint": facts.fingerprint},
        started_at=started_at,
    )
    reasons = {(entry["error"] or {}).get("reason") for entry in entries}
    if reasons == {"out_of_memory"}:
        savings = evaluation_savings(request, mode="generate" if facts.unit == "tokens" else "forward")
        remedies = "\n  - ".join(memory_remedies(savings))
        raise DoesNotFitError(
            f"no sample fits, even alone ({entries[0]['error']['message']}).\nWhat may help:\n  - {remedies}\n"
            f"The record is in {folder}"
        )
    return EvalResult(summary=summary, folder=folder, plan=plan, samples=tuple(entries), notes=notes)


def evaluate_as(settings: EvaluateSettings, *, listener: EvalListener | None = None) -> EvalResult:
    """Evaluate, and leave the run's folder behind; a sample that fails has its error in `samples`, none is raised."""
    if settings.on is None:
        return evaluate(settings.request, output=settings.output, listener=listener, log=settings.log)
    from brim.evaluation.on_ray import evaluate_on_ray

    return evaluate_on_ray(
        settings.request, output=settings.output, listener=listener or EvalListener(), workers=settings.workers,
        gpus_per_worker=settings.gpus_per_worker, log=settings.log,
    )  # fmt: skip
