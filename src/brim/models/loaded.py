"""A model ready to evaluate: on its device, with what turns samples into its inputs. Knows no library by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

__all__ = ["LoadRequest", "LoadedModel", "ModelKind"]

ModelKind = Literal[
    "language", "seq2seq", "vision_language", "text_classifier", "image_classifier", "video_classifier", "function"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Which model, where, and how precise; `weights` is auto (the published ones), none (random) or a file."""

    model: str
    device: torch.device
    dtype: torch.dtype | None = None  # None: the model's own
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = "auto"
    classes: int | None = None  # outputs of a classifier, where a file of weights has another number of them
    trust_remote_code: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model in evaluation mode and its way of reading.

    `transform` turns a decoded picture or clip into one input tensor; it and `tokenizer`, `processor` run in worker
    processes. `module` is a plain function for the kind `function`: samples in, answers out.
    """

    name: str
    kind: ModelKind
    module: Any
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any = None
    processor: Any = None
    transform: Callable[[Any], torch.Tensor] | None = None
    class_names: tuple[str, ...] = ()
    frames: int | None = None  # in a clip
    positions: int | None = None  # tokens that prompt and answer may have together
    processor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every call, by its knobs
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
