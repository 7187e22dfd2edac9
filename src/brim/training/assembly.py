"""The parts of a run on one rank: optimizer, schedule, micro-batches, validation, files; and where the run is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError, plural
from brim.memory.device_waits import DeviceWaits
from brim.memory.devices import DeviceMemory, device_name, memory_of, resolve_limit
from brim.memory.environment import environment_facts
from brim.models.placement import Precision
from brim.ranks.agreement import Agreement
from brim.ranks.gradients import RankGroup
from brim.records import Plan
from brim.settings.train_request import TrainRequest
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from brim.sizing.plans import PlanFile
from brim.training.checkpoint import load_checkpoint, restore_generators
from brim.training.effective_batch import AdaptiveBatch, EarlierSizes, choose_effective_batch, make_adaptive_batch
from brim.training.epoch_loader import EpochLoader, validation_order
from brim.training.listener import Interrupt, TrainListener
from brim.training.loop import Progress, epoch_rules
from brim.training.micro_batches import GradientPass, MicroBatches, PeakMeter
from brim.training.optimizers import (
    OptimizerStep,
    absent_bytes,
    make_training_optimizer,
    optimizer_options,
    state_bytes_when_made,
    tensors_of_state,
)
from brim.training.run_files import RunFiles, WholeState
from brim.training.setup import TrainingSetup
from brim.training.validation import Validation, ValidationRequest

__all__ = ["RunContext", "TrainerParts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """Where a run takes place: its folder, the other ranks, who watches and who may stop it."""

    folder: Path
    agreement: Agreement
    group: RankGroup
    listener: TrainListener
    interrupt: Interrupt
    fingerprint: str = ""
    sharded: bool = False  # each rank holds a part of the model
    loader: EpochLoader | None = None  # its processes have started


class TrainerParts:
    """Everything that one rank trains with; nothing of it has started."""

    def __init__(self, subject: TrainingSetup, request: TrainRequest, context: RunContext) -> None:
        settings, world = request.settings, context.agreement.world
        self.subject = subject
        self.request = request
        self.context = context
        self.ranks = world.size
        self.earlier = EarlierSizes.read(request.plan) if request.plan is not None else None
        self.effective = choose_effective_batch(
            settings, samples=len(subject.data.train), ranks=world.size, earlier=self.earlier
        )
        self.notes = [*subject.notes, *self.effective.notes]
        if settings.training.fsdp and world.size == 1:
            self.notes.append("training.fsdp has no effect on one rank; start the run under torchrun")
        self.memory: DeviceMemory = memory_of(subject.device)
        limit = resolve_limit(self.memory, asked_bytes=request.memory_limit_bytes, margin=settings.training.margin)
        self.limit_bytes = limit.usable_bytes
        self.metered = request.limited or not self.memory.meter_slows
        self.waits = DeviceWaits(self.memory.device)
        self._refuse_too_few()
        self._refuse_with_shards()
        options = optimizer_options(settings)
        self.trainable = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
        if not self.trainable:
            raise RequestError(
                f"model.type {settings.model.type}: none of its weights can be trained; set requires_grad of some"
            )
        self.optimizer = make_training_optimizer(settings.optimizer.name, self.trainable, options)
        self.precision = Precision(weights=subject.dtype, autocast=subject.autocast, scaled=subject.loss_scaling)
        self.scaler = torch.amp.GradScaler(subject.device.type) if subject.loss_scaling else None
        self.adaptive: AdaptiveBatch = make_adaptive_batch(
            settings, self.effective, self.optimizer, options, samples=len(subject.data.train), notes=self.notes
        )
        self._state_bytes: int | None = None
        self.plans = self._make_plans()
        self.plan_known: Plan | None = None
        if self.earlier is None:
            self.plan_known, notes = self.plans.load()
            self.notes += notes
        self.micro = self._make_micro()
        self.stepper = OptimizerStep(
            self.micro,
            self.optimizer,
            context.group,
            scaler=self.scaler,
            gradient_clip=settings.training.gradient_clip,
            guarded=self.metered and not context.sharded,
            sharded=context.sharded,
        )
        self.validation = self._make_validation()
        self.whole = WholeState(subject.model, self.optimizer, sharded=context.sharded)
        self.files = RunFiles(
            context.folder,
            whole=self.whole,
            writes=world.rank == 0,
            shared_state=self.shared_state,
            own_state=self.own_state,
        )
        self.progress = Progress()
        self.rules = epoch_rules(settings, subject.objective, validated=self.validation is not None)

    def _refuse_too_few(self) -> None:
        """An effective batch that leaves a rank with fewer samples than it needs."""
        needed = (
            self.subject.smallest_micro_batch if self.subject.smallest_micro_batch > 1 or self.context.sharded else 0
        )
        if self.effective.batch < needed * self.ranks:
            why = (
                "batch normalisation needs"
                if self.subject.smallest_micro_batch > 1
                else "with training.fsdp every rank needs"
            )
            raise RequestError(
                f"an effective batch of {self.effective.batch} on {self.ranks} ranks: {why} at least {needed} samples "
                "on each rank in every step; give a larger hp.effective_batch"
            )

    def _refuse_with_shards(self) -> None:
        """What does not go together with a sharded model."""
        if not self.context.sharded:
            return
        if self.subject.loss_scaling:
            raise RequestError("training.fsdp: gradients of shards are not scaled; use bfloat16 instead of float16")
        if self.memory.meter_slows and self.request.limited:
            raise RequestError("training.fsdp: the CPU's meter cannot follow shards; leave the memory limit out")

    @property
    def sizes(self) -> MicroBatchSizer:
        """The micro-batches' sizes."""
        return self.micro.sizes

    @property
    def share(self) -> int:
        """Samples of a window that one rank has at most."""
        return max(math.ceil(self.adaptive.effective_batch / self.ranks), 1)

    def note(self, line: str) -> None:
        """Report a line once, and keep it for the record."""
        if line not in self.notes:
            self.notes.append(line)
            self.context.listener.note(line)

    def shared_state(self) -> dict[str, Any]:
        """What a checkpoint keeps that is the same on every rank."""
        return {
            "fingerprint": self.context.fingerprint,
            "monitor": self.rules.monitor,
            "adaptive": self.adaptive.to_json(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank."""
        validation = None if self.validation is None else self.validation.to_json()
        return {"sizes": self.sizes.to_json(), "validation": validation}

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""
        rank = self.context.agreement.world.rank
        loaded = load_checkpoint(checkpoint, shapes=self.whole.shapes(), rank=rank)
        state = loaded.state
        self.whole.load(loaded.weights, loaded.optimizer)
        if loaded.generators is not None:
            restore_generators(loaded.generators)
        self.adaptive.restore(state["adaptive"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        own = state["own"][rank if rank < len(state["own"]) else 0]
        self.sizes.restore(own["sizes"])
        if self.validation is not None and own.get("validation") is not None:  # older checkpoints lack it
            self.validation.restore(own["validation"])
        self.progress = progress = Progress.from_json(state["progress"])
        progress.stopped_early = self.rules.stops_early(progress)  # by the patience of this start
        left = progress.epoch * len(self.subject.data.train) - progress.samples
        if progress.position == 0 and left and not self.rules.finished(progress):
            self.notes.append(
                f"hp.max_steps had ended an epoch with {plural(left, 'sample')} left, which are not made up for: the "
                "next epoch begins"
            )

    def _make_plans(self) -> PlanFile:
        """Where the plan is filed: under everything that a micro-batch's size depends on."""
        subject, training = self.subject, self.request.settings.training
        identity = {
            "kind": "train",
            "workload": {"model": subject.bundle.name, **subject.bundle.identity},
            "mode": "train",
            "dtype": str(subject.autocast or subject.dtype),
            "optimizer": self.request.settings.optimizer.name.lower(),
            "gradient_checkpointing": training.gradient_checkpointing,
            "tokens": self.request.settings.hp.tokens,
            "data": subject.data.name,
            "share": self.share,
            "device": device_name(self.memory.device),
            "memory_limit": self.request.memory_limit_bytes,
        }
        return PlanFile(
            identity=identity,
            environment=environment_facts(self.memory.device),
            device=device_name(self.memory.device),
            limit_bytes=self.limit_bytes,
            use_cache=self.request.use_cache,
        )

    def _make_micro(self) -> MicroBatches:
        subject, asked = self.subject, self.request.settings.hp.batch_size
        unit: Any = "samples" if subject.data.train.uniform or self.context.sharded else "tokens"
        known = None
        if self.earlier is not None and self.earlier.unit == unit:
            known = self.earlier.micro_cap
        elif self.plan_known is not None and self.plan_known.unit == unit:
            known = self.plan_known.size
        sizes = MicroBatchSizer(
            MicroBatchRequest(
                ceiling=asked if isinstance(asked, int) and self.earlier is None else None,
                fixed=self.request.fixed,
                known=known,
                smallest=subject.smallest_micro_batch,
                unit=unit,
                uniform=subject.data.train.uniform,
                limit_bytes=self.limit_bytes if self.metered else None,
                largest=self.share,
            )
        )
        gradients = GradientPass(
            model=subject.model,
            objective=subject.objective,
            device=self.memory.device,
            precision=self.precision,
            scaler=self.scaler,
            averaging_ranks=self.ranks if self.context.sharded else 1,
        )
        meter = PeakMeter(
            self.memory,
            resident=self._resident,
            absent_bytes=self._absent_bytes if self.metered else int,
            enabled=self.metered,
        )
        return MicroBatches(
            gradients,
            sizes,
            meter,
            fail_on_oom=self.request.fail_on_oom,
            remedies=subject.remedies,
            note=self.note,
            waits=self.waits,
        )

    def _absent_bytes(self) -> int:
        if self._state_bytes is None:
            self._state_bytes = state_bytes_when_made(self.optimizer)
        return absent_bytes(self.optimizer, self._state_bytes)

    def _resident(self) -> list[torch.Tensor]:
        """What is in memory whatever the micro-batch."""
        model = self.subject.model
        gradients = [parameter.grad for parameter in self.trainable if parameter.grad is not None]
        return [*model.parameters(), *model.buffers(), *gradients, *tensors_of_state(self.optimizer)]

    def _make_validation(self) -> Validation | None:
        items = self.subject.data.validation
        if items is None or not self.request.validate:
            return None
        world = self.context.agreement.world
        asked = self.request.settings.training.eval_batch_size
        request = ValidationRequest(
            share=validation_order(items, rank=world.rank, ranks=world.size),
            precision=self.precision,
            batch_size=asked if isinstance(asked, int) else None,
            known=self.earlier.eval_batch if self.earlier is not None else None,
            limit_bytes=self.limit_bytes if self.metered else None,
            in_step_samples=math.ceil(len(items) / world.size) if self.context.sharded else None,
        )
        return Validation(
            items,
            self.subject.objective,
            self.memory,
            request,
            remedies=lambda length: self.subject.remedies(length, training=False),
            note=self.note,
            between=self.context.interrupt.check if world.size == 1 else lambda: None,
            waits=self.waits,
        )
