"""Heads: the model `mlp` on features, and the last layer of a classifier replaced for other classes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import DoesNotFitError, RequestError, nearest_names
from brim.monitor.host import available_host_bytes
from brim.settings.sizes import format_bytes

__all__ = ["MOST_WIDTH", "FeatureHead", "make_feature_head", "refuse_too_wide", "replace_head"]

MOST_WIDTH = 2**31 - 1
_DEFAULTS: Mapping[str, Any] = {"hidden": [512, 256], "dropout": 0.0, "standardise": True}
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)  # heads of SqueezeNet and S3D


class FeatureHead(nn.Module):
    """Linear layers from features [n, d] to outputs [n, k]; its weights include the features' mean and deviation."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, features: int, hidden: Sequence[int], outputs: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))
        layers: list[nn.Module] = []
        width = features
        for next_width in hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
            width = next_width
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def standardise(self, rows: torch.Tensor) -> None:
        """Take mean and deviation from the training rows; a constant column keeps a deviation of 1."""
        deviation, mean = torch.std_mean(rows.double(), dim=0, correction=0)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 0, deviation, torch.ones_like(deviation)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scores or values."""
        outputs: torch.Tensor = self.layers((rows - self.mean) / self.deviation)
        return outputs


def make_feature_head(rows: torch.Tensor, outputs: int, params: Mapping[str, Any]) -> FeatureHead:
    """The model `mlp` for these rows, with the settings of `model.params`."""
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
    """Refuse layers whose weights exceed the free host memory, before they are allocated."""
    needed = sum(width * next_width for width, next_width in itertools.pairwise(widths)) * dtype.itemsize
    available = available_host_bytes()
    if needed > available:
        raise DoesNotFitError(
            f"{setting} {list(widths[1:-1])}: the weights alone take {format_bytes(needed)}, and the host has "
            f"{format_bytes(available)} free; give smaller widths"
        )


def replace_head(model: nn.Module, outputs: int) -> str | None:
    """Replace the last layer where it has another number of outputs; returns a note, or None without a change."""
    heads = [(path, module) for path, module in model.named_modules() if _head_outputs(module) is not None]
    if not heads:
        raise RequestError(
            f"{type(model).__name__} has no linear layer whose outputs could be the classes; use py:FILE:FACTORY"
        )
    before = _head_outputs(heads[-1][1])
    if before == outputs:
        return None
    if hasattr(model, "reset_classifier"):  # timm's method
        model.reset_classifier(outputs)  # type: ignore[operator]
    else:
        last_path, last = heads[-1]
        for path, module in heads:
            if _head_outputs(module) == before and type(module) is type(last) and _ends_branch(path, last_path):
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, _resized(module, outputs))
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "num_labels"):
        config.num_labels = outputs
        if hasattr(model, "num_labels"):
            vars(model)["num_labels"] = outputs
    return f"the head had {before} outputs and was replaced by one with {outputs}"


def _ends_branch(path: str, last: str) -> bool:
    """Whether a layer is the last of the model or of a side branch (`AuxLogits.fc` beside `fc`)."""
    return path == last or path.rpartition(".")[2] == last.rpartition(".")[2]


def _head_outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, _CONVOLUTIONS) else None


def _resized(module: nn.Module, outputs: int) -> nn.Module:
    if isinstance(module, nn.Linear):
        return nn.Linear(module.in_features, outputs, bias=module.bias is not None)
    assert isinstance(module, _CONVOLUTIONS)
    options = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation")}
    return type(module)(module.in_channels, outputs, bias=module.bias is not None, **options)
