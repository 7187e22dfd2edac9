"""What a baseline is: fitted to in-distribution rows, it scores others; the higher, the further out."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from brim.molecules.baselines.classifier import Classifier
from brim.molecules.parts import FeatureSet

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Baseline"]


class Baseline(abc.ABC):
    """A detector of one name."""

    name: ClassVar[str]
    uses_classifier: ClassVar[bool] = False  # a classifier of each seed; the others have no seed

    @abc.abstractmethod
    def fit(self, features: FeatureSet, classifier: Classifier | None) -> None:
        """Learn what in-distribution rows look like."""

    @abc.abstractmethod
    def scores(self, rows: torch.Tensor) -> npt.NDArray[Any]:
        """One number for each row; higher means further out."""
