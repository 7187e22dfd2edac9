"""The loop: windows, optimizer steps, epochs. What one rank does, from where it stands to the end.

A step: this rank's share of the window in micro-batches (alone), a vote, one sum over the ranks, the optimizer. An
epoch: its windows, the ranks' buffers made one, validation, weights and checkpoint. The loss of a step is read one step
later, so that the device is never waited for; checkpoints are written only when every loss up to them is known.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from brim.ranks.agreement import Agreement, Vote
from brim.ranks.gradients import RankGroup
from brim.running.loader import LoaderSettings
from brim.training.adaptive import Adaptive
from brim.training.bad_loss import refuse_loss
from brim.training.epoch_loader import EpochLoader
from brim.training.interrupt import Interrupt
from brim.training.items import Items
from brim.training.listener import StepRecord, TrainListener
from brim.training.micro_batches import MicroBatches, WindowDone, WindowWork
from brim.training.optimizers import OptimizerStep, WindowSums
from brim.training.progress import Progress
from brim.training.run_files import RunFiles
from brim.training.shares import Shares
from brim.training.validation import Validation
from brim.training.windows import Window, epoch_order, next_window

__all__ = ["LoopSettings", "Trainer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long, and when what is done beside the steps."""

    epochs: int
    seed: int
    max_steps: int | None = None
    checkpoint_every: int | None = None
    eval_every: int = 1
    monitor: str = "loss"
    higher_is_better: bool = False
    early_stopping: int | None = None
    early_stopping_min_delta: float = 0.0
    per_rank: bool = False
    in_step: bool = False  # a sharded model: every rank runs as many micro-batches as the others


@dataclasses.dataclass(kw_only=True)
class _Unread:
    """A step whose loss is still on the device."""

    record: dict[str, Any]
    sums: WindowSums
    done: WindowDone
    samples: int


