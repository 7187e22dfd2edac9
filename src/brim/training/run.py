"""One training run, from a request to its record: on this process alone, or as one of torchrun's ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from brim.errors import RankError, RequestError
from brim.memory.devices import as_current, device_uuid
from brim.monitor.live import LiveRun, both
from brim.monitor.loggers.loggers import check_loggers, open_loggers
from brim.monitor.sampler import Sampler
from brim.ranks.agreement import Agreement, Vote, check_same_work, shared_folder, stop_signal_as_error
from brim.ranks.gradients import RankGroup, shard_model
from brim.records import Plan
from brim.running.loader import LoaderSettings
from brim.settings.caller import given, named, resume_with
from brim.settings.setting_checks import MOST_SEED
from brim.settings.train_request import TrainRequest
from brim.storage.files import read_json
from brim.storage.fingerprint import combined_fingerprint, differing_parts
from brim.storage.run_folder import check_no_other_run
from brim.training.assembly import RunContext, TrainerParts
from brim.training.checkpoint import find_checkpoint
from brim.training.effective_batch import EarlierSizes, EffectiveBatch, choose_effective_batch, training_plan
from brim.training.epoch_loader import EpochLoader, start_loading
from brim.training.listener import TrainListener, interrupt_as_request
from brim.training.live_figures import LiveTraining, LoggedTraining
from brim.training.loop import Progress, epoch_rules
from brim.training.run_files import read_steps, write_record
from brim.training.setup import TrainingSetup, open_setup
from brim.training.summary import RankReport, summarise
from brim.training.trainer import Trainer

__all__ = ["SEVERAL", "TrainResult", "run_fingerprint", "run_training"]

VOTE_SECONDS = 1800.0  # a rank may run a window again, or write a checkpoint, while the others wait
SEVERAL = "runs.json"  # in the folder of a training of several seeds: which ones, and where each lies
CONFIRMED_STEPS = 2  # optimizer steps after which everything that takes memory is there


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a training run; on every rank but 0 the summary is empty."""

    summary: dict[str, Any]
    folder: Path
    plan: Plan | None
    epochs: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()  # of several runs, those that failed, each with its reason

    @property
    def metrics(self) -> dict[str, Any]:
        """Every figure of the best epoch with mean, deviation and each seed's value."""
        metrics: dict[str, Any] = self.summary["metrics"]
        return metrics


def run_training(
    request: TrainRequest,
    *,
    output: Path | None = None,
    listener: TrainListener | None = None,
    notes_resume: bool = True,
    log: Sequence[str] = (),
) -> TrainResult:
    """Train one seed, and leave the run's folder behind; an interrupted run notes how to resume it."""
    started_at = datetime.datetime.now(datetime.UTC)
    watcher = listener or TrainListener()

    def check(folder: Path) -> None:
        _check_contents(folder, resume=request.resume)
        check_loggers(log, folder)

    with (
        Agreement(timeout_seconds=VOTE_SECONDS, purpose="training") as agreement,
        shared_folder(agreement, output, command="train", check=check, note=watcher.note) as folder,
        LiveRun(folder, "train", publishes=agreement.world.rank == 0) as live,
        open_loggers(log if agreement.world.rank == 0 else (), folder, watcher.note) as loggers,
        loggers.open_run(folder.absolute().name, request.to_json()) as run,
    ):
        live.update(rank_pids=agreement.processes_here())
        published = both(TrainListener, both(TrainListener, LiveTraining(live), LoggedTraining(run)), watcher)
        try:
            with stop_signal_as_error(agreement):
                result = _TrainingRun(request, agreement, folder, published, started_at).run()
                run.summary = result.summary
                return result
        except (KeyboardInterrupt, RankError) as error:
            line = resume_with(folder)
            if find_checkpoint(folder) is None:
                raise
            if isinstance(error, RankError):
                if error.exit_code == RankError.exit_code:
                    error.args = (f"{error}\nThe last checkpoint is kept: continue with {line}",)
            elif agreement.world.rank == 0 and notes_resume:
                watcher.note(f"a checkpoint is kept: continue with {line}")
            raise


