"""What is learnt where the answer is a mask or a set of boxes: segmentation and detection as torchvision has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.models.vision import AUXILIARY_WEIGHT, IGNORED
from brim.training.objective import Batch, LossSum, Objective
from brim.workloads.base import in_mode

__all__ = ["Detection", "Segmentation"]


class Segmentation(Objective):
    """Cross entropy over the pixels of a picture; the mean over classes of intersection over union.

    Every picture counts the same: its loss is the mean over its pixels that have a class. A class's intersection and
    union are summed over all pictures before they are divided, and classes that do not occur are left out.
    """

    task = "segment"
    figures = ("loss", "mean_iou")
    higher_is_better = frozenset({"mean_iou"})

    def __init__(self, classes: int) -> None:
        self.classes = classes

    @property
    def columns(self) -> int:
        """Loss, intersections, unions, weight."""
        return 2 + 2 * self.classes

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The side branch, where the model has one, counts half."""
        assert batch.labels is not None
        outputs: Any = model(batch.inputs)
        total = _pixel_losses(outputs["out"], batch.labels).sum()
        if "aux" in outputs:
            total = total + AUXILIARY_WEIGHT * _pixel_losses(outputs["aux"], batch.labels).sum()
        return LossSum(total, float(len(batch.labels)))

    def judge(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Every picture's loss, and how many pixels of each class are right, and are found or are there."""
        assert batch.labels is not None
        scores: torch.Tensor = model(batch.inputs)["out"]  # [pictures, classes, height, width]
        found, known = scores.argmax(dim=1), batch.labels != IGNORED
        rows = []
        for loss, answer, mask, kept in zip(
            _pixel_losses(scores, batch.labels), found, batch.labels, known, strict=True
        ):
            pairs = torch.bincount(mask[kept] * self.classes + answer[kept], minlength=self.classes**2)
            table = pairs.view(self.classes, self.classes).to(loss.dtype)  # [right class, found class]
            right = table.diagonal()
            union = table.sum(dim=0) + table.sum(dim=1) - right
            rows.append(torch.cat([loss[None], right, union, torch.ones_like(loss)[None]]))
        return torch.stack(rows)

    def figures_of(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean loss, and the mean over the classes that occur."""
        right, union = sums[1 : 1 + self.classes], sums[1 + self.classes : 1 + 2 * self.classes]
        shares = [one / of for one, of in zip(right, union, strict=True) if of > 0]
        return {"loss": sums[0] / sums[-1], "mean_iou": sum(shares) / max(len(shares), 1)}


class Detection(Objective):
    """The sum of the losses that a detection model computes itself, from (pictures, targets).

    A model gives means over a micro-batch; they count as many times as it has pictures. Validation has the same loss
    and no average precision.
    """

    task = "detect"
    figures = ("loss",)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """As the model computes it in training mode."""
        pictures, targets = batch.inputs
        losses: dict[str, torch.Tensor] = model(pictures, targets)
        mean = torch.stack([loss.reshape(()) for loss in losses.values()]).sum()
        return LossSum(mean * len(pictures), float(len(pictures)))

    def judge(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The micro-batch's loss, spread evenly over its pictures."""
        pictures = batch.inputs[0]
        devices = [pictures[0].device] if pictures[0].device.type == "cuda" else []
        with _losses_in_evaluation(model), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)  # which anchors are compared is drawn: the same ones in every epoch
            mean = self.loss(model, batch).total.detach().float() / len(pictures)
        return torch.stack([mean, torch.ones_like(mean)]).expand(len(pictures), 2)


def _pixel_losses(scores: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The mean over each picture's pixels that have a class, [pictures]."""
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    losses = functional.cross_entropy(scores, masks, ignore_index=IGNORED, reduction="none")  # 0 where ignored
    known = (masks != IGNORED).flatten(1).sum(dim=1).clamp(min=1)
    return losses.flatten(1).sum(dim=1) / known


@contextlib.contextmanager
def _losses_in_evaluation(model: nn.Module) -> Iterator[None]:
    """In training mode, since only then these models give losses, but with nothing that a forward changes or draws."""
    with in_mode(model, training=True):
        for module in model.modules():
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
                module.training = False
        yield
