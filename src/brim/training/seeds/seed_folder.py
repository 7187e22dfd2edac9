"""The folder of one run of several: written as the loop writes its own, read back when a training is resumed."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.memory.devices import device_name, memory_of, resolve_limit
from brim.monitor.sampler import MonitorSummary
from brim.records import BatchSizes, MemoryFigures, Plan
from brim.settings.caller import named
from brim.settings.train_request import TrainRequest
from brim.storage.files import csv_text, read_json, write_atomic
from brim.storage.fingerprint import differing_parts
from brim.training.checkpoint import save_weights
from brim.training.listener import StepRecord
from brim.training.loop import Window, next_window
from brim.training.run import run_fingerprint
from brim.training.run_files import write_record, write_steps
from brim.training.seeds.stacked import TrainedStack
from brim.training.seeds.suitability import StackSetup
from brim.training.seeds.variants import Variant
from brim.training.summary import RankReport, summarise

__all__ = ["RunRecord", "check_same", "loop_record", "read_finished", "write_stack"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The result of one run: its summary and its epochs, or its error."""

    variant: Variant
    folder: Path
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None

    def steps(self) -> Iterator[dict[str, Any]]:
        """Every step, from its file, one by one: many runs may have many."""
        with (self.folder / "steps.jsonl").open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def read_finished(folder: Path, variant: Variant, request: TrainRequest) -> RunRecord | None:
    """A run that an earlier start has finished, with as many epochs as are asked for now; None where there is none.

    One with other settings is a `RequestError`: its figures do not belong among these.
    """
    path = folder / variant.name
    record: Any = read_json(path / "run.json")
    if not isinstance(record, dict) or record.get("kind") != "train":
        return None
    then, now = (
        _settings_that_count(record["request"]["settings"]),
        _settings_that_count(variant.settings(request.settings).to_json()),
    )
    differing = [name for name in now if name not in _LENGTH and then.get(name) != now[name]]
    if differing:
        raise _other(path, " and ".join(differing))
    return _record(path, variant, record) if then == now else None


_LENGTH = ("hp.epochs", "hp.max_steps", "training.early_stopping")  # a run may continue with more
_NOT_THE_RESULT = ("hp.batch_size", "data.num_workers")