class _TrainingRun:
    """One rank's part of a run."""

    def __init__(
        self,
        request: TrainRequest,
        agreement: Agreement,
        folder: Path,
        listener: TrainListener,
        started_at: datetime.datetime,
    ) -> None:
        self.request = request
        self.agreement = agreement
        self.world = agreement.world
        self.folder = folder
        self.listener = listener
        self.started_at = started_at
        self.sharded = request.settings.training.fsdp and self.world.size > 1
        self.resumed_after = 0  # the step of the checkpoint that this start continues from

    def run(self) -> TrainResult:
        """Open, train, report."""
        subject, fingerprint = self._open()
        own_seed = (self.request.settings.hp.seed + self.world.rank) % (MOST_SEED + 1)
        torch.manual_seed(own_seed)  # dropout: not the same on every rank
        monitor = self.folder / ("monitor.csv" if self.world.rank == 0 else f"monitor.rank-{self.world.rank}.csv")
        with (
            as_current(subject.device),
            interrupt_as_request(self.listener.note) as interrupt,
            self._loading(subject) as loader,
        ):
            context = RunContext(
                folder=self.folder,
                agreement=self.agreement,
                group=self._join(subject),
                listener=self.listener,
                interrupt=interrupt,
                fingerprint=fingerprint,
                sharded=self.sharded,
                loader=loader,
            )
            parts = TrainerParts(subject, self.request, context)
            trainer = self._resumed(parts)
            self._announce(parts)
            self.listener.ready(lambda: _live_figures(parts, loader))
            with self._limited(parts), Sampler(monitor, device_uuid=device_uuid(subject.device)) as sampler:
                try:
                    self._train(trainer)
                finally:
                    parts.files.close()
        with self.agreement.step(RankReport) as step:
            step.value = self._report(parts, loader, sampler)
        ranks = step.values
        if self.world.rank > 0:
            return TrainResult(summary={}, folder=self.folder, plan=ranks[self.world.rank].plan)
        sizes = parts.sizes
        if sizes.request.ceiling is None and sizes.settled and sizes.lengths:  # found, on a run that was long enough
            parts.plans.save(ranks[0].plan)
        return self._record(parts, ranks)

    def _train(self, trainer: Trainer) -> None:
        """To the end; an error on this rank alone reaches the others at their next vote."""
        try:
            trainer.run()
        except RankError:
            raise
        except Exception as error:
            self.agreement.gather(Vote(error=error))

    def _open(self) -> tuple[TrainingSetup, str]:
        """Model and data on every rank, the same on all, or the same error on all; nothing has been written yet."""
        with self.agreement.step(str) as step:
            subject = open_setup(self.request.settings)
            step.value = run_fingerprint(subject, self.request, ranks=self.world.size)
        check_same_work(step.values)
        return subject, step.values[0]

    @contextlib.contextmanager
    def _loading(self, subject: TrainingSetup) -> Iterator[EpochLoader | None]:
        """Processes that prepare the first samples while the rest of the run is put together; they end with it."""
        settings, data = self.request.settings, subject.data
        validates = data.validation is not None and self.request.validate
        checkpoint = find_checkpoint(self.folder) if self.request.resume else None
        with self.agreement.step(bool):
            stored: Any = None if checkpoint is None else read_json(checkpoint / "state.json")
            progress = Progress.from_json(stored.get("progress", {}) if isinstance(stored, dict) else {})
            batch = _chosen_batch(subject, self.request, ranks=self.world.size)
            loader = start_loading(
                data,
                epoch_rules(settings, subject.objective, validated=validates),
                LoaderSettings(num_workers=settings.data.num_workers, ahead=math.ceil(batch.batch / self.world.size)),
                seed=settings.hp.seed,
                place=(progress.epoch, progress.position),
                world=self.world,
                validates=validates and not self.sharded,
                device=subject.device,
                note=self.listener.note,
            )
        try:
            yield loader
        finally:
            if loader is not None:
                loader.close()

    def _join(self, subject: TrainingSetup) -> RankGroup:
        group = RankGroup(subject.device)
        if not self.sharded:
            group.prepare([parameter for parameter in subject.model.parameters() if parameter.requires_grad])
        group.copy_from_first([*subject.model.parameters(), *subject.model.buffers()])
        if self.sharded:
            shard_model(subject.model, subject.device)
        return group

    def _resumed(self, parts: TrainerParts) -> Trainer:
        """A trainer at the first step or, on `resume`, where the checkpoint in the folder is."""
        with self.agreement.step(int) as step:
            checkpoint = find_checkpoint(self.folder) if self.request.resume else None
            if checkpoint is not None:
                self._check_checkpoint(checkpoint, parts)
                parts.resume(checkpoint)
            step.value = parts.progress.step
        steps = step.values
        if len(set(steps)) > 1:
            found = ", ".join(f"rank {rank} step {step}" for rank, step in enumerate(steps))
            raise RequestError(
                f"{named('resume')}: the ranks find different checkpoints in {self.folder} ({found}); share the folder"
            )
        self.resumed_after = steps[0]
        later = parts.files.open(keep_steps=parts.progress.step)
        replay = {line["step"]: line["micro_batches"] for line in later} if self.world.size == 1 else None
        return Trainer(parts, replay=replay)

    def _check_checkpoint(self, checkpoint: Path, parts: TrainerParts) -> None:
        stored: Any = read_json(checkpoint / "state.json") or {}
        fingerprint, monitor = parts.context.fingerprint, parts.rules.monitor
        if stored.get("fingerprint") != fingerprint:
            what = " and ".join(differing_parts(str(stored.get("fingerprint")), fingerprint)) or "content"
            raise RequestError(
                f"{named('resume')}: {checkpoint} was written for another {what}; resume with the file that it was "
                "started with, or choose another folder"
            )
        before = stored.get("monitor", monitor)  # older checkpoints lack it
        if before != monitor:
            raise RequestError(
                f"{named('resume')}: the best epoch so far is that by {before}, and cannot be compared by {monitor}; "
                f"leave training.monitor {before}, or choose another folder"
            )

    @contextlib.contextmanager
    def _limited(self, parts: TrainerParts) -> Iterator[None]:
        if not self.request.limited:
            yield
            return
        with parts.memory.limited(parts.limit_bytes):
            yield

    def _announce(self, parts: TrainerParts) -> None:
        subject, progress = parts.subject, parts.progress
        self.listener.opened(
            subject.facts(
                epochs=self.request.settings.hp.epochs,
                effective_batch=parts.adaptive.effective_batch,
                learning_rate=parts.adaptive.rate.request.learning_rate * parts.adaptive.rate.factor,
                ranks=self.world.size,
            )
        )
        for note in parts.notes:
            self.listener.note(note)
        if progress.step:
            self.listener.note(f"resumed after step {progress.step} (epoch {progress.epoch + 1})")

    def _report(self, parts: TrainerParts, loader: EpochLoader | None, sampler: Sampler) -> RankReport:
        sizes, peak, validation = parts.sizes, parts.micro.meter.peak, parts.validation
        if loader is not None:
            loader.close()  # it notes what became of its processes
        plan = training_plan(
            parts.plans,
            sizes,
            peak_bytes=peak.peak_reserved_bytes or None,
            cached=parts.plan_known is not None,
            confirmed=parts.progress.step >= CONFIRMED_STEPS,
            share=parts.share,
        )
        eval_batch = None
        if validation is not None:
            counts = validation.batch_sizes
            eval_batch = max(counts) if counts else validation.sizer.kept
        return RankReport(
            plan=plan,
            sizes=sizes.sizes_used(),
            oom_events=sizes.oom_events,
            eval_batch_size=eval_batch,
            eval_oom_events=0 if validation is None else validation.oom_events,
            eval_seconds=0.0 if validation is None else validation.seconds,
            peak_allocated_bytes=peak.peak_allocated_bytes or None,
            peak_reserved_bytes=peak.peak_reserved_bytes or None,
            alloc_retries=peak.alloc_retries,
            loader_wait_seconds=loader.wait_seconds if loader is not None else 0.0,
            workers=loader.workers if loader is not None else 0,
            skipped_steps=parts.stepper.skipped,
            monitor=sampler.summary(),
            checkpoint_seconds=parts.files.checkpoint_seconds,
            wait_fractions=parts.waits.fractions(),
            notes=(*parts.notes, *(loader.notes if loader is not None else ())),
        )

    def _record(self, parts: TrainerParts, ranks: list[RankReport]) -> TrainResult:
        """Sum up and write run.json."""
        notes = tuple(dict.fromkeys(note for rank in ranks for note in rank.notes))
        summary = summarise(
            parts.progress,
            ranks,
            steps=read_steps(self.folder / "steps.jsonl"),
            effective_batch=parts.adaptive.effective_batch,
            learning_rate=parts.adaptive.rate_facts(),
            noise=parts.adaptive.noise.report(),
            seed=self.request.settings.hp.seed,
            resumed_after=self.resumed_after,
        )
        plan = ranks[0].plan
        if len(ranks) > 1:
            plan = dataclasses.replace(plan, batch_sizes_per_rank=tuple(rank.plan.size for rank in ranks))
        subject = parts.subject
        write_record(
            self.folder,
            {**self.request.to_json(), "task": subject.objective.task},
            device=subject.device,
            plan=plan.to_json(),
            summary={**summary, "notes": list(notes), "fingerprint": parts.context.fingerprint},
            started_at=self.started_at,
        )
        return TrainResult(
            summary=summary,
            folder=self.folder,
            plan=plan,
            epochs=tuple(parts.progress.rows),
            notes=notes,
        )


