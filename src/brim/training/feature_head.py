"""The model `mlp`: layers on features, with the features' own mean and deviation in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import DoesNotFitError, RequestError, nearest_names
from brim.monitor.host import available_host_bytes
from brim.settings.sizes import format_bytes

__all__ = ["MOST_WIDTH", "FeatureHead", "make_feature_head", "refuse_too_wide"]

MOST_WIDTH = 2**31 - 1
_DEFAULTS: Mapping[str, Any] = {"hidden": [512, 256], "dropout": 0.0, "standardise": True}


class FeatureHead(nn.Module):
    """Features [n, d] to outputs [n, k]; weights saved with it bring the standardisation along."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, features: int, hidden: Sequence[int], outputs: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))
        layers: list[nn.Module] = []
        width = features
        for following in hidden:
            layers += [nn.Linear(width, following), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
            width = following
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def standardise(self, rows: torch.Tensor) -> None:
        """Take mean and deviation from the training rows; a column that never changes is left as it is."""
        deviation, mean = torch.std_mean(rows.double(), dim=0, correction=0)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 0, deviation, torch.ones_like(deviation)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scores or values."""
        outputs: torch.Tensor = self.layers((rows - self.mean) / self.deviation)
        return outputs


def make_feature_head(rows: torch.Tensor, outputs: int, params: Mapping[str, Any]) -> FeatureHead:
    """The model for these rows, as `model.params` asks."""
    for name in params:
        if name not in _DEFAULTS:
            has = ", ".join(_DEFAULTS)
            raise RequestError(f"model.params.{name}: mlp takes {has}{nearest_names(name, _DEFAULTS)}")
    wanted = {**_DEFAULTS, **params}
    hidden = wanted["hidden"]
    if not isinstance(hidden, list) or not all(_is_width(width) for width in hidden):
        raise RequestError(f"model.params.hidden {hidden!r}: give a list of widths, such as [512, 256]")
    if not isinstance(wanted["dropout"], (int, float)) or not 0 <= wanted["dropout"] < 1:
        raise RequestError(f"model.params.dropout {wanted['dropout']!r}: give a fraction from 0 to below 1")
    if not isinstance(wanted["standardise"], bool):
        raise RequestError(f"model.params.standardise {wanted['standardise']!r}: it must be true or false")
    refuse_too_wide([rows.shape[1], *hidden, outputs], rows.dtype, setting="model.params.hidden")
    head = FeatureHead(rows.shape[1], hidden, outputs, dropout=float(wanted["dropout"]))
    if wanted["standardise"]:
        head.standardise(rows)
    return head


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_WIDTH


def refuse_too_wide(widths: Sequence[int], dtype: torch.dtype, *, setting: str) -> None:
    """Refuse weights that the host cannot hold before they are allocated."""
    needed = sum(one * other for one, other in itertools.pairwise(widths)) * dtype.itemsize
    available = available_host_bytes()
    if needed > available:
        raise DoesNotFitError(
            f"{setting} {list(widths[1:-1])}: the weights alone take {format_bytes(needed)}, and the host has "
            f"{format_bytes(available)} free; give smaller widths"
        )