def _settings_that_count(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys; of `training` only what changes what is learnt, or for how long."""
    found = {
        f"{section}.{name}": value
        for section in ("model", "data", "hp", "optimizer", "scheduler")
        for name, value in settings[section].items()
    }
    kept = ("gradient_clip", "lr_scale", "scale_betas", "fsdp", "dtype", "early_stopping", "monitor", "eval_every",
            "early_stopping_min_delta")  # fmt: skip
    found |= {f"training.{name}": settings["training"].get(name) for name in kept}
    if settings["hp"].get("effective_batch") is None and settings["hp"].get("batch_size") != "auto":
        found["hp.effective_batch"] = settings["hp"]["batch_size"]
    return {"task": settings.get("task")} | {
        name: value for name, value in found.items() if name not in _NOT_THE_RESULT
    }


def check_same(record: RunRecord, fingerprint: str) -> None:
    """A finished run of another model, data or settings is not counted among these."""
    stored = str(record.summary.get("fingerprint"))
    if stored != fingerprint:
        raise _other(record.folder, " and ".join(differing_parts(stored, fingerprint)) or "content")


def _other(folder: Path, what: str) -> RequestError:
    return RequestError(
        f"{named('resume')}: {folder} was trained with another {what}; resume with the file that it was started with, "
        "or "
        "choose another folder"
    )


def write_stack(
    done: TrainedStack, setup: StackSetup, folder: Path, *, started_at: datetime.datetime, monitor: MonitorSummary
) -> list[RunRecord]:
    """Write the folders of runs that were trained together; a run that failed has no run.json."""
    places = range(len(done.variants))
    return [_RunFolderWriter(done, place, setup, folder).keep(started_at, monitor) for place in places]


class _RunFolderWriter:
    """Writes one run of a stack."""

    def __init__(self, done: TrainedStack, place: int, setup: StackSetup, folder: Path) -> None:
        self.done, self.place, self.setup = done, place, setup
        self.variant, self.outcome = done.variants[place], done.outcomes[place]
        self.request = self.variant.request(setup.request)
        self.subject = dataclasses.replace(setup.subject, settings=self.request.settings)
        self.folder = folder / self.variant.name

    def keep(self, started_at: datetime.datetime, monitor: MonitorSummary) -> RunRecord:
        self.folder.mkdir(parents=True, exist_ok=True)
        progress, lines = self.outcome.progress, list(self._step_lines())
        write_steps(self.folder, lines)
        write_atomic(self.folder / "epochs.csv", csv_text(progress.rows))
        for which, weights in (("best", self.outcome.weights), ("last", self.outcome.last_weights)):
            if weights:
                save_weights(self.folder / f"weights-{which}.safetensors", weights)
        rows = tuple(progress.rows)
        if self.outcome.error is not None:
            return RunRecord(variant=self.variant, folder=self.folder, rows=rows, error=self.outcome.error)
        trained, plan = self.done.trained, self._plan()
        summary = summarise(
            progress,
            [self._report(plan, monitor)],
            steps=lines,
            effective_batch=self.setup.effective.batch,
            learning_rate=self.setup.tables[self.variant.learning_rate].facts,
            noise=None,
            seed=self.variant.seed,
            fast_path=trained.path,
        ) | {
            "fast_path_choice": trained.path_to_json(),
            "notes": list(trained.notes),
            "fingerprint": run_fingerprint(self.subject, self.request),
        }
        write_record(
            self.folder,
            {**self.request.to_json(), "task": self.subject.objective.task, "fast_path": self.setup.request.fast_path},
            device=self.subject.device,
            plan=plan.to_json(),
            summary=summary,
            started_at=started_at,
        )
        return RunRecord(variant=self.variant, folder=self.folder, summary=summary, plan=plan.to_json(), rows=rows)

    def _step_lines(self) -> Iterator[dict[str, Any]]:
        """Every step as the loop's steps.jsonl has it; its seconds are an even share of the epoch's."""
        count, batch = len(self.subject.data.train), self.setup.effective.batch
        rates, step, samples = self.setup.tables[self.variant.learning_rate].rates, 0, 0
        for row, losses in zip(self.outcome.progress.rows, self.outcome.step_losses, strict=True):
            window, seconds = Window(start=0, stop=0), row["seconds"] / len(losses)
            for loss in losses.tolist():
                window = next_window(window.stop, count, batch)
                step, samples = step + 1, samples + window.samples
                yield StepRecord(
                    step=step, epoch=row["epoch"], samples=samples, loss=loss, learning_rate=rates[step - 1],
                    effective_batch=window.samples, micro_batches=(window.samples,), seconds=seconds,
                ).to_json()  # fmt: skip

    def _plan(self) -> Plan:
        trained, training = self.done.trained, self.request.settings.training
        memory = memory_of(self.subject.device)
        limit = resolve_limit(memory, asked_bytes=self.request.memory_limit_bytes, margin=training.margin)
        peak = trained.peak_reserved_bytes
        return Plan(
            unit="samples",
            size=trained.micro_batch_size,
            batch_size_max=trained.micro_batch_size,
            batch_size_max_estimate=None,
            objective="fastest",
            reason="the whole effective batch in one pass" if trained.accumulation_steps == 1 else "what fits",
            cached=False,
            device=device_name(memory.device),
            memory=MemoryFigures(
                limit_bytes=limit.usable_bytes,
                headroom_bytes=None if peak is None else limit.usable_bytes - peak,
            ),
            probes=(),
        )

    def _report(self, plan: Plan, monitor: MonitorSummary) -> RankReport:
        done, trained = self.done, self.done.trained
        size = trained.micro_batch_size
        return RankReport(
            plan=plan,
            sizes=BatchSizes(smallest=size, median=size, largest=size),
            oom_events=done.oom_events if self.place == 0 else 0,  # of the stack: counted once
            eval_batch_size=done.eval_batch_size,
            eval_oom_events=0,
            eval_seconds=trained.validation_seconds / len(done.variants),
            peak_allocated_bytes=trained.peak_allocated_bytes,
            peak_reserved_bytes=trained.peak_reserved_bytes,
            alloc_retries=done.alloc_retries if self.place == 0 else 0,
            loader_wait_seconds=0.0,
            workers=0,
            skipped_steps=self.outcome.skipped_steps,
            monitor=monitor,
        )


def loop_record(folder: Path, variant: Variant) -> RunRecord:
    """A run that the loop has just finished."""
    record: Any = read_json(folder / variant.name / "run.json")
    return _record(folder / variant.name, variant, record)


def _record(path: Path, variant: Variant, record: Mapping[str, Any]) -> RunRecord:
    return RunRecord(
        variant=variant, folder=path, summary=record["summary"], plan=record.get("plan"), rows=tuple(_epochs(path))
    )


def _epochs(path: Path) -> list[dict[str, Any]]:
    """The rows of epochs.csv with numbers again; an empty cell is None."""
    try:
        with (path / "epochs.csv").open(encoding="utf-8", newline="") as file:
            return [{name: _number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    except OSError:
        return []


def _number(cell: str | None) -> float | int | None:
    if not cell:
        return None
    try:
        return int(cell)
    except ValueError:
        return float(cell)
