"""What is learnt: the loss of a micro-batch as a sum with its weight, and the figures of validation.

Losses are kept as sums, never as means: the sums of micro-batches add up to the sum of the whole window, and one
division by the window's weight (samples, or tokens) at the end gives the gradient of the single big batch.
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

__all__ = ["Batch", "Classification", "LossSum", "Objective", "OwnLoss", "Regression", "choose_monitor"]

_AUXILIARY_WEIGHT = 0.3  # of further classifiers in a model's side branches (GoogLeNet, Inception)
_MOST_RANKS = 5


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a model reads (a tensor, or tensors by name) and what it should answer."""

    inputs: Any
    labels: torch.Tensor | None

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """On its way to the device, in `dtype` where it is fractional; from pinned memory the host does not wait."""
        return Batch(_sent(self.inputs, device, dtype), _sent(self.labels, device, None))


@dataclasses.dataclass(frozen=True)
class LossSum:
    """The sum of the losses of a batch, and what the sum over a window is divided by."""

    total: torch.Tensor  # with its graph
    weight: torch.Tensor | float  # samples, or tokens


class Objective(abc.ABC):
    """How a model is judged."""

    task: str
    figures: tuple[str, ...]  # of validation
    counts_samples = True  # whether a sum's weight is the number of its samples, known before it is computed
    higher_is_better: frozenset[str] = frozenset({"top1", "top5"})

    @property
    def columns(self) -> int:
        """How many numbers `judge` gives for a sample: its figures and its weight."""
        return len(self.figures) + 1

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The loss of a micro-batch, ready for its backward."""

    @abc.abstractmethod
    def judge(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Every sample's figures and its weight, [samples, columns], to be summed over all samples."""

    def figures_of(self, sums: Sequence[float]) -> dict[str, float]:
        """The figures of validation from the sums of the columns: each a mean, unless an objective says otherwise."""
        return {name: value / sums[-1] for name, value in zip(self.figures, sums, strict=False)}


class Classification(Objective):
    """Cross entropy; the share of samples whose class is the best, or among the best five."""

    task = "classify"

    def __init__(self, classes: int, *, label_smoothing: float = 0.0) -> None:
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.figures = ("loss", "top1", "top5") if classes > _MOST_RANKS else ("loss", "top1")

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Label smoothing is a sum over samples like the rest."""
        assert batch.labels is not None
        main, *others = _outputs(model, batch)
        found = self.loss_of(main, batch.labels)
        total = found.total
        for other in others:
            total = total + _AUXILIARY_WEIGHT * self._cross_entropy(other, batch.labels, "sum")
        return LossSum(total, found.weight)

    def loss_of(self, scores: torch.Tensor, labels: torch.Tensor) -> LossSum:
        """The loss of scores [samples, classes] that a model has given."""
        return LossSum(self._cross_entropy(scores, labels, "sum"), float(len(labels)))

    def judge(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss as in training, and whether the class is the best or among the best five."""
        assert batch.labels is not None
        return self.judge_of(_outputs(model, batch)[0], batch.labels)

    def judge_of(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As `judge`, of scores that a model has given."""
        loss = self._cross_entropy(scores, labels, "none")
        ranked = scores.topk(min(_MOST_RANKS, scores.shape[1]), dim=1).indices  # [samples, ranks]
        hits = ranked == labels[:, None]
        columns = [loss, hits[:, 0].to(loss.dtype), hits.any(dim=1).to(loss.dtype)]
        return torch.stack([*columns[: len(self.figures)], torch.ones_like(loss)], dim=1)

    def _cross_entropy(self, scores: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return functional.cross_entropy(scores, labels, reduction=reduction, label_smoothing=self.label_smoothing)


class Regression(Objective):
    """Squared error; the mean absolute error beside it."""

    task = "regress"
    figures = ("loss", "mae")

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The sum of squared errors."""
        assert batch.labels is not None
        return self.loss_of(_outputs(model, batch)[0], batch.labels)

    def loss_of(self, values: torch.Tensor, labels: torch.Tensor) -> LossSum:
        """The loss of values that a model has given."""
        errors = self._errors(values, labels)
        return LossSum(errors.square().sum(), float(len(errors)))

    def judge(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Squared and absolute errors."""
        assert batch.labels is not None
        return self.judge_of(_outputs(model, batch)[0], batch.labels)

    def judge_of(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As `judge`, of values that a model has given."""
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


class OwnLoss(Objective):
    """A model that computes its loss itself, in a method `training_loss(batch)`.

    It gives the loss of each sample, or a pair (sum, weight), as a language model does that counts tokens.
    """

    task = "own"
    figures = ("loss",)
    counts_samples = False

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """As the model says; a mean is refused, since means of micro-batches do not add up."""
        found: Any = model.training_loss(batch.inputs)  # type: ignore[operator]
        if isinstance(found, tuple) and len(found) == 2:
            return LossSum(found[0], found[1])
        if isinstance(found, torch.Tensor) and found.dim() == 1:
            return LossSum(found.sum(), float(len(found)))
        raise RequestError(
            f"{type(model).__name__}.training_loss must give the loss of each sample, [samples], or a pair (sum, "
            "weight); a mean cannot be accumulated over micro-batches"
        )

    def judge(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The batch's sum and weight, spread evenly over its samples: only their totals are known."""
        found, samples = self.loss(model, batch), _length(batch.inputs)
        total = found.total.detach().reshape(1)
        weight = torch.as_tensor(found.weight, dtype=total.dtype, device=total.device).reshape(1)
        return (torch.stack([total, weight], dim=1) / samples).expand(samples, 2)


def choose_monitor(asked: str, objective: Objective, *, validated: bool) -> str:
    """The figure that best weights and early stopping go by, as `training.monitor` asks."""
    figures, monitor = objective.figures, asked.removeprefix("val_")
    if monitor == "auto":
        best = (figure for figure in figures if figure in objective.higher_is_better)
        monitor = next(best, "loss") if validated else "loss"
    if monitor not in figures:
        raise RequestError(
            f"training.monitor {asked}: there are auto, {', '.join(figures)}{nearest_names(monitor, figures)}"
        )
    if monitor != "loss" and not validated:
        raise RequestError(f"training.monitor {asked}: there is no validation; use loss")
    return monitor


def _outputs(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Scores or values of the main branch first; transformers wraps them in an object."""
    output: Any = model(**batch.inputs) if isinstance(batch.inputs, dict) else model(batch.inputs)
    if hasattr(output, "logits") and not isinstance(output, tuple):
        return [output.logits]
    if isinstance(output, torch.Tensor):
        return [output]
    return [part for part in output if part is not None]


def _sent(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    return replaced(value, torch.Tensor, lambda one: moved(one, device, dtype if one.is_floating_point() else None))


def _length(inputs: Any) -> int:
    if isinstance(inputs, dict):
        return _length(next(iter(inputs.values())))
    if isinstance(inputs, (list, tuple)):
        return _length(inputs[0])
    return len(inputs)
