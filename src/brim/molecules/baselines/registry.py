"""Baselines by name."""

from __future__ import annotations

from brim.errors import RequestError, nearest_names
from brim.molecules.baselines.base import Baseline
from brim.molecules.baselines.confidence import LogitEnergy, MaximumSoftmax, McDropout, Odin
from brim.molecules.baselines.distance import LocalOutlierFactor, Mahalanobis, NearestNeighbours
from brim.molecules.baselines.supervised import InOrOut
from brim.settings.caller import given
from brim.settings.ood_settings import BASELINES

__all__ = ["baseline"]

_KINDS: dict[str, type[Baseline]] = {
    kind.name: kind
    for kind in (
        MaximumSoftmax, LogitEnergy, Odin, Mahalanobis, NearestNeighbours, LocalOutlierFactor, McDropout, InOrOut,
    )
}  # fmt: skip


def baseline(name: str) -> Baseline:
    """A fresh baseline; an unknown name is a `RequestError`."""
    if name not in _KINDS:
        raise RequestError(
            f"{given('baselines', name)}: it must be some of {','.join(BASELINES)}{nearest_names(name, BASELINES)}"
        )
    return _KINDS[name]()
