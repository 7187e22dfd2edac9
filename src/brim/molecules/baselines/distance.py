"""Detectors that measure how far a row lies from in-distribution training rows: mahalanobis, knn, lof.

None of them has a seed: they come out the same every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from brim.errors import RequestError
from brim.molecules.baselines.base import Baseline
from brim.molecules.baselines.classifier import Classifier
from brim.molecules.baselines.scikit_learn import scikit_learn
from brim.molecules.parts import FeatureSet

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["LocalOutlierFactor", "Mahalanobis", "NearestNeighbours"]

NEIGHBOURS_KNN, NEIGHBOURS_LOF = 50, 20  # as in their papers and in scikit-learn


class Mahalanobis(Baseline):
    """The squared Mahalanobis distance to the nearest class mean, under one covariance for all (Lee et al., 2018).

    Classes are the data's labels, or there is one class. The covariance is shrunk after Ledoit and Wolf: features are
    often more than rows.
    """

    name = "mahalanobis"

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        del classifier
        covariances = scikit_learn("covariance")
        rows = features.features["train_in"].double()
        labels = [str(label) for label in features.labels["train_in"]] if features.labels is not None else None
        groups = [list(range(len(rows)))]
        if labels is not None:
            groups = [[row for row, label in enumerate(labels) if label == one] for one in sorted(set(labels))]
        self._means = torch.stack([rows[group].mean(0) for group in groups])
        centred = rows.clone()
        for mean, group in zip(self._means, groups, strict=True):
            centred[group] -= mean
        fitted = covariances.LedoitWolf(assume_centered=True).fit(centred.numpy())
        self._precision = torch.from_numpy(fitted.precision_)

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        distances = []
        for mean in self._means:
            apart = rows.double() - mean
            distances.append(((apart @ self._precision) * apart).sum(-1))
        return torch.stack(distances).amin(0).numpy()


class NearestNeighbours(Baseline):
    """The distance to the fiftieth nearest training row, all rows scaled to length one (Sun et al., 2022)."""

    name = "knn"

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        del classifier
        rows = features.features["train_in"]
        self._count = min(NEIGHBOURS_KNN, len(rows))
        self._index = scikit_learn("neighbors").NearestNeighbors(n_neighbors=self._count, algorithm="brute")
        self._index.fit(functional.normalize(rows).numpy())

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        distances, _ = self._index.kneighbors(functional.normalize(rows).numpy())
        furthest: npt.NDArray[Any] = distances[:, self._count - 1]
        return furthest


class LocalOutlierFactor(Baseline):
    """How much thinner the training rows are around a row than around its neighbours (Breunig et al., 2000)."""

    name = "lof"

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        del classifier
        rows = features.features["train_in"]
        count = min(NEIGHBOURS_LOF, len(rows) - 1)
        if count < 1:
            raise RequestError(f"{features.name}: lof needs at least two in-distribution rows to learn from")
        self._model = scikit_learn("neighbors").LocalOutlierFactor(n_neighbors=count, novelty=True)
        self._model.fit(rows.numpy())

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        outlying: npt.NDArray[Any] = -self._model.score_samples(rows.numpy())
        return outlying
