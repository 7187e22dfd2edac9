"""A trainer's own steps as workloads: `training_step` with its optimizer, and `prediction_step`.

The trainer is made ready as `train()` would make it (precision, checkpointing, optimizer), and put back afterwards. It
is used through its methods alone; the library that it comes from is not imported here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.forecasting.torch_private import without_dispatch_modes
from brim.integrations.transformers_samples import CostliestSamples
from brim.memory.failures import HALF_PRECISION, FailureKind, classify, memory_savings
from brim.memory.snapshot import StateSnapshot
from brim.records import Mode
from brim.training.micro_batches import Rewinder
from brim.training.optimizers import state_bytes_when_made
from brim.workloads.base import Workload
from brim.workloads.train_step import materialise_state

__all__ = ["EvaluationWorkload", "PreparedTrainer", "TrainingWorkload", "prepared"]

LEAST_UNDIVIDED = 1e-3  # of a loss: less is rounding
_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")  # of an accelerator: what it has prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedTrainer:
    """A trainer that is ready for a step."""

    trainer: Any
    model: nn.Module  # as the trainer's loop would pass it on: with autocast, compiled if asked for
    optimizer: Any  # accelerate's, around the one below; None without training
    inner_optimizer: torch.optim.Optimizer | None

    @property
    def device(self) -> torch.device:
        """Where the trainer runs."""
        return torch.device(self.trainer.args.device)

    def modules(self) -> list[nn.Module]:
        """The model, and what else the trainer holds: the reference of a preference loss, a teacher."""
        own = {id(part) for part in self.trainer.model.modules()} | {id(self.model)}
        others = [value for value in vars(self.trainer).values() if isinstance(value, nn.Module)]
        beside = {id(module): module for module in others if id(module) not in own}
        wrapped = {key for key, module in beside.items() if any(id(part) in own for part in module.modules())}
        return [self.trainer.model, *(module for key, module in beside.items() if key not in wrapped)]


@contextlib.contextmanager
def prepared(trainer: Any, *, training: bool) -> Iterator[PreparedTrainer]:
    """The trainer as it would be before its first step, on one rank; everything is as before at the end.

    Weights, gradients and optimizer state are not kept here: a search and a trace put back what their steps change.
    """
    args, accelerator = trainer.args, trainer.accelerator
    with contextlib.ExitStack() as undo:
        undo.callback(StateSnapshot.take().restore)  # of nothing but the random generators
        _keep_attributes(undo, trainer)
        if hasattr(trainer.data_collator, "__dict__"):  # one with a seed makes itself a generator, and draws from it
            _keep_attributes(undo, trainer.data_collator)
        for module in trainer.model.modules():
            _keep_attributes(undo, module)
            if (generation := vars(module).get("generation_config")) is not None:  # which an evaluation may fill in
                _keep_attributes(undo, generation)
            for held in vars(module).values():
                if isinstance(held, dict):  # hooks, which checkpointing may add to
                    undo.callback(_put_back_entries, held, dict(held))
        for name in _LISTS:
            undo.callback(_cut, getattr(accelerator, name), len(getattr(accelerator, name)))
        if accelerator.num_processes > 1:
            _work_alone(undo, accelerator)
        undo.callback(accelerator.gradient_state._set_sync_gradients, accelerator.gradient_state.sync_gradients)
        accelerator.gradient_state._set_sync_gradients(True)
        if training and args.gradient_checkpointing:
            _enable_checkpointing(trainer)
        optimizer = inner = None
        if training:
            trainer.create_optimizer()
            inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            optimizer = trainer.optimizer = accelerator.prepare_optimizer(inner)
        model = accelerator.prepare_model(trainer.model, evaluation_mode=True)
        yield PreparedTrainer(trainer=trainer, model=model, optimizer=optimizer, inner_optimizer=inner)


def _enable_checkpointing(trainer: Any) -> None:
    """As `train()` does, with the same keys taken out."""
    options = dict(trainer.args.gradient_checkpointing_kwargs or {})
    own = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **own)


def _keep_attributes(undo: contextlib.ExitStack, owner: Any) -> None:
    """Have an object's attributes put back, the same objects under the same names; of figures, the lists as well, and
    of a random generator what it would draw next."""
    kept = dict(vars(owner))
    for value in kept.values():
        if isinstance(value, torch.Generator):
            undo.callback(value.set_state, value.get_state())
    metrics = kept.get("_metrics")
    if isinstance(metrics, Mapping):
        undo.callback(_put_back_figures, metrics, {mode: dict(one) for mode, one in metrics.items()}, _lists(metrics))

    def put_back() -> None:
        now = vars(owner)
        for name in [name for name in now if name not in kept]:
            del now[name]
        now.update(kept)

    undo.callback(put_back)


def _put_back_entries(held: dict[Any, Any], entries: dict[Any, Any]) -> None:
    if held.keys() != entries.keys() or any(held[key] is not value for key, value in entries.items()):
        held.clear()
        held.update(entries)


def _lists(metrics: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    return {mode: {name: list(values) for name, values in one.items()} for mode, one in metrics.items()}


def _put_back_figures(metrics: Mapping[str, Any], held: dict[str, Any], lists: dict[str, Any]) -> None:
    for mode, one in metrics.items():
        one.clear()
        one.update(held[mode])
        for name, values in lists[mode].items():
            one[name][:] = values


def _cut(held: list[Any], length: int) -> None:
    del held[length:]


def _work_alone(undo: contextlib.ExitStack, accelerator: Any) -> None:
    """While one rank tries sizes of its own, nothing is gathered from the others."""
    for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
        setattr(accelerator, name, _as_it_is)
        undo.callback(vars(accelerator).pop, name, None)


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    return value


class _TrainerWorkload(Workload):
    """What both kinds of step share."""

    def __init__(self, ready: PreparedTrainer, samples: CostliestSamples, *, largest: int | None = None) -> None:
        self.trainer = ready.trainer
        self.ready = ready
        self.device = ready.device
        self.savings = memory_savings(checkpointing="gradient_checkpointing=True", half_precision=HALF_PRECISION)
        self._samples = samples
        self._largest = largest
        self._size = 0

    def make_batch(self, size: int) -> Any:
        """The costliest samples, collated by the trainer's own collator, on the device."""
        self._size = size
        with without_dispatch_modes():  # the host's work, not the device's: neither metered nor traced
            batch = self._samples.batch(size)
        return self.trainer._prepare_inputs(batch)

    def batch_length(self, batch: Any) -> int:
        """The samples that went into the last batch: a row may be half of one, or hold many."""
        del batch
        return self._size

    def modules(self) -> Sequence[nn.Module]:
        """The model and what else the trainer holds."""
        return self.ready.modules()

    def stateful(self) -> Sequence[Any]:
        """The gradient scaler, where there is one."""
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        return () if scaler is None else (scaler,)

    def largest_size(self) -> int | None:
        """The largest useful size."""
        return self._largest


