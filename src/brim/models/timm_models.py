"""timm's image models. The only file that imports timm, on use."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError, first_line, nearest_names
from brim.models.base import LoadedModel, LoadRequest, ModelParts, PartsRequest
from brim.models.vision import classifier_parts
from brim.settings.caller import written
from brim.workloads.knobs import Knob

__all__ = ["build_parts", "load", "model_knobs", "model_names"]


def model_names() -> tuple[str, ...]:
    """Every architecture timm registers."""
    if importlib.util.find_spec("timm") is None:
        return ()
    return tuple(_timm().list_models())


def model_knobs(name: str) -> tuple[Knob, ...]:
    """`size`, with the size of the model's own configuration as default."""
    size = _configuration(name).input_size[-1]
    return (Knob(name="size", default=size, help="height and width of the input in pixels", minimum=1),)


def build_parts(request: PartsRequest) -> ModelParts:
    """The model with random weights, and batches [n, channels, size, size]."""
    configuration = _configuration(request.name)
    channels, _, default = configuration.input_size
    size = request.knobs["size"]
    # A model with a fixed input size (position embeddings, windows) needs another one as an argument.
    options = {"img_size": size} if configuration.fixed_input_size and size != default else {}

    def build() -> nn.Module:
        model: nn.Module = _timm().create_model(request.name, pretrained=False, **options)
        return model

    return classifier_parts(build, (channels, size, size), request, owner=f"timm:{request.name}")


def load(name: str, request: LoadRequest) -> LoadedModel:
    """The model for evaluation, with timm's published weights unless the request names others."""
    timm = _timm()
    pretrained, size = request.weights == "auto", request.knobs.get("size")
    options = {"img_size": size} if size is not None and _configuration(name).fixed_input_size else {}
    if request.classes is not None:
        options["num_classes"] = request.classes
    try:
        module = timm.create_model(name, pretrained=pretrained, **options)
    except (OSError, RuntimeError, ValueError) as error:  # no network, no published weights
        reason = first_line(error)
        raise RequestError(
            f"timm:{name}: its published weights cannot be loaded ({reason}); give a file with "
            f"{written('weights', 'FILE')}, or {written('weights', 'none')} for random ones"
        ) from error
    asked = {} if size is None else {"input_size": (_configuration(name).input_size[0], size, size)}
    settings = timm.data.resolve_data_config(asked, model=module)
    return LoadedModel(
        name=f"timm:{name}",
        kind="image_classifier",
        module=module,
        device=request.device,
        dtype=request.dtype or torch.float32,
        transform=timm.data.create_transform(**settings, is_training=False),
        identity={"weights": "published" if pretrained else "random"},
        notes=() if pretrained else (f"random weights: timm:{name}",),
    )


def _configuration(name: str) -> Any:
    timm = _timm()
    if not timm.is_model(name):
        known = timm.list_models()
        raise RequestError(f"timm:{name}: timm has no such model{nearest_names(name, known)}")
    return timm.get_pretrained_cfg(name)


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise RequestError(f"timm models need timm ({error}): pip install 'brim[vision]'") from error
    return timm
