"""Keeps a trainer's run alive: a step that runs out of memory is redone in smaller parts, from zeroed gradients.

No callback can catch an error inside `training_step`, so three methods of the one trainer that was handed over are
replaced by the guard's: `get_batch_samples` (keeps the batches of the window), `training_step` and `prediction_step`.
What follows a failure, and what is cleared, is as in brim's own training (`training/micro_batches.py`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from brim.integrations.transformers_batches import BatchLayout, joined_answers, label_weight
from brim.memory.devices import DeviceMemory
from brim.memory.failures import FailureKind, classify
from brim.sizing.micro_batches import MicroBatchSizer
from brim.training.micro_batches import (
    MOST_WAIT_SECONDS,
    FailedMicroBatch,
    GradientPass,
    MicroBatches,
    PeakMeter,
    measured,
)
from brim.training.objective import Objective
from brim.training.optimizers import tensors_of_state

__all__ = ["TrainerGuard"]

WRAPPED = ("get_batch_samples", "training_step", "prediction_step")
Batch = Mapping[str, Any]


@dataclasses.dataclass
class _Window:
    """The batches between two steps of the optimizer, and copies of them as the loader gave them."""

    batches: list[Batch]
    kept: list[Batch]
    done: int = 0  # batches whose gradients are there
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep gradients that are there already: of a window that a callback has ended before its step."""
        self.earlier = [(one, one.grad.clone()) for one in parameters if one.grad is not None]

    def begin_again(self) -> None:
        """Gradients, which were dropped, as when it began."""
        self.done = 0
        for parameter, gradient in self.earlier:
            parameter.grad = gradient.clone()

    def expects(self, inputs: Any) -> bool:
        """Whether these are the next ones: a loop that is not the trainer's own may pass others."""
        return self.done < len(self.batches) and inputs is self.batches[self.done]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """Some samples of a batch, and which fraction of its loss they are."""

    batch: Batch
    fraction: float
    whole: bool


class _Parts(MicroBatches):
    """Runs batches part by part; after a failure smaller parts come next."""

    def __init__(self, guard: TrainerGuard, sizes: MicroBatchSizer) -> None:
        trainer = guard.trainer
        gradients = GradientPass(
            model=trainer.model, objective=cast(Objective, None), device=torch.device(trainer.args.device)
        )
        # Elsewhere the allocator holds the limit itself, and a meter would reset the peaks that the user reads.
        metered = guard.limit_bytes is not None and guard.memory.meter_slows
        meter = PeakMeter(guard.memory, resident=guard.resident, enabled=metered)
        super().__init__(gradients, sizes, meter, note=guard.note)
        self._guard = guard
        self._length = 0  # of the part that runs
        self._obstacle: str | None = None  # why the batch that runs cannot be split

    def attempt(self, batches: Sequence[Batch], run: Callable[[_Part], Any]) -> list[list[tuple[_Part, Any]]] | None:
        """Every part of the batches with its answer; None after a failure, which has been dealt with."""
        failed: FailedMicroBatch | None = None
        answers: list[list[tuple[_Part, Any]]] = []
        try:
            with self._guard.limited():
                for batch in batches:
                    answers.append([])
                    figures = _Figures(self._guard.trainer)
                    for part in self._parts(batch):
                        with self.meter.watched():
                            answers[-1].append((part, run(part)))
                        self.sizes.record(measured(self._length, self._length, None, None))
                    figures.merge([part.fraction for part, _ in answers[-1]])
        except Exception as error:
            failed = self._classified(error, self._length, self._length)
        if failed is None:
            return answers
        answers.clear()
        # The except block has ended: nothing pins the failed part's tensors any more.
        left = self._memory.left_by_others_bytes()
        self.rewinder.rewind()
        self._guard.rewind()
        self._memory.release()
        self._recover(failed, left)
        return None

    def _parts(self, batch: Batch) -> Iterator[_Part]:
        layout = BatchLayout.of(batch, paired=self._guard.paired)
        self._obstacle = layout.obstacle
        self._length = layout.samples
        if layout.obstacle is not None or self.sizes.next_size() >= layout.samples:
            yield _Part(batch=copy.copy(batch), fraction=1.0, whole=True)  # a step may take entries out
            return
        weight = self._guard.weight
        total, start = weight(batch, layout.samples), 0
        while start < layout.samples:
            self._length = self.sizes.next_length(layout.samples - start)
            part = layout.part(batch, start, start + self._length)
            fraction = weight(part, self._length) / total if total else self._length / layout.samples
            yield _Part(batch=part, fraction=fraction, whole=False)
            start += self._length

    def _recover(self, failed: FailedMicroBatch, left_bytes: int | None) -> None:
        if self._obstacle is None:
            self._after_failure(failed, left_bytes)
        elif self.sizes.live.evidence.others_hold(left_bytes) and self._waited_seconds < MOST_WAIT_SECONDS:
            self._wait_for_others(failed.length)
        else:
            raise DoesNotFitError(
                f"a batch does not fit ({failed.failure.reason}), and it cannot be split: {self._obstacle}. Lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps, or collate with padding "
                "(padding_free=False, packing=False)"
            )


