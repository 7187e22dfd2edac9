"""One evaluation: every sample once, journalled as it comes, summed up at the end.

The flow is that of the design: request → subject → sizing → executor → journal → summary. Ranks deal the samples among
themselves by cost and each keeps a journal of its own; rank 0 merges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import DoesNotFitError
from brim.evaluate.deal import deal
from brim.evaluate.gpu_clock import GpuClock
from brim.evaluate.journals import Journals
from brim.evaluate.listener import EvalListener
from brim.evaluate.offload import Offload
from brim.evaluate.request import EvalRequest
from brim.evaluate.scoring import Scorer
from brim.evaluate.sizing import Sizing
from brim.evaluate.subject import Subject, open_subject
from brim.evaluate.summary import RankFigures, summarise
from brim.execute.executor import Done, Executor, ItemFailure, Pending
from brim.execute.loader import Loader, LoaderSettings, NotPrepared
from brim.memory.devices import DeviceMemory, memory_of
from brim.memory.limit import resolve_limit
from brim.memory.remedies import memory_remedies
from brim.monitor.sampler import Sampler
from brim.ranks.agreement import Agreement
from brim.ranks.world import World, current_world
from brim.records import Plan
from brim.search.environment import environment_facts
from brim.storage.run_folder import check_folder, write_run

__all__ = ["EvalResult", "evaluate", "run_subject"]


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
    """Evaluate, and leave the run's folder behind; on every rank but 0 the result has this rank's samples only."""
    listener = listener or EvalListener()
    world = current_world()
    with Agreement() as agreement:
        default = Path("runs") / f"eval-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        folder = output if output is not None else agreement.run_on_all(lambda: default)[0]
        check_folder(folder)
        started_at = datetime.datetime.now(datetime.UTC)
        subject = open_subject(request)
        listener.opened(subject)
        evaluation = _Evaluation(request, subject, folder, world, listener)
        outcome = evaluation.run()
        outcomes = agreement.run_on_all(lambda: outcome)
        if world.rank > 0:
            return EvalResult(summary={}, folder=folder, plan=outcome.plan, samples=())
        return evaluation.finish(outcomes, started_at)


def run_subject(request: EvalRequest, subject: Subject, folder: Path, listener: EvalListener) -> dict[str, Any]:
    """Evaluate what is loaded already, in this process alone, and give the summary; for comparisons."""
    evaluation = _Evaluation(request, subject, folder, World(0, 1, 0), listener)
    outcome = evaluation.run()
    subject.task.release()
    evaluation.memory.release()
    return summarise(evaluation.journals.merged(), evaluation.scorer, [outcome])


class _Evaluation:
    """One rank's part of a run."""

    def __init__(
        self, request: EvalRequest, subject: Subject, folder: Path, world: World, listener: EvalListener
    ) -> None:
        self.request = request
        self.subject = subject
        self.folder = folder
        self.world = world
        self.listener = listener
        self.scorer = Scorer(subject.task, subject.metrics)
        self.memory: DeviceMemory = memory_of(subject.device)
        limit = resolve_limit(self.memory, asked_bytes=request.memory_limit_bytes, margin=request.margin)
        self.sizing = Sizing(request=request, subject=subject, memory=self.memory, limit_bytes=limit.usable_bytes)
        self.clock = GpuClock(subject.device)
        self.journals = Journals(folder, world, fingerprint=subject.fingerprint(), resume=request.resume)
        self.offload = Offload(request, subject, self._tell)
        self.told: list[str] = []

    def run(self) -> RankFigures:
        """Do this rank's samples."""
        request, subject = self.request, self.subject
        with contextlib.ExitStack() as stack:
            before = stack.enter_context(self.journals)
            done = {item for entry in before if (item := self.scorer.item_of(entry)) is not None}
            left = [item for item in range(len(subject.costs)) if item not in done]
            items = deal(left, subject.costs, self.world)
            self.listener.started(len(items) + (len(done) if self.world.size == 1 else 0), len(done))
            name = "monitor.csv" if self.world.rank == 0 else f"monitor.rank-{self.world.rank}.csv"
            sampler = stack.enter_context(Sampler(self.folder / name, device_uuid=_uuid(subject.device)))
            if request.memory_limit is not None or request.margin is not None:
                stack.enter_context(self.memory.limited(self.sizing.limit_bytes))
            settings = LoaderSettings(
                num_workers=request.num_workers, pin_memory=request.pin_memory, prefetch_factor=request.prefetch_factor
            )
            pin = subject.device.type == "cuda"
            loader = stack.enter_context(Loader(subject.task.prepare, items, settings, pin=pin))
            governor, cached = self.sizing.governor(items)
            executor = self._executor(loader, governor)
            started = time.perf_counter()
            executor.run(items)
            seconds = time.perf_counter() - started
            monitor = sampler.summary()
        for note in (*loader.notes, *subject.task.notes, *subject.model.notes):
            self._tell(note)
        figures = executor.figures
        plan = self.sizing.plan(
            governor, figures.largest_padded_cost, figures.peak_reserved_bytes or None, cached is not None
        )
        if figures.batches > 1:
            self.sizing.remember(plan)
        return RankFigures(
            figures=figures,
            seconds=seconds,
            resumed=len(done),
            plan=plan,
            wait_fraction=self.clock.wait_fraction(),
            loader_wait_seconds=loader.wait_seconds,
            workers=loader.workers or 0,
            monitor=monitor,
            measured=self._measured(),
            notes=tuple(dict.fromkeys(self.told)),
        )

    def finish(self, outcomes: Sequence[RankFigures], started_at: datetime.datetime) -> EvalResult:
        """Merge the ranks, write the record, and say what the run came to."""
        entries = self.scorer.ordered(self.journals.merged())
        self.journals.finalise(entries)
        notes = tuple(dict.fromkeys(note for outcome in outcomes for note in outcome.notes))
        summary = summarise(entries, self.scorer, outcomes, bad=len(self.subject.data.bad))
        plan = outcomes[0].plan
        write_run(
            self.folder,
            kind="eval",
            request={**self.request.to_json(), "command": "eval", "task": self.subject.task.name},
            environment=environment_facts(self.subject.device),
            plan=plan.to_json(),
            summary={**summary, "notes": list(notes), "fingerprint": self.subject.fingerprint()},
            started_at=started_at,
        )
        result = EvalResult(summary=summary, folder=self.folder, plan=plan, samples=tuple(entries), notes=notes)
        self._refuse_if_nothing_fits(entries)
        return result

    def _executor(self, loader: Loader, governor: Any) -> Executor:
        def record(batch: list[Done]) -> None:
            self.journals.append(self.scorer.entry(done) for done in batch)
            loader.done([done.item for done in batch])
            reserved = executor.figures.peak_reserved_bytes or None
            self.listener.batch(executor.figures, cap=governor.cap, reserved_bytes=reserved)

        executor = Executor(
            lambda batch: self._launch(loader, batch),
            self.subject.costs,
            governor=governor,
            record=record,
            memory=self.memory,
            metered=self._measured(),
            fail_fast=self.request.fail_fast,
            fail_on_oom=self.request.fail_on_oom,
            by_count=self.sizing.by_count,
            tell=self._tell,
            last_resort=self.offload.apply,
        )
        return executor

    def _launch(self, loader: Loader, items: list[int]) -> Pending:
        """Start a batch; what could not be prepared is set aside, and the rest runs without it."""
        prepared = loader.take(items)
        good = [place for place, one in enumerate(prepared) if not isinstance(one, NotPrepared)]
        self.clock.begin()
        pending: Pending | None = None
        if good:
            pending = self.subject.task.launch([items[place] for place in good], [prepared[place] for place in good])
        self.clock.end()
        return _WithFailures(pending, prepared)

    def _measured(self) -> bool:
        """Peaks are taken where that costs nothing, or where a limit is to be kept."""
        return not self.memory.meter_slows or self.request.memory_limit is not None

    def _tell(self, line: str) -> None:
        if line not in self.told:
            self.told.append(line)
            self.listener.note(line)

    def _refuse_if_nothing_fits(self, entries: Sequence[Mapping[str, Any]]) -> None:
        reasons = {(entry["error"] or {}).get("reason") for entry in entries}
        if reasons != {"out_of_memory"}:
            return
        mode = "generate" if self.subject.task.unit == "tokens" else "forward"
        remedies = "\n  - ".join(memory_remedies(mode))
        raise DoesNotFitError(
            f"no sample fits, even alone ({entries[0]['error']['message']}).\nWhat may help:\n  - {remedies}\n"
            f"The record is in {self.folder}"
        )


class _WithFailures(Pending):
    """A batch whose unprepared samples are failures, in their places among the answers."""

    def __init__(self, pending: Pending | None, prepared: Sequence[Any]) -> None:
        self._pending = pending
        self._prepared = prepared

    def result(self) -> list[Any]:
        """One answer or failure per sample."""
        answers = iter(self._pending.result() if self._pending is not None else ())
        return [
            ItemFailure(reason="error", message=one.message) if isinstance(one, NotPrepared) else next(answers)
            for one in self._prepared
        ]


def _uuid(device: Any) -> str | None:
    if device.type != "cuda":
        return None
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "")
    return f"GPU-{uuid}" if uuid else None
