"""Objectives of training: the loss of a micro-batch as a sum with its weight, and the metrics of validation.

A loss is a sum, never a mean: the sums of all micro-batches of an optimizer step add up to the sum of its whole batch,
and one division by the total weight (samples, or tokens) gives the gradient of a single big batch.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.errors import RequestError, nearest_names
from brim.memory.transfer import moved, replaced

__all__ = ["Batch", "Classification", "LossSum", "ModelLoss", "Objective", "Regression", "choose_monitor"]

_AUXILIARY_WEIGHT = 0.3  # of the auxiliary classifiers of GoogLeNet and Inception
_TOP = 5


@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs of a model (a tensor, or tensors by name) and the labels."""

    inputs: Any
    labels: torch.Tensor | None

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """Copied to the device, floating-point inputs as `dtype`; from pinned memory the copy is asynchronous."""
        return Batch(_moved(self.inputs, device, dtype), _moved(self.labels, device, None))


@dataclasses.dataclass(frozen=True)
class LossSum:
    """The sum of the losses of a batch, and its weight: sums of several batches are divided by the sum of weights."""

    total: torch.Tensor  # with its graph
    weight: torch.Tensor | float  # samples, or tokens


class Objective(abc.ABC):
    """A loss to train with and the metrics of validation."""

    task: str
    metrics: tuple[str, ...]  # of validation
    counts_samples = True  # whether the weight is the number of samples, which is known before the forward
    higher_is_better: frozenset[str] = frozenset({"top1", "top5"})

    @property
    def columns(self) -> int:
        """How many numbers `sample_metrics` has for a sample: by default its metrics and its weight."""
        return len(self.metrics) + 1

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The loss of a micro-batch, for `backward`."""

    @abc.abstractmethod
    def sample_metrics(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Every sample's metrics and weight, [samples, columns], to be summed over all samples."""

    def metrics_of_sums(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics of validation from the sums of the columns: by default the mean of each."""
        return {name: value / sums[-1] for name, value in zip(self.metrics, sums, strict=False)}


class Classification(Objective):
    """Cross entropy, and top-1 and top-5 accuracy."""

    task = "classify"

    def __init__(self, classes: int, *, label_smoothing: float = 0.0) -> None:
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.metrics = ("loss", "top1", "top5") if classes > _TOP else ("loss", "top1")

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The sum over samples; auxiliary classifiers, if the model has any, count 0.3 each."""
        assert batch.labels is not None
        main, *others = _outputs(model, batch)
        summed = self.loss_of(main, batch.labels)
        total = summed.total
        for other in others:
            total = total + _AUXILIARY_WEIGHT * self._cross_entropy(other, batch.labels, "sum")
        return LossSum(total, summed.weight)

    def loss_of(self, scores: torch.Tensor, labels: torch.Tensor) -> LossSum:
        """The loss of given scores [samples, classes]."""
        return LossSum(self._cross_entropy(scores, labels, "sum"), float(len(labels)))

    def sample_metrics(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss as in training, and whether the class has the best score or one of the best five."""
        assert batch.labels is not None
        return self.sample_metrics_of(_outputs(model, batch)[0], batch.labels)

    def sample_metrics_of(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As `sample_metrics`, of given scores."""
        loss = self._cross_entropy(scores, labels, "none")
        ranked = scores.topk(min(_TOP, scores.shape[1]), dim=1).indices  # [samples, ranks]
        hits = ranked == labels[:, None]
        columns = [loss, hits[:, 0].to(loss.dtype), hits.any(dim=1).to(loss.dtype)]
        return torch.stack([*columns[: len(self.metrics)], torch.ones_like(loss)], dim=1)

    def _cross_entropy(self, scores: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return functional.cross_entropy(scores, labels, reduction=reduction, label_smoothing=self.label_smoothing)


class Regression(Objective):
    """Squared error, and mean absolute error."""

    task = "regress"
    metrics = ("loss", "mae")

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The sum of squared errors."""
        assert batch.labels is not None
        return self.loss_of(_outputs(model, batch)[0], batch.labels)

    def loss_of(self, values: torch.Tensor, labels: torch.Tensor) -> LossSum:
        """The loss of given values."""
        errors = self._errors(values, labels)
        return LossSum(errors.square().sum(), float(len(errors)))

    def sample_metrics(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Squared and absolute errors."""
        assert batch.labels is not None
        return self.sample_metrics_of(_outputs(model, batch)[0], batch.labels)

    def sample_metrics_of(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As `sample_metrics`, of given values."""
        errors = self._errors(values, labels)
        return torch.stack([errors.square(), errors.abs(), torch.ones_like(errors)], dim=1)

    def _errors(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if values.dim() == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.shape != labels.shape:
            raise RequestError(
                f"task regress: the model gives {tuple(values.shape)} for {len(labels)} values; it must give one "
                "number per sample"
            )
        return (values if values.dtype == torch.float64 else values.float()) - labels


class ModelLoss(Objective):
    """The loss that a model computes in its method `training_loss(batch)`.

    The method returns the loss of each sample, or a pair (sum, weight), for example a sum over tokens and their number.
    """

    task = "own"
    metrics = ("loss",)
    counts_samples = False

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The model's loss; a mean is refused, since means of micro-batches do not add up."""
        losses: Any = model.training_loss(batch.inputs)  # type: ignore[operator]
        if isinstance(losses, tuple) and len(losses) == 2:
            return LossSum(losses[0], losses[1])
        if isinstance(losses, torch.Tensor) and losses.dim() == 1:
            return LossSum(losses.sum(), float(len(losses)))
        raise RequestError(
            f"{type(model).__name__}.training_loss must give the loss of each sample, [samples], or a pair (sum, "
            "weight); a mean cannot be accumulated over micro-batches"
        )

    def sample_metrics(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The batch's sum and weight divided evenly among its samples: only the totals are known."""
        summed, samples = self.loss(model, batch), _length(batch.inputs)
        total = summed.total.detach().reshape(1)
        weight = torch.as_tensor(summed.weight, dtype=total.dtype, device=total.device).reshape(1)
        return (torch.stack([total, weight], dim=1) / samples).expand(samples, 2)


def choose_monitor(asked: str, objective: Objective, *, validated: bool) -> str:
    """The metric that best weights and early stopping go by, from `training.monitor`."""
    metrics, monitor = objective.metrics, asked.removeprefix("val_")
    if monitor == "auto":
        best = (metric for metric in metrics if metric in objective.higher_is_better)
        monitor = next(best, "loss") if validated else "loss"
    if monitor not in metrics:
        raise RequestError(
            f"training.monitor {asked}: there are auto, {', '.join(metrics)}{nearest_names(monitor, metrics)}"
        )
    if monitor != "loss" and not validated:
        raise RequestError(f"training.monitor {asked}: there is no validation; use loss")
    return monitor


def _outputs(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Scores or values, those of auxiliary classifiers last; transformers wraps them in an object."""
    output: Any = model(**batch.inputs) if isinstance(batch.inputs, dict) else model(batch.inputs)
    if hasattr(output, "logits") and not isinstance(output, tuple):
        return [output.logits]
    if isinstance(output, torch.Tensor):
        return [output]
    return [part for part in output if part is not None]


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    return replaced(value, torch.Tensor, lambda one: moved(one, device, dtype if one.is_floating_point() else None))


def _length(inputs: Any) -> int:
    if isinstance(inputs, dict):
        return _length(next(iter(inputs.values())))
    if isinstance(inputs, (list, tuple)):
        return _length(inputs[0])
    return len(inputs)
