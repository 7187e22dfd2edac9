"""One rank's part of a training run, window by window: the backend of the loop that trains any model.

A step: this rank's share of the window in micro-batches (alone), a vote, one sum over the ranks, the optimizer. After
an epoch the ranks' buffers are averaged. The loss of a step is read one step later, so that the device never waits for
the host; checkpoints are taken only when every loss up to them is known, and written behind the next steps.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from brim.errors import BrimError, RequestError
from brim.ranks.agreement import Vote
from brim.running.loader import NotPrepared
from brim.training.assembly import TrainerParts
from brim.training.epoch_loader import EpochLoader, ValidationLoader
from brim.training.items import Items
from brim.training.listener import StepRecord
from brim.training.loop import EndedEpoch, EpochBackend, Progress, Window, epoch_order, next_window, run_epochs
from brim.training.micro_batches import WindowDone, WindowWork
from brim.training.objective import Batch
from brim.training.optimizers import WindowSums

__all__ = ["Trainer", "WindowShares"]

MOST_IDS_SHOWN = 8  # samples in the message about a bad loss; the file has all


@dataclasses.dataclass(kw_only=True)
class _Unread:
    """A step whose loss is still on the device."""

    record: dict[str, Any]
    sums: WindowSums
    done: WindowDone
    samples: int


class Trainer(EpochBackend):
    """Trains one run, in step with the other ranks."""

    def __init__(self, parts: TrainerParts, *, replay: Mapping[int, list[int]] | None = None) -> None:
        context, settings = parts.context, parts.request.settings
        self.progress = (parts.progress,)
        self._progress: Progress = parts.progress
        self._rules = parts.rules
        self._items = parts.subject.data.train
        self._seed = settings.hp.seed
        self._checkpoint_every = settings.training.checkpoint_every
        self._in_step = context.sharded  # every rank runs as many micro-batches as the others
        self._per_rank = parts.request.per_rank and not context.sharded
        self._micro = parts.micro
        self._stepper = parts.stepper
        self._adaptive = parts.adaptive
        self._validation = parts.validation
        self._agreement = context.agreement
        self._group = context.group
        self._world = context.agreement.world
        self._files = parts.files
        self._waits = parts.waits
        self._listener = context.listener
        self._interrupt = context.interrupt
        self._unread: _Unread | None = None
        self._held_out: ValidationLoader | None = None  # of the validation that is next
        self._replay = dict(replay or {})  # micro-batches of steps that a killed run had made, by step
        self._shares = WindowShares(self._items, parts.memory.device)
        self.loader = context.loader

    def run(self) -> None:
        """Train to the end; a `KeyboardInterrupt` after a checkpoint where somebody asked to stop."""
        self._waits.begin()
        self._listener.started(self._total_samples(), self._progress.samples)
        if self._in_step:
            self._agree_on_sizes(self._agreement.gather(Vote(value=self._size_vote())))
        run_epochs(self, self._rules)
        with self._waits.cause("checkpoint"), self._agreement.step(bool):
            self._files.written()
        self._waits.finish()

    def _total_samples(self) -> int:
        samples = self._rules.epochs * len(self._items)
        if self._rules.max_steps is not None:
            samples = min(samples, self._rules.max_steps * self._adaptive.effective_batch)
        return samples

    def train_epoch(self, running: Sequence[int]) -> Sequence[int]:
        """The windows that are left of this epoch; after a resume there may be none."""
        if self._progress.position < len(self._items):
            self._run_windows()
        self._read_last()
        self._join_buffers()
        return running

    def _run_windows(self) -> None:
        count, progress = len(self._items), self._progress
        started = time.perf_counter()
        order = epoch_order(count, seed=self._seed, epoch=progress.epoch)
        if self.loader is not None:
            with self._waits.cause("loading"):
                self.loader.begin(progress.epoch, progress.position)
        progress.add_seconds(time.perf_counter() - started)
        while progress.position < count and not self._rules.enough_steps(progress):
            batch = self._adaptive.effective_batch
            window = next_window(progress.position, count, batch, smallest=self._smallest_window())
            self._step(window, order)
            self._maybe_checkpoint()
        started = time.perf_counter()
        if self.loader is not None:
            self.loader.end()
        with self._waits.cause("validation"):
            self._fetch_validation()  # while the device is at the last step
        self._read_last()
        progress.add_seconds(time.perf_counter() - started)

    def _fetch_validation(self) -> None:
        validation = self._validation
        if validation is not None and self._rules.validates(self._progress):
            self._held_out = self._validation_loader()
            if self._held_out is not None:
                validation.fetch_first(self._held_out)

    def _validation_loader(self) -> ValidationLoader | None:
        progress = self._progress
        if self.loader is None or not self.loader.validates:
            return None
        whole = progress.position >= len(self._items) and self._rules.validates_after(progress.epoch)
        return self.loader.begin_validation(progress.epoch, expected=whole)

    def _smallest_window(self) -> int:
        """Samples that every rank needs together; a rank may have none, unless it runs in step with the others."""
        smallest = self._micro.sizes.request.smallest
        return smallest * self._world.size if smallest > 1 or self._in_step else 1

    def _step(self, window: Window, order: Sequence[int]) -> None:
        """One optimizer step, on all ranks or on none."""
        progress, adaptive = self._progress, self._adaptive
        started = time.perf_counter()
        share = window.share(order, rank=self._world.rank, ranks=self._world.size)
        measure = adaptive.measures(progress.step, self._micro.sizes, len(share), self._world.size)
        measure = measure and not self._in_step  # a shard's gradient is not one
        self._micro.sizes.repeat(self._replay.pop(progress.step + 1, None))
        if self._in_step:
            self._micro.sizes.repeat(self._lengths_in_step(len(share), window.samples))
        retries = self._micro.meter.peak.alloc_retries
        with self._micro.watched_step():
            done, votes = self._run_share(self._shares.work(share, window.samples, self.loader, measure_noise=measure))
            absent = set.intersection(*(set(vote["absent"]) for vote in votes))
            rate = adaptive.rate.apply(progress.step)
            with self._waits.busy():
                sums = self._stepper.make(done, window.samples, absent=absent, measured=measure)
        retries = self._micro.meter.peak.alloc_retries - retries
        self._micro.stepped(retries)
        if self.loader is not None:
            self.loader.done(share)
        adaptive.rate.step_done()
        progress.add_steps(window.samples)
        self._agree_on_sizes(votes)
        self._read_last()  # waits for the step before this one: the time of a step is that of the device
        seconds = time.perf_counter() - started
        progress.add_seconds(seconds)
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
        progress, change = self._progress, self._adaptive.take_effect(self._progress.step)
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
        if outcome is None and (failure := self._files.failure()) is not None:
            outcome = Vote(error=failure)  # here, where all ranks learn of it
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
        return {"cap": sizes.wish(in_step=self._in_step), "settled": sizes.settled}

    def _agree_on_sizes(self, votes: Sequence[Any]) -> None:
        """Unless each rank goes its own way, the smallest cap holds for all."""
        if self._per_rank or self._world.size == 1:
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
            self._refuse_loss(loss, unread)
        record = StepRecord(loss=loss, **unread.record)
        self._progress.add_loss(total, weight)
        self._adaptive.observe(unread.record["step"], unread.samples, figures)
        self._files.append_step(record)
        self._listener.step(record)

    def _refuse_loss(self, loss: float, unread: _Unread) -> NoReturn:
        """End the run with the samples of the micro-batches that gave this loss on all ranks.

        Every rank comes here at the same step, since the sums are the same on all.
        """
        bad = [part for part in unread.done.parts if not math.isfinite(float(part.total))]
        own = [self._items.ids[item] for part in bad for item in part.items]
        ids = [name for rank in self._agreement.gather(Vote(value=own)) for name in rank]
        step = unread.record["step"]
        self._files.write_bad_batch(step=step, epoch=unread.record["epoch"], loss=loss, ids=ids)
        last = self._files.last_checkpoint()
        kept = f"the last good checkpoint is {last}" if last is not None else "there is no checkpoint yet"
        more = f" and {len(ids) - MOST_IDS_SHOWN} more" if len(ids) > MOST_IDS_SHOWN else ""
        raise BrimError(
            f"step {step}: the loss is {loss}. The samples with it: {', '.join(ids[:MOST_IDS_SHOWN])}{more} (all in "
            f"bad_batch.json); {kept}. A smaller hp.learning_rate, training.gradient_clip or other data may help"
        )

    def _maybe_checkpoint(self) -> None:
        every = self._checkpoint_every
        if every is not None and self._progress.step % every == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        with self._waits.cause("checkpoint"):
            self._read_last()
            self._join_buffers()
            self._files.checkpoint(self._progress, self._agreement)

    def _stop(self) -> None:
        """Somebody asked to: a checkpoint, and out."""
        self._checkpoint()
        with self._agreement.step(bool):
            self._files.written()
        raise KeyboardInterrupt

    def _join_buffers(self) -> None:
        """Running statistics are each rank's own until here: their mean from now on."""
        if self._world.size == 1:
            return
        rewinder = self._micro.rewinder
        moved: list[list[int]] = self._agreement.gather(Vote(value=rewinder.moving()))
        places = sorted({place for rank in moved for place in rank})
        self._group.average(rewinder.buffers_at(places))

    def epoch_facts(self, run: int) -> dict[str, Any]:
        """Sizes, learning rate and memory at the end of an epoch."""
        del run
        return {
            "learning_rate": self._adaptive.rate.current(max(self._progress.step - 1, 0)),
            "effective_batch": self._adaptive.effective_batch,
            "micro_batch": self._micro.sizes.next_size(),
            "eval_batch": None if self._validation is None else self._validation.sizer.kept,
            "oom_events": self._micro.sizes.oom_events,
            "peak_reserved_bytes": self._micro.meter.peak.peak_reserved_bytes or None,
        }

    def epoch_ended(self, ended: Sequence[EndedEpoch]) -> None:
        """Schedule, table, weights and checkpoint."""
        (epoch,) = ended
        self._adaptive.rate.epoch_done(epoch.figures.get("loss", epoch.row["train_loss"]))
        with self._waits.cause("checkpoint"):
            self._files.epoch_done(self._progress, self._agreement, better=epoch.better)
        self._listener.epoch(epoch.row)
        if self._world.size == 1 and self._interrupt.asked:
            self._files.written()
            self._interrupt.check()

    def validate(self, running: Sequence[int]) -> dict[int, dict[str, float]]:
        """Figures over the validation samples of all ranks."""
        (run,) = running
        validation = self._validation
        assert validation is not None
        self._listener.validating(self._progress.epoch)
        try:
            size = validation.sizer.size if validation.by_size else self._micro.sizes.next_size()
            together = size if self._in_step else None
            with self._waits.cause("validation"), self._agreement.step(list[float]) as step:
                loader, self._held_out = self._held_out or self._validation_loader(), None
                step.value = validation.run(self._micro.gradients.model, loader, in_step_size=together)
        except KeyboardInterrupt:
            self._files.checkpoint(self._progress, self._agreement)  # the epoch's steps are done, its validation is not
            self._files.written()
            raise
        sums = [math.fsum(share[column] for share in step.values) for column in range(len(step.values[0]))]
        return {run: validation.objective.metrics_of_sums(sums)}


class WindowShares:
    """Turns a rank's share of a window into work; batches are put together on the device, if one is given."""

    def __init__(self, items: Items, device: torch.device | None = None) -> None:
        self._items = items
        self._device = device
        self._costs = None if items.uniform else [items.cost(item) for item in range(len(items))]

    def work(
        self, share: Sequence[int], samples: int, loader: EpochLoader | None, *, measure_noise: bool = False
    ) -> WindowWork:
        """The costliest samples first; without a loader samples are prepared as they are fetched."""
        items = list(share)
        costs = [1] * len(items)
        if self._costs is not None:
            known = self._costs
            items.sort(key=lambda item: -known[item])  # the order within a window changes nothing, and padding less
            costs = [known[item] for item in items]

        def fetch(part: Sequence[int]) -> Batch:
            prepared = None if loader is None else loader.take(part)
            for item, one in zip(part, prepared or (), strict=False):
                if isinstance(one, NotPrepared):
                    raise RequestError(f"training sample {self._items.ids[item]} cannot be used: {one.message}")
            return self._items.batch(part, prepared, device=self._device)

        return WindowWork(items=items, costs=costs, samples=samples, fetch=fetch, measure_noise=measure_noise)
