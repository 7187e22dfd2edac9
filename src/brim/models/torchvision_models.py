"""torchvision's image and video classifiers. The only file that imports torchvision, on use."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError, first_line, nearest_names
from brim.models.classification import classifier_parts
from brim.models.loaded import LoadedModel, LoadRequest
from brim.models.parts import ModelParts, PartsRequest
from brim.workloads.knobs import Knob

__all__ = ["build_parts", "load", "model_knobs", "model_names"]

_SMALL_VIDEO = ("mc3_18", "r2plus1d_18", "r3d_18")  # trained at 112
_FRAMES = 16  # in a clip
_MAXVIT_STEP = 224  # 7 windows × 32 strides: every stage must divide into whole windows


def model_names() -> tuple[str, ...]:
    """Every model torchvision registers, video first, then image, then the kinds brim does not build itself."""
    if importlib.util.find_spec("torchvision") is None:
        return ()
    models = _models()
    own = (*models.list_models(module=models.video), *models.list_models(module=models))
    return (*own, *(name for name in models.list_models() if name not in own))


def model_knobs(name: str) -> tuple[Knob, ...]:
    """`size` for an image model; `frames` and `size` for a video model."""
    _check_name(name)
    size = Knob(
        name="size",
        default=_default_size(name),
        help="height and width of the input in pixels",
        minimum=1,
        multiple_of=_size_step(name),
    )
    if not _is_video(name):
        return (size,)
    frames = Knob(
        name="frames",
        default=_FRAMES,
        help="frames in a clip",
        minimum=1,
        multiple_of=2 if name.startswith("mvit") else 1,
    )
    return frames, size


def build_parts(request: PartsRequest) -> ModelParts:
    """The model with random weights, and batches [n, 3, size, size] or [n, 3, frames, size, size]."""
    name, size = request.name, request.knobs["size"]
    options = _options(name, size)

    def build() -> nn.Module:
        model: nn.Module = _models().get_model(name, weights=None, **options)
        if name.startswith("mvit_"):
            _set_clip_size(model, request.knobs["frames"], size)
        return model

    shape = (3, request.knobs["frames"], size, size) if _is_video(name) else (3, size, size)
    return classifier_parts(build, shape, request, owner=f"torchvision:{name}")


def load(name: str, request: LoadRequest) -> LoadedModel:
    """The model for evaluation, with torchvision's published weights unless others are asked for."""
    models = _models()
    published = _published(name) if request.weights == "auto" else None
    asked = request.knobs.get("size")
    size = asked or _default_size(name)
    frames = request.knobs.get("frames", _FRAMES) if _is_video(name) else None
    options = {} if published else _options(name, size)
    if request.classes is not None:
        options["num_classes"] = request.classes
    try:
        module = models.get_model(name, weights=published, **options)
    except (OSError, RuntimeError, ValueError) as error:  # no network, a proxy, a broken download
        reason = first_line(error)
        raise RequestError(
            f"torchvision:{name}: its published weights cannot be had ({reason}); give a file with --weights FILE, or "
            "--weights none for random ones"
        ) from error
    if published is None and name.startswith("mvit_") and frames is not None:
        _set_clip_size(module, frames, size)
    return LoadedModel(
        name=f"torchvision:{name}",
        kind="video_classifier" if _is_video(name) else "image_classifier",
        module=module,
        device=request.device,
        dtype=request.dtype or torch.float32,
        transform=_transform(name, published, asked),
        class_names=tuple(published.meta.get("categories", ())) if published is not None else (),
        frames=frames,
        identity={"weights": str(published) if published is not None else "random"},
        notes=() if published is not None else (f"random weights: torchvision:{name}",),
    )


def _published(name: str) -> Any:
    """The weights that torchvision recommends, or None where it has none."""
    return getattr(_models().get_model_weights(name), "DEFAULT", None)


def _transform(name: str, published: Any, size: int | None) -> Any:
    """What the published weights were trained with, at the size asked for; without such weights, the usual."""
    from torchvision.transforms._presets import ImageClassification, VideoClassification

    if published is not None and size is None:
        return published.transforms()
    size = size or _default_size(name)
    preset = VideoClassification if _is_video(name) else ImageClassification
    make = published.transforms if published is not None else preset
    if _is_video(name):
        return make(crop_size=(size, size), resize_size=(size, round(size * 4 / 3)))
    return make(crop_size=size, resize_size=round(size / 0.875))


def _options(name: str, size: int) -> dict[str, Any]:
    """Constructor arguments: some architectures are made for one input size."""
    if name.startswith("vit_"):
        return {"image_size": size}
    if name.startswith("maxvit_"):
        return {"input_size": (size, size)}
    if name in ("googlenet", "inception_v3"):
        return {"init_weights": False}  # their own initialisation takes half a minute; memory and speed do not differ
    return {}


def _set_clip_size(model: Any, frames: int, size: int) -> None:
    """Make an MViT one for clips of another size: its builders fix 16 frames of 224 pixels, its class does not.

    The positions are those of the patches, and everything after them follows; relative ones are interpolated.
    """
    positions = model.pos_encoding
    frame_stride, row_stride, column_stride = model.conv_proj.stride
    relative = getattr(positions, "spatial_pos", None) is None
    spatial_size = (size // row_stride, size // column_stride)
    model.pos_encoding = type(positions)(
        positions.class_token.shape[-1], spatial_size, frames // frame_stride, rel_pos_embed=relative
    )


def _default_size(name: str) -> int:
    if name in _SMALL_VIDEO:
        return 112
    return 299 if name == "inception_v3" else 224


def _size_step(name: str) -> int:
    if name.startswith("vit_"):
        return int(name.rpartition("_")[2])  # the patch size: vit_b_16, vit_h_14
    if name.startswith("maxvit_"):
        return _MAXVIT_STEP
    return 32 if name.startswith("mvit_") else 1


def _is_video(name: str) -> bool:
    models = _models()
    return name in models.list_models(module=models.video)


def _check_name(name: str) -> None:
    models = _models()
    if name in models.list_models(module=models) or _is_video(name):
        return
    everything = models.list_models()
    if name in everything:
        raise RequestError(
            f"torchvision:{name} is not a classifier (detection, segmentation, optical flow and quantised models need "
            "batches of their own); write a factory for it: py:FILE:FACTORY"
        )
    raise RequestError(f"torchvision:{name}: torchvision has no such model{nearest_names(name, everything)}")


def _models() -> Any:
    try:
        from torchvision import models
    except ImportError as error:
        raise RequestError(f"torchvision models need torchvision ({error}): pip install 'brim[vision]'") from error
    return models
