"""One evaluation: every sample once, journalled as it comes, summed up at the end.

The flow is that of the design: request → subject → worker (sizing, executor) → journal → summary. Ranks deal the
samples among themselves by cost and each keeps a journal of its own; rank 0 merges.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import BrimError, DoesNotFitError, RankError, RequestError
from brim.evaluation.deal import deal
from brim.evaluation.journals import Journals, check_contents
from brim.evaluation.listener import EvalListener
from brim.evaluation.subject import Subject, SubjectFacts, evaluation_savings, open_subject
from brim.evaluation.summary import RankFigures, merge_plans, plans_to_keep, summarise
from brim.evaluation.worker import Lines, Worker
from brim.memory.remedies import memory_remedies
from brim.ranks.agreement import Agreement
from brim.ranks.shared_folder import shared_folder
from brim.ranks.stopping import stop_signal_as_error
from brim.records import Plan
from brim.settings.caller import named, resume_with
from brim.settings.eval_settings import EvalRequest
from brim.storage.fingerprint import differing_parts
from brim.storage.run_folder import write_run

__all__ = [
    "EvalResult", "WorkerOpener", "evaluate", "evaluate_together", "open_worker", "run_subject", "write_record",
]  # fmt: skip

WorkerOpener = Callable[[EvalRequest, EvalListener, Path], Worker]  # the last: where the monitor writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What an evaluation came to.

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


def evaluate(request: EvalRequest, *, output: Path | None = None, listener: EvalListener | None = None) -> EvalResult:
    """Evaluate, and leave the run's folder behind; on every rank but 0 the result has neither summary nor samples."""
    watcher = listener or EvalListener()

    def check(folder: Path) -> None:
        check_contents(folder, resume=request.resume)

    with (
        Agreement(patient=True, purpose="an evaluation") as agreement,
        shared_folder(agreement, output, command="eval", check=check, note=watcher.note) as folder,
    ):
        try:
            with stop_signal_as_error(agreement):
                return evaluate_together(agreement, request, folder, watcher, open_worker)
        except RankError as error:
            if error.exit_code == RankError.exit_code and (folder / "samples.jsonl").exists():
                error.args = (f"{error}\nWhat is finished is kept: go on with {resume_with(folder)}",)
            raise
        except KeyboardInterrupt:
            if agreement.world.rank == 0 and (folder / "samples.jsonl").exists():
                watcher.note(f"what is finished is kept: go on with {resume_with(folder)}")
            raise


def open_worker(request: EvalRequest, listener: EvalListener, monitor: Path) -> Worker:
    """Data and model read anew for this run alone."""
    return Worker(request, open_subject(request), listener, monitor=monitor)


def evaluate_together(
    agreement: Agreement, request: EvalRequest, folder: Path, listener: EvalListener, opener: WorkerOpener
) -> EvalResult:
    """One evaluation of all ranks, which may be one of several in their lives; `opener` may keep what they share."""
    started_at = datetime.datetime.now(datetime.UTC)
    worker = _open_everywhere(agreement, request, folder, listener, opener)
    ranks = _Ranks(agreement, worker, folder)
    outcomes = ranks.run()
    if agreement.world.rank > 0:
        return EvalResult(summary={}, folder=folder, plan=outcomes[agreement.world.rank].plan, samples=())
    return ranks.finish(outcomes, started_at)


def run_subject(request: EvalRequest, subject: Subject, folder: Path, listener: EvalListener) -> dict[str, Any]:
    """Evaluate what is loaded already, in this process alone, and give the summary; for comparisons."""
    lines: Lines = []
    with Worker(request, subject, listener, monitor=folder / "monitor.csv") as worker:
        items = range(len(subject.costs))
        listener.started(len(items), 0)
        outcome = worker.run(items, lines.extend)
    return summarise(worker.scorer.ordered(lines), worker.scorer, [outcome])


