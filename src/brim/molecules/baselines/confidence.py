"""Detectors that ask a classifier how sure it is: msp, energy, odin, mc_dropout."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.molecules.baselines.base import Baseline
from brim.molecules.baselines.classifier import Classifier
from brim.molecules.parts import FeatureSet

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["LogitEnergy", "MaximumSoftmax", "McDropout", "Odin"]

PASS_ROWS = 16_384


class _Confidence(Baseline):
    uses_classifier = True

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        assert classifier is not None
        self.classifier = classifier
        self.spread = float(features.features["train_in"].std())

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        found = [self.of(part.to(self.classifier.device)).detach().cpu() for part in rows.split(PASS_ROWS)]
        return torch.cat(found).numpy()

    @abc.abstractmethod
    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Scores of rows on the classifier's device."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.classifier.module(rows)
        return result.double() if rows.device.type != "mps" else result.float()


class MaximumSoftmax(_Confidence):
    """One less the largest class probability (Hendrycks and Gimpel, 2017)."""

    name = "msp"

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return 1 - self.logits(rows).softmax(-1).amax(-1)


class LogitEnergy(_Confidence):
    """The free energy of the logits, −log Σ exp (Liu et al., 2020); temperature 1."""

    name = "energy"

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return -self.logits(rows).logsumexp(-1)


class Odin(_Confidence):
    """The largest probability at temperature 1,000, after a small step of the row towards it (Liang et al., 2018).

    The step is 0.0014 standard deviations of the features in each direction, the paper's own on normalised pictures.
    """

    name = "odin"
    temperature = 1000.0
    step = 0.0014

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone().requires_grad_()
        surest = (self.logits(rows) / self.temperature).log_softmax(-1).amax(-1)
        (gradient,) = torch.autograd.grad(surest.sum(), rows)
        moved = rows.detach() + self.step * self.spread * gradient.sign()
        with torch.no_grad():
            return 1 - (self.logits(moved) / self.temperature).softmax(-1).amax(-1)


class McDropout(_Confidence):
    """The entropy of the mean prediction over thirty passes with dropout on (Gal and Ghahramani, 2016)."""

    name = "mc_dropout"
    draws = 30

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        module = self.classifier.module
        dropouts = [part for part in module.modules() if isinstance(part, nn.Dropout)]
        devices = [rows.device] if rows.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.classifier.seed)
            try:
                for part in dropouts:
                    part.train()
                drawn = [self.logits(rows).softmax(-1) for _ in range(self.draws)]
            finally:
                module.eval()
            mean = torch.stack(drawn).mean(0)
            return -(mean * mean.clamp_min(1e-300).log()).sum(-1)