class TrainerGuard:
    """Stands in for three methods of one trainer; `remove` gives it its own back.

    `limit_bytes` is a limit that training keeps to, where the user named one. `paired`: a sample is a pair of rows.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        memory: DeviceMemory,
        paired: bool,
        note: Callable[[str], None],
        train_sizes: MicroBatchSizer | None,
        eval_sizes: MicroBatchSizer,
        limit_bytes: int | None = None,
    ) -> None:
        self.trainer = trainer
        self.memory = memory
        self.paired = paired
        self.note = note
        self.limit_bytes = limit_bytes
        self.train_sizes = train_sizes
        self.eval_sizes = eval_sizes
        self._before = {name: vars(trainer)[name] for name in WRAPPED if name in vars(trainer)}
        self._own: dict[str, Any] = {}
        self._window: _Window | None = None
        self._parts: dict[int, _Parts] = {}  # by sizer
        self._model: Any = None  # whose weights the parts know
        self._figures: _Figures | None = None  # as they were when the window began

    @property
    def oom_events(self) -> int:
        """How often a part ran out of memory."""
        return self.eval_sizes.oom_events + (0 if self.train_sizes is None else self.train_sizes.oom_events)

    def install(self) -> None:
        """Put the guard's methods in front of the trainer's own, on this instance alone."""
        for name in WRAPPED:
            self._own[name] = getattr(self.trainer, name)
            setattr(self.trainer, name, functools.wraps(self._own[name])(functools.partial(getattr(self, name))))

    def remove(self) -> None:
        """The trainer's own methods again."""
        for name in WRAPPED:
            if name in self._before:
                setattr(self.trainer, name, self._before[name])
            else:
                vars(self.trainer).pop(name, None)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, whose batches are kept until their window is done."""
        size, fitted = self.trainer._train_batch_size, self.trainer.args.train_batch_size
        if self.train_sizes is not None and size != fitted:
            raise RequestError(
                f"the trainer's loader has batches of {size}, not of {fitted} as fitted, and so another effective "
                "batch: early releases of transformers 5 take the size from the checkpoint; upgrade, or pass "
                f"fit_to_memory(trainer, batch_size={size})"
            )
        found, num_items = self._own["get_batch_samples"](*args, **kwargs)
        batches = list(found)
        self._window = _Window(batches=batches, kept=[copy.copy(batch) for batch in batches])
        return batches, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """The trainer's own; after an out-of-memory error all batches of the window so far, in smaller parts."""
        window = self._window
        step = functools.partial(self._train_part, model, num_items_in_batch)
        if window is None or self.train_sizes is None or not window.expects(inputs):
            return self._own["training_step"](model, inputs, num_items_in_batch)  # not from the loop that is known
        parts = self._parts_of(self.train_sizes)
        if self.trainer.args.world_size > 1:
            with self._ranks_stop("a training step"), self.limited(), parts.meter.watched():
                return self._own["training_step"](model, inputs, num_items_in_batch)
        if window.done == 0:
            self._figures = _Figures(self.trainer)
            parts.begin()
            window.begin(parts.gradients.trainable())
        following = window.done + 1
        while (answers := parts.attempt(window.kept[window.done : following], step)) is None:
            parts.drop_gradients()
            window.begin_again()
        window.done = following
        if window.done == len(window.batches):
            parts.end()
            self._window = self._figures = None
        losses = [loss for _, loss in answers[-1]]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own; after an out-of-memory error in parts, whose answers are put together."""
        own = self._own["prediction_step"]
        parts = self._parts_of(self.eval_sizes)
        if self.trainer.args.world_size > 1:
            with self._ranks_stop("an evaluation"), self.limited(), parts.meter.watched():
                return own(model, inputs, *args, **kwargs)
        window, self._figures = self._figures, _Figures(self.trainer)  # a callback may evaluate within a window
        parts.begin()
        step: Callable[[_Part], Any] = lambda part: own(model, part.batch, *args, **kwargs)  # noqa: E731
        while (answers := parts.attempt([inputs], step)) is None:
            pass
        parts.end()
        self._figures = window
        (found,) = answers
        if len(found) == 1:
            return found[0][1]
        fractions = [part.fraction for part, _ in found]
        return tuple(
            joined_answers(members, fractions, paired=self.paired)
            for members in zip(*(answer for _, answer in found), strict=True)
        )

    def rewind(self) -> None:
        """What the trainer counts beside its losses, as when the window began."""
        if self._figures is not None:
            self._figures.rewind()

    def weight(self, batch: Batch, samples: int) -> float:
        """What some samples count in the mean that the loss is: their labels, or where there are none, themselves."""
        return label_weight(batch, samples, shifted=bool(getattr(self.trainer, "_loss_shifts_labels", False)))

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Keep to the limit that the user named."""
        return contextlib.nullcontext() if self.limit_bytes is None else self.memory.limited(self.limit_bytes)

    def resident(self) -> list[torch.Tensor]:
        """What is in memory whatever the part: a meter on the CPU counts only what it is given."""
        model, optimizer = self.trainer.model, self.trainer.optimizer
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        state = [] if optimizer is None else tensors_of_state(optimizer)
        return [*model.parameters(), *model.buffers(), *gradients, *state]

    def _train_part(self, model: Any, num_items: Any, part: _Part) -> Any:
        """Forward and backward of a part. A mean over the batch is divided by the micro-batches of a window: by more,
        where it is the mean over a part."""
        trainer = self.trainer
        if not part.fraction:  # without a label it adds nothing, and its mean is not a number
            return torch.zeros((), device=trainer.args.device)
        steps = trainer.current_gradient_accumulation_steps
        if not part.whole:
            trainer.current_gradient_accumulation_steps = steps / part.fraction
        try:
            return self._own["training_step"](model, part.batch, num_items)
        finally:
            trainer.current_gradient_accumulation_steps = steps

    def _parts_of(self, sizes: MicroBatchSizer) -> _Parts:
        """The runner for a sizer; made anew where the trainer has made itself another model."""
        if self._model is not self.trainer.model:
            self._parts.clear()
            self._model = self.trainer.model
        if id(sizes) not in self._parts:
            self._parts[id(sizes)] = _Parts(self, sizes)
        return self._parts[id(sizes)]

    @contextlib.contextmanager
    def _ranks_stop(self, what: str) -> Iterator[None]:
        """Among ranks nothing is redone: the others wait in a collective of the step that failed here."""
        try:
            yield
        except BrimError:
            raise
        except Exception as error:
            failure = classify(error)
            if failure.kind is not FailureKind.OUT_OF_MEMORY:
                raise
            rank = self.trainer.args.process_index
            raise LostError(
                f"rank {rank} ran out of memory in {what} ({failure.reason}), and the other ranks wait inside it: "
                "nothing can be redone. Fit again with a larger margin= or a smaller memory_limit= on every rank, and "
                "continue from the last checkpoint with train(resume_from_checkpoint=True)"
            ) from error


class _Figures:
    """What TRL's trainers log beside the loss, at one moment: lists that grow with every batch, and tokens seen."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        metrics = getattr(trainer, "_metrics", None)
        self._metrics: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
        self._lengths = {
            (mode, name): len(values) for mode, named in self._metrics.items() for name, values in named.items()
        }
        self._tokens = getattr(trainer, "_total_train_tokens", None)

    def rewind(self) -> None:
        """Forget what has come since."""
        for mode, named in self._metrics.items():
            for name in list(named):
                del named[name][self._lengths.get((mode, name), 0) :]
                if not named[name]:
                    del named[name]
        if self._tokens is not None:
            self._trainer._total_train_tokens = self._tokens

    def merge(self, fractions: Sequence[float]) -> None:
        """One figure in the place of those of all parts: their mean by weight."""
        for mode, named in self._metrics.items():
            for name, values in named.items():
                before = self._lengths.get((mode, name), 0)
                new = values[before:]
                counted = [fraction for fraction in fractions if fraction or len(new) == len(fractions)]
                if len(new) == len(counted) > 1:
                    mean = sum(value * fraction for value, fraction in zip(new, counted, strict=True))
                    values[before:] = [mean / sum(counted)]