def _live_figures(parts: TrainerParts, loader: EpochLoader | None) -> dict[str, Any]:
    """What the loop does not report by itself; plain values that are there already."""
    sizes = parts.sizes
    if sizes.request.ceiling is not None:
        found = "given"
    elif parts.plan_known is not None:
        found = "from a cached plan"
    else:
        found = "found on this run" if sizes.settled else "searching"
    return {
        "batch_size_found": found,
        "wait_seconds": None if loader is None else loader.wait_seconds,
        "gpu_wait_fraction": parts.waits.fraction(),
        "gpu_wait_causes": parts.waits.fractions(),
        "peak_reserved_bytes": parts.micro.meter.peak.peak_reserved_bytes or None,
    }


def run_fingerprint(subject: TrainingSetup, request: TrainRequest, *, ranks: int = 1) -> str:
    """What a resumed run must share: model, data, settings, and the effective batch, however that was asked for."""
    effective = _chosen_batch(subject, request, ranks=ranks)
    return combined_fingerprint({**subject.identity(), "batch": effective.identity()})


def _chosen_batch(subject: TrainingSetup, request: TrainRequest, *, ranks: int) -> EffectiveBatch:
    """The effective batch that the request asks for."""
    earlier = EarlierSizes.read(request.plan) if request.plan is not None else None
    return choose_effective_batch(request.settings, samples=len(subject.data.train), ranks=ranks, earlier=earlier)


def _check_contents(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that holds another run, or this one without `resume`, or nothing to resume. Reads no model."""
    check_no_other_run(folder, "train")
    if (folder / SEVERAL).exists():
        raise RequestError(
            f"{given('output', folder)}: it holds a run of several seeds; continue it with {named('seeds')} and "
            f"{named('resume')}, or choose "
            "another folder"
        )
    checkpoint = find_checkpoint(folder)
    if resume and checkpoint is None and not (folder / "steps.jsonl").exists():
        raise RequestError(f"{named('resume')}: there is no run in {folder}; give the folder of the run with -o")
    if not resume and (checkpoint is not None or (folder / "run.json").exists()):
        raise RequestError(
            f"{given('output', folder)}: it holds a run; continue it with {named('resume')}, or choose another folder"
        )