class TrainingWorkload(_TrainerWorkload):
    """`training_step` on one micro-batch of a window, which has `micro_batches(size)` of them.

    The optimizer steps at the end of each window and first of all, so that its state is there. Where a window has
    several micro-batches, gradients of the ones before are there too, and stay.
    """

    mode: Mode = "train"

    def __init__(
        self,
        ready: PreparedTrainer,
        samples: CostliestSamples,
        *,
        micro_batches: Callable[[int], int],
        largest: int | None = None,
    ) -> None:
        super().__init__(ready, samples, largest=largest)
        self._micro_batches = micro_batches
        self._steps = 0
        self._num_items: Any = None

    def make_batch(self, size: int) -> Any:
        """As for any step; and the number of its items, which the loss is divided by."""
        batch = super().make_batch(size)
        self._steps = 0
        self._num_items = self.trainer._get_num_items_in_batch([batch], self.device)
        return batch

    def check_loss(self) -> str | None:
        """Refuse a loss whose gradients would change with the accumulation; a sentence where a part of it does.

        transformers does not divide a loss by the micro-batches of a window where it takes it to be divided already,
        by `num_items_in_batch`. Many models are given that number and ignore it, and there may be none. One sample
        shows it: in a window of four times as many its loss should be a fourth.
        """
        batch = self.make_batch(1)
        scaled = self._is_taken_as_scaled()
        if (self._num_items is None and not scaled) or (self._num_items is not None and not self._num_items):
            return None  # the trainer divides by the micro-batches itself, or nothing is counted
        try:
            alone, among_four = (self._loss_in_window(batch, micro_batches=count) for count in (1, 4))
        except Exception as error:
            if classify(error).kind is FailureKind.OUT_OF_MEMORY:
                return None  # not even one sample fits: the search reports it
            raise
        divided = alone > 2 * among_four
        if divided and not scaled:
            raise RequestError(
                "loss_is_scaled_for_ga = False, but the loss is divided by num_items_in_batch: its gradients would "
                "shrink with gradient_accumulation_steps; leave loss_is_scaled_for_ga out"
            )
        if alone > 0 and scaled and not divided:
            raise RequestError(
                "the loss does not depend on num_items_in_batch, but transformers takes it to be divided by that: its "
                f"gradients would grow with gradient_accumulation_steps; {self._remedy()}"
            )
        undivided = (4 * among_four - alone) / (3 * alone) if alone > 0 and scaled else 0.0
        if undivided < LEAST_UNDIVIDED:
            return None
        return (
            f"{undivided:.1%} of the loss are not divided by num_items_in_batch, such as an auxiliary loss of routers: "
            "it is added in every micro-batch, and so counts more with more gradient_accumulation_steps"
        )

    def _is_taken_as_scaled(self) -> bool:
        """Whether the trainer leaves a loss as it is, since it takes it to be that of a whole window."""
        trainer = self.trainer
        if self._is_asked_how_scaled() and trainer.loss_is_scaled_for_ga is not None:
            return bool(trainer.loss_is_scaled_for_ga)
        return self._num_items is not None or trainer.compute_loss_func is not None

    def _is_asked_how_scaled(self) -> bool:
        """Whether `loss_is_scaled_for_ga` counts: 5.17 knows no such attribute, whatever a subclass says."""
        return any("loss_is_scaled_for_ga" in vars(kind) for kind in _own_classes(self.trainer))

    def _remedy(self) -> str:
        if self._num_items is None:  # the batches have no labels that are counted
            if self._is_asked_how_scaled():
                return "here there is none; if it is a mean over the batch, set trainer.loss_is_scaled_for_ga = False"
            return "here there is none; override compute_loss in place of compute_loss_func, with a mean over the batch"
        if self.trainer.compute_loss_func is not None:
            return "divide it by num_items_in_batch in compute_loss_func"
        return (
            "if it is a mean over the batch, set trainer.model_accepts_loss_kwargs = False, and the trainer divides it "
            "by the accumulation; else divide it by num_items_in_batch"
        )

    def _loss_in_window(self, batch: Any, *, micro_batches: int) -> float:
        """The size of the loss in a window of so many such batches; random generators and buffers are put back."""
        trainer, model = self.trainer, self.ready.model
        items = None if self._num_items is None else self._num_items * micro_batches
        trainer.current_gradient_accumulation_steps = micro_batches
        rewinder = Rewinder(trainer.model)
        rewinder.mark()
        model.train()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, copy.copy(batch), num_items_in_batch=items)
        rewinder.rewind()
        return abs(float(loss.mean()))

    def traced_as(self) -> Workload:
        """The same step in the middle of a window, whatever the size: the same operations at every size."""
        several = 2 if self._micro_batches(1) > 1 else 1
        return _TracedTraining(self.ready, self._samples, micro_batches=lambda _: several, largest=self._largest)

    def step(self, batch: Any) -> Any:
        """One micro-batch, and where it ends a window the optimizer's step."""
        trainer, model = self.trainer, self.ready.model
        micro_batches = self._micro_batches(self._size)
        trainer.current_gradient_accumulation_steps = micro_batches
        loss = trainer.training_step(model, copy.copy(batch), self._num_items)  # it may take entries out
        if self._steps % micro_batches == 0:
            if trainer.args.max_grad_norm > 0:
                trainer._clip_grad_norm(model)
            self.ready.optimizer.step()
            if self.stateful() and trainer.accelerator.optimizer_step_was_skipped:
                assert self.ready.inner_optimizer is not None
                materialise_state(self.ready.inner_optimizer)
            if micro_batches == 1:
                model.zero_grad()
        self._steps += 1
        return loss

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The trainer's optimizer, without accelerate's wrapper."""
        return () if self.ready.inner_optimizer is None else (self.ready.inner_optimizer,)


class _TracedTraining(TrainingWorkload):
    """As a trace sees it: TRL launches kernels of its own on a card, which allocate nothing."""

    def step(self, batch: Any) -> Any:
        """One micro-batch, with those kernels left out."""
        with _kernels_of_trl_left_out():
            return super().step(batch)


def _own_classes(trainer: Any) -> list[type[Any]]:
    """Those of transformers, without what others have made of them."""
    return [kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "transformers"]


@contextlib.contextmanager
def _kernels_of_trl_left_out() -> Iterator[None]:
    """While inside, TRL's fused head takes its way of a card with Triton, and launches nothing there.

    On the CPU it would take another way, with copies of whole tiles in float32. Its results have no values here anyway.
    """
    head, kernels = sys.modules.get("trl.trainer.utils"), sys.modules.get("trl.kernels.chunked_logprob")
    launched = _Launched()
    stand_ins: list[tuple[Any, str, Any]] = [
        (head, "_use_triton", lambda _: True),
        (kernels, "_use_triton", lambda _: True),
        (kernels, "triton", types.SimpleNamespace(cdiv=lambda length, block: -(-length // block))),
        (kernels, "_forward_kernel", launched),
        (kernels, "_backward_kernel", launched),
        (kernels, "_addmm_fp32", launched.leave_out),
    ]
    with contextlib.ExitStack() as undo:
        for module, name, value in stand_ins if hasattr(kernels, "_forward_kernel") else ():
            if hasattr(module, name):
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        yield


class _Launched:
    """A kernel of Triton for any grid, which does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.leave_out

    def leave_out(self, *args: Any, **kwargs: Any) -> None:
        """In the place of a launch."""


class EvaluationWorkload(_TrainerWorkload):
    """`prediction_step` as an evaluation in the midst of training runs it: optimizer state is kept free."""

    mode: Mode = "forward"

    def __init__(
        self, ready: PreparedTrainer, samples: CostliestSamples, *, state_bytes: int, largest: int | None = None
    ) -> None:
        super().__init__(ready, samples, largest=largest)
        self._state_bytes = state_bytes

    def step(self, batch: Any) -> Any:
        """One batch of an evaluation."""
        trainer = self.trainer
        self.ready.model.eval()
        loss_only = trainer.args.prediction_loss_only or trainer.compute_metrics is None
        return trainer.prediction_step(self.ready.model, copy.copy(batch), loss_only, ignore_keys=None)

    def reserved_bytes(self) -> int:
        """Bytes of the optimizer's state, which training will have made."""
        return self._state_bytes


def optimizer_state_bytes(trainer: Any) -> int:
    """Bytes of optimizer state that training will have beside an evaluation; nothing without training data."""
    if trainer.train_dataset is None:
        return 0
    with prepared(trainer, training=True) as ready:
        assert ready.inner_optimizer is not None
        return 0 if ready.inner_optimizer.state else state_bytes_when_made(ready.inner_optimizer)