class _Ranks:
    """One rank's part of a run, and how it meets the others'. Alone it is the whole."""

    def __init__(self, agreement: Agreement, worker: Worker, folder: Path) -> None:
        self.agreement = agreement
        self.world = agreement.world
        self.worker = worker
        self.request = worker.request
        self.subject = worker.subject
        self.scorer = worker.scorer
        self.listener = worker.listener
        self.facts = worker.subject.facts()
        self.folder = folder
        self.journals = Journals(
            folder, fingerprint=self.facts.fingerprint, rank=self.world.rank, ranks=self.world.size
        )

    def run(self) -> list[RankFigures]:
        """Do this rank's samples, wait for the others', and give what every rank counted."""
        self.listener.opened(self.facts)
        items = self._deal()

        def record(lines: Lines) -> None:
            self.journals.append(lines)
            self.agreement.check()

        def work() -> dict[str, Any]:
            with self.journals, self.worker:
                try:
                    return self.worker.run(items, record).to_json()
                except Exception as error:
                    if self.world.size == 1 or not self.request.fail_fast or isinstance(error, BrimError):
                        raise
                    raise RequestError(
                        f"{named('fail_fast')}: a sample failed with {type(error).__name__}: {error}"
                    ) from error

        # After this no rank writes any more: each has closed its journal.
        outcomes = [RankFigures.from_json(outcome) for outcome in self.agreement.run_on_all(work)]
        if self.world.rank in plans_to_keep(outcomes):
            self.worker.remember_plan()
        return outcomes

    def finish(self, outcomes: Sequence[RankFigures], started_at: datetime.datetime) -> EvalResult:
        """Merge the ranks' journals and write the record."""
        entries = self.scorer.ordered(self.journals.merged())
        self.journals.finalise(entries)
        summary = summarise(entries, self.scorer, outcomes, bad=len(self.subject.data.bad))
        for rank, outcome in enumerate(outcomes):
            for note in outcome.notes if rank != self.world.rank else ():
                if note not in outcomes[self.world.rank].notes:
                    self.listener.note(f"rank {rank}: {note}")
        return write_record(self.folder, self.request, self.facts, entries, summary, outcomes, started_at)

    def _deal(self) -> list[int]:
        """This rank's samples: rank 0 says which are left, and all deal them in the same way."""

        def earlier() -> list[int] | None:
            if self.world.rank > 0:
                return None
            before = self.journals.gather_earlier(resume=self.request.resume, drop_failed=self.request.retry_failed)
            for note in self.journals.notes:
                self.listener.note(note)
            done = {item for entry in before if (item := self.scorer.item_of(entry)) is not None}
            return [item for item in range(len(self.subject.costs)) if item not in done]

        left = self.agreement.run_on_all(earlier)[0]
        assert left is not None
        done = len(self.subject.costs) - len(left)
        share = deal(left, self.subject.costs, self.world.size)[self.world.rank]
        if self.world.size == 1:
            self.listener.started(len(share) + done, done)
        else:
            self.listener.started(len(share), 0)
            before = f" ({done:,} were done already)" if done else ""
            line = f"{self.world.size} ranks; this one has {len(share):,} of {len(left):,} samples{before}"
            self.listener.note(line)
        return share


def write_record(
    folder: Path,
    request: EvalRequest,
    facts: SubjectFacts,
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


def _open_everywhere(
    agreement: Agreement, request: EvalRequest, folder: Path, listener: EvalListener, opener: WorkerOpener
) -> Worker:
    """Model and data on every rank, the same on all, or the same error on all; nothing has been written yet."""
    rank = agreement.world.rank
    monitor = folder / ("monitor.csv" if rank == 0 else f"monitor.rank-{rank}.csv")
    opened: list[Worker] = []

    def open_here() -> str:
        opened.append(opener(request, listener, monitor))
        return opened[0].subject.fingerprint()

    prints = agreement.run_on_all(open_here)
    for number, other in enumerate(prints):
        if other != prints[0]:
            parts = " and ".join(differing_parts(prints[0], other))
            raise RequestError(f"rank {number} does not have the same {parts} as rank 0: give all ranks the same files")
    return opened[0]
