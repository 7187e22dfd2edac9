"""The detectors that people compare with, on the same features, by name.

Fitted to in-distribution rows, a baseline scores others; the higher, the further out. Four use a classifier of
in-distribution rows how sure it is (msp, energy, odin, mc_dropout), three measure how far a row lies from the training
rows (mahalanobis, knn, lof; they have no seed), and one is a linear classifier of in against out (logistic).
"""

from __future__ import annotations

import abc
import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from brim.errors import RequestError, nearest_names
from brim.molecules.data_sets import FeatureSet
from brim.molecules.heads import Classifier, ClassLabels
from brim.settings.caller import given
from brim.settings.molecule_settings import BASELINES

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Baseline", "baseline", "class_labels"]

NEIGHBOURS_KNN, NEIGHBOURS_LOF = 50, 20  # as in their papers and in scikit-learn
CLASSIFIER_ROWS = 16_384  # in one pass of a classifier
CLUSTERS = 10
ROWS_PER_CLASS = 10


class Baseline(abc.ABC):
    """A detector of one name."""

    name: ClassVar[str]
    uses_classifier: ClassVar[bool] = False  # one classifier for each seed; baselines without it have no seed

    @abc.abstractmethod
    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        """Learn what in-distribution rows look like."""

    @abc.abstractmethod
    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        """One number for each row; higher means further out."""


class _Confidence(Baseline):
    uses_classifier = True

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        assert classifier is not None
        self.classifier = classifier
        self.spread = float(features.features["train_in"].std())

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        found = [self.of(part.to(self.classifier.device)).detach().cpu() for part in rows.split(CLASSIFIER_ROWS)]
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


class Mahalanobis(Baseline):
    """The squared Mahalanobis distance to the nearest class mean, under one covariance for all (Lee et al., 2018).

    Classes are the data's labels, or there is one class. The covariance is shrunk after Ledoit and Wolf: features are
    often more than rows.
    """

    name = "mahalanobis"

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        del classifier
        covariances = _scikit_learn("covariance")
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
        self._index = _scikit_learn("neighbors").NearestNeighbors(n_neighbors=self._count, algorithm="brute")
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
        self._model = _scikit_learn("neighbors").LocalOutlierFactor(n_neighbors=count, novelty=True)
        self._model.fit(rows.numpy())

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        outlying: npt.NDArray[Any] = -self._model.score_samples(rows.numpy())
        return outlying


class Logistic(Baseline):
    """Logistic regression of out-of-distribution on both training parts: what a head must beat to earn its layers."""

    name = "logistic"

    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        del classifier
        sides = [features.features["train_in"], features.features["train_out"]]
        labels = torch.cat([torch.full((len(rows),), side) for side, rows in enumerate(sides)])
        self._model = _scikit_learn("linear_model").LogisticRegression(max_iter=2000, class_weight="balanced")
        self._model.fit(torch.cat(sides).numpy(), labels.numpy())

    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._model.decision_function(rows.numpy())
        return found


_BASELINES: dict[str, type[Baseline]] = {
    kind.name: kind
    for kind in (
        MaximumSoftmax, LogitEnergy, Odin, Mahalanobis, NearestNeighbours, LocalOutlierFactor, McDropout, Logistic,
    )
}  # fmt: skip


def baseline(name: str) -> Baseline:
    """A fresh baseline; an unknown name is a `RequestError`."""
    if name not in _BASELINES:
        raise RequestError(
            f"{given('baselines', name)}: it must be some of {','.join(BASELINES)}{nearest_names(name, BASELINES)}"
        )
    return _BASELINES[name]()


def class_labels(features: FeatureSet) -> ClassLabels:
    """The classes of in-distribution rows, for the classifier that four of the baselines ask.

    They are the labels of the molecules where the data has them, else ten clusters of the training features (k-means),
    so that those baselines keep their meaning: a classifier of in-distribution rows that is unsure about others.
    """
    rows = features.features["train_in"].numpy()
    if features.labels is not None:
        train, val = ([str(label) for label in features.labels[part]] for part in ("train_in", "val_in"))
        numbers = {name: number for number, name in enumerate(sorted({*train, *val}))}
        if 1 < len(numbers) <= max(2, len(rows) // ROWS_PER_CLASS):  # else they are measurements, not classes
            known = [torch.tensor([numbers[name] for name in names]) for names in (train, val)]
            return ClassLabels(train=known[0], validation=known[1], origin="labels")
    clusters = min(CLUSTERS, len(rows) // 2)
    if clusters < 2:
        raise RequestError(f"{features.name}: {len(rows)} in-distribution rows are too few for a classifier")
    model = _scikit_learn("cluster").KMeans(n_clusters=clusters, n_init=3, random_state=0).fit(rows)
    return ClassLabels(
        train=torch.from_numpy(model.labels_).long(),
        validation=torch.from_numpy(model.predict(features.features["val_in"].numpy())).long(),
        origin=f"{clusters} clusters",
    )


def _scikit_learn(module: str) -> Any:
    """A module of scikit-learn; where it is not installed, an error that names the extra."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise RequestError(f"baselines need scikit-learn ({error}): pip install 'brim[molecules]'") from error