class Trainer:
    """One rank's part of a training run."""

    def __init__(
        self,
        *,
        settings: LoopSettings,
        items: Items,
        micro: MicroBatches,
        stepper: OptimizerStep,
        adaptive: Adaptive,
        validation: Validation | None,
        agreement: Agreement,
        group: RankGroup,
        files: RunFiles,
        progress: Progress,
        loading: LoaderSettings,
        listener: TrainListener,
        interrupt: Interrupt,
    ) -> None:
        self.settings = settings
        self.progress = progress
        self._items = items
        self._micro = micro
        self._stepper = stepper
        self._adaptive = adaptive
        self._validation = validation
        self._agreement = agreement
        self._group = group
        self._world = agreement.world
        self._files = files
        self.loader: EpochLoader | None = None
        if items.uses_loader:
            self.loader = EpochLoader(
                items, dataclasses.replace(loading, ahead=math.ceil(adaptive.effective_batch / self._world.size)),
                seed=settings.seed, epochs=settings.epochs, rank=self._world.rank,
                ranks=self._world.size, pin=micro.device.type == "cuda", note=listener.note,
            )  # fmt: skip
        self._listener = listener
        self._interrupt = interrupt
        self._unread: _Unread | None = None
        self.replay: dict[int, list[int]] = {}  # micro-batches of steps that a killed run had made, by step
        self._shares = Shares(items, micro.device)

    def run(self) -> None:
        """Train to the end; a `KeyboardInterrupt` after a checkpoint where somebody asked to stop."""
        self._listener.started(self._total_samples(), self.progress.samples)
        if self.settings.in_step:
            self._agree_on_sizes(self._agreement.gather(Vote(value=self._size_vote())))
        try:
            while not self._finished():
                if self.progress.position < len(self._items):
                    self._run_epoch()
                self._end_epoch()
                if self._world.size == 1:
                    self._interrupt.check()
        finally:
            if self.loader is not None:
                self.loader.close()

    def _finished(self) -> bool:
        progress, settings = self.progress, self.settings
        enough = settings.max_steps is not None and progress.step >= settings.max_steps and progress.position == 0
        return progress.epoch >= settings.epochs or progress.stopped_early or enough

    def _total_samples(self) -> int:
        samples = self.settings.epochs * len(self._items)
        if self.settings.max_steps is not None:
            samples = min(samples, self.settings.max_steps * self._adaptive.effective_batch)
        return samples

    def _run_epoch(self) -> None:
        """The windows that are left of this epoch."""
        count, progress = len(self._items), self.progress
        started = time.perf_counter()
        order = epoch_order(count, seed=self.settings.seed, epoch=progress.epoch)
        if self.loader is not None:
            self.loader.begin(progress.epoch, progress.position)
        progress.spent(time.perf_counter() - started)
        while progress.position < count and not self._enough_steps():
            batch = self._adaptive.effective_batch
            window = next_window(progress.position, count, batch, smallest=self._smallest_window())
            self._step(window, order)
            self._maybe_checkpoint()
        started = time.perf_counter()
        if self.loader is not None:
            self.loader.end(another=self._validation is not None)
        self._read_last()
        progress.spent(time.perf_counter() - started)

    def _smallest_window(self) -> int:
        """Samples that every rank needs together; a rank may have none, unless it runs in step with the others."""
        smallest = self._micro.sizes.request.smallest
        return smallest * self._world.size if smallest > 1 or self.settings.in_step else 1

    def _enough_steps(self) -> bool:
        return self.settings.max_steps is not None and self.progress.step >= self.settings.max_steps

    def _step(self, window: Window, order: Sequence[int]) -> None:
        """One optimizer step, on all ranks or on none."""
        progress, adaptive = self.progress, self._adaptive
        started = time.perf_counter()
        share = window.share(order, rank=self._world.rank, ranks=self._world.size)
        measure = adaptive.measures(progress.step, self._micro.sizes, len(share), self._world.size)
        measure = measure and not self.settings.in_step  # a shard's gradient is not one
        self._micro.sizes.repeat(self.replay.pop(progress.step + 1, None))
        if self.settings.in_step:
            self._micro.sizes.repeat(self._lengths_in_step(len(share), window.samples))
        retries = self._micro.peak.alloc_retries
        with self._micro.watched_step():
            done, votes = self._run_share(self._shares.work(share, window.samples, self.loader, measure_noise=measure))
            absent = set.intersection(*(set(vote["absent"]) for vote in votes))
            rate = adaptive.rate.apply(progress.step)
            sums = self._stepper.make(done, window.samples, absent=absent, measured=measure)
        retries = self._micro.peak.alloc_retries - retries
        self._micro.stepped(retries)
        if self.loader is not None:
            self.loader.done(share)
        adaptive.rate.step_done()
        progress.stepped(window)
        self._agree_on_sizes(votes)
        self._read_last()  # waits for the step before this one: the time of a step is that of the device
        seconds = time.perf_counter() - started
        progress.spent(seconds)
        record = {
            "step": progress.step,
            "epoch": progress.epoch,
            "samples": progress.samples,
            "learning_rate": rate,
            "effective_batch": window.samples,
            "micro_batches": tuple(len(part.items) for part in done.parts),
            "seconds": seconds,
            "oom_events": sum(vote["oom_events"] for vote in votes),
            "alloc_retries": retries,
        }
        self._unread = _Unread(record=record, sums=sums, done=done, samples=window.samples)
        self._maybe_grow()
        if any(vote["stop"] for vote in votes):
            self._stop()

    def _maybe_grow(self) -> None:
        """A larger effective batch from the next step on, where the noise scale has justified one."""
        progress, change = self.progress, self._adaptive.take_effect(self.progress.step)
        if change is None:
            return
        progress.batches.append({**change, "step": progress.step, "samples": progress.samples})
        self._micro.sizes.allow(math.ceil(change["effective_batch"] / self._world.size))
        self._listener.note(
            f"step {progress.step}: the effective batch grows to {change['effective_batch']}, the learning rate to "
            f"{change['learning_rate']:.3g} (noise scale {change['noise_scale']})"
        )

    def _lengths_in_step(self, share: int, samples: int) -> list[int]:
        """As many micro-batches on every rank, under the smallest cap of all."""
        parts = math.ceil(math.ceil(samples / self._world.size) / self._micro.sizes.agreed)
        parts = max(min(parts, samples // self._world.size), 1)
        return [share * (part + 1) // parts - share * part // parts for part in range(parts)]

    def _run_share(self, work: WindowWork) -> tuple[WindowDone, list[Any]]:
        """This rank's micro-batches, and how all ranks fared; an error anywhere is an error everywhere."""
        sizes, outcome, done = self._micro.sizes, None, None
        try:
            done = self._micro.run(work)
        except Exception as error:
            outcome = Vote(error=error)
        if outcome is None:
            more = {
                "stop": self._interrupt.asked,
                "absent": self._stepper.absent(),
                "oom_events": sizes.oom_events,
            }
            outcome = Vote(value=self._size_vote() | more)
        votes = self._agreement.gather(outcome)
        assert done is not None
        return done, votes

    def _size_vote(self) -> dict[str, Any]:
        """What this rank allows, and whether it is still looking."""
        sizes = self._micro.sizes
        return {"cap": sizes.wish(in_step=self.settings.in_step), "settled": sizes.settled}

    def _agree_on_sizes(self, votes: Sequence[Any]) -> None:
        """Unless each rank goes its own way, the smallest cap holds for all."""
        if self.settings.per_rank or self._world.size == 1:
            return
        agreed = min(vote["cap"] for vote in votes)
        others_settled = all(vote["settled"] for rank, vote in enumerate(votes) if rank != self._world.rank)
        self._micro.sizes.agree(agreed, others_settled=others_settled)

    def _read_last(self) -> None:
        """Wait for the last step's loss; one that is no number ends the run."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        figures = unread.sums.read()
        loss, total, weight = figures["loss"], figures["total"], figures["weight"]
        assert loss is not None
        assert total is not None
        assert weight is not None
        if not math.isfinite(loss):
            refuse_loss(loss, unread.record, unread.done, self._items, self._agreement, self._files)
        record = StepRecord(loss=loss, **unread.record)
        self.progress.learnt(total, weight)
        self._adaptive.observe(unread.record["step"], unread.samples, figures)
        self._files.append_step(record)
        self._listener.step(record)

    def _maybe_checkpoint(self) -> None:
        every = self.settings.checkpoint_every
        if every is not None and self.progress.step % every == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._read_last()
        self._join_buffers()
        self._files.checkpoint(self.progress, self._agreement)

    def _stop(self) -> None:
        """Somebody asked to: a checkpoint, and out."""
        self._checkpoint()
        raise KeyboardInterrupt

    def _join_buffers(self) -> None:
        """Running statistics are each rank's own until here: their mean from now on."""
        if self._world.size == 1:
            return
        rewinder = self._micro.rewinder
        moved: list[list[int]] = self._agreement.gather(Vote(value=rewinder.moving()))
        places = sorted({place for rank in moved for place in rank})
        self._group.average(rewinder.buffers_at(places))

    def _end_epoch(self) -> None:
        progress = self.progress
        self._read_last()
        self._join_buffers()
        last = progress.epoch + 1 >= self.settings.epochs or self._enough_steps()
        figures: dict[str, float] = {}
        if self._validation is not None and (last or (progress.epoch + 1) % self.settings.eval_every == 0):
            figures = self._validate()
        row = progress.end_epoch(
            figures,
            learning_rate=self._adaptive.rate.current(max(progress.step - 1, 0)),
            effective_batch=self._adaptive.effective_batch,
            micro_batch=self._micro.sizes.next_size(),
            eval_batch=None if self._validation is None else self._validation.sizer.kept,
            oom_events=self._micro.sizes.oom_events,
            peak_reserved_bytes=self._micro.peak.peak_reserved_bytes or None,
        )
        self._adaptive.rate.epoch_done(figures.get("loss", row["train_loss"]))
        better = self._judge(figures, row)
        self._files.epoch_done(progress, better=better)
        self._files.checkpoint(progress, self._agreement)
        self._listener.epoch(row)

    def _judge(self, figures: dict[str, float], row: dict[str, Any]) -> bool:
        """Whether this epoch is the best so far; ends the run when none has been for long enough."""
        monitor = self.settings.monitor
        value = figures.get(monitor, row["train_loss"] if monitor == "loss" and self._validation is None else None)
        if value is None:
            return False
        return self.progress.judge(
            value,
            figures.get("loss", row["train_loss"]),
            higher_is_better=self.settings.higher_is_better,
            min_delta=self.settings.early_stopping_min_delta,
            patience=self.settings.early_stopping,
        )

    def _validate(self) -> dict[str, float]:
        """Figures over the held-out samples of all ranks."""
        validation = self._validation
        assert validation is not None
        self._listener.validating(self.progress.epoch)
        try:
            size = validation.sizer.size if validation.by_size else self._micro.sizes.next_size()
            together = size if self.settings.in_step else None
            with self._agreement.step(list[float]) as step:
                step.value = validation.run(self._micro.model, in_step_size=together)
        except KeyboardInterrupt:
            self._files.checkpoint(self.progress, self._agreement)  # the epoch's steps are done, its validation is not
            raise
        sums = [math.fsum(share[column] for share in step.values) for column in range(len(step.values[0]))]
        return validation.objective.metrics_of_sums(sums)
