"""The detector that knows as much as an energy head does: a linear classifier of in against out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from brim.molecules.baselines.base import Baseline
from brim.molecules.baselines.classifier import Classifier
from brim.molecules.baselines.scikit_learn import scikit_learn
from brim.molecules.parts import FeatureSet

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["InOrOut"]


class InOrOut(Baseline):
    """Logistic regression of out-of-distribution on both training parts: what a head must beat to earn its layers."""

    name = "logistic"

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        del classifier
        sides = [features.features["train_in"], features.features["train_out"]]
        labels = torch.cat([torch.full((len(rows),), side) for side, rows in enumerate(sides)])
        self._model = scikit_learn("linear_model").LogisticRegression(max_iter=2000, class_weight="balanced")
        self._model.fit(torch.cat(sides).numpy(), labels.numpy())

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._model.decision_function(rows.numpy())
        return found
