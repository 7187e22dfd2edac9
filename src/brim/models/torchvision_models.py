"""torchvision's classifiers of images and videos, its segmentation and its detection models.

The only file that imports torchvision, on use.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from torch import nn

from brim.errors import RequestError, first_line, nearest_names
from brim.models.base import LoadedModel, LoadRequest, ModelParts, PartsRequest
from brim.models.vision import classifier_parts, detection_parts, segmentation_parts
from brim.settings.caller import written
from brim.workloads.knobs import Knob

__all__ = ["Kind", "build_parts", "load", "model_kind", "model_knobs", "model_names", "untrained"]

Kind = Literal["image", "video", "segmentation", "detection"]

_SMALL_VIDEO = ("mc3_18", "r2plus1d_18", "r3d_18")  # trained at 112
_FRAMES = 16  # in a clip
_MAXVIT_STEP = 224  # 7 windows × 32 strides: every stage must divide into whole windows
_SEGMENTED_SIZE = 520  # as torchvision's weights were evaluated
_DETECTED_SIZES = {  # the shorter side after the model's own resizing; SSD's is fixed
    "fasterrcnn_mobilenet_v3_large_320_fpn": 320,
    "ssd300_vgg16": 300,
    "ssdlite320_mobilenet_v3_large": 320,
}
_DETECTED_SIZE = 800
_LONGEST_DETECTED = 1333  # the longer side, at most
_SMALLEST_DETECTED = 64  # below it the deepest feature map is a single value
_DETECTED_CLASSES = 91  # COCO's, and the background
_PERSON_CLASSES = 2  # of a model of keypoints: persons, and the background


def model_names() -> tuple[str, ...]:
    """Every model torchvision registers: video, image, segmentation, detection, and what brim does not build itself."""
    if importlib.util.find_spec("torchvision") is None:
        return ()
    models = _models()
    own = [name for module in _modules().values() for name in models.list_models(module=module)]
    return (*own, *(name for name in models.list_models() if name not in own))


def model_knobs(name: str) -> tuple[Knob, ...]:
    """`size` for an image model; `frames` and `size` for a video model."""
    kind, default = model_kind(name), _default_size(name)
    if name.startswith("ssd"):
        return (Knob(name="size", default=default, help="fixed by the model", minimum=default, maximum=default),)
    size = Knob(
        name="size",
        default=default,
        help="height and width of the input in pixels",
        minimum=_SMALLEST_DETECTED if kind == "detection" else 1,
        multiple_of=_size_step(name),
    )
    if kind != "video":
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
    kind = model_kind(name)
    options = _options(name, size)
    if kind in ("segmentation", "detection"):
        options["weights_backbone"] = None
    if kind == "segmentation" and request.mode == "train" and not name.startswith("lraspp"):
        options["aux_loss"] = True  # as torchvision trains them

    def build() -> nn.Module:
        model: nn.Module = _models().get_model(name, weights=None, **options)
        if name.startswith("mvit_"):
            _set_clip_size(model, request.knobs["frames"], size)
        return model

    owner = f"torchvision:{name}"
    if kind == "segmentation":
        return segmentation_parts(build, size, request, owner=owner)
    if kind == "detection":
        return detection_parts(build, size, _detected_classes(name), request, owner=owner)
    shape = (3, request.knobs["frames"], size, size) if kind == "video" else (3, size, size)
    return classifier_parts(build, shape, request, owner=owner)


def untrained(name: str, size: int, classes: int) -> nn.Module:
    """A segmentation or detection model with random weights, for so many classes, the background among them."""
    options = {**_options(name, size), "weights_backbone": None, "num_classes": classes}
    if model_kind(name) == "segmentation" and not name.startswith("lraspp"):
        options["aux_loss"] = True  # as torchvision trains them
    model: nn.Module = _models().get_model(name, weights=None, **options)
    return model


def load(name: str, request: LoadRequest) -> LoadedModel:
    """The model for evaluation, with torchvision's published weights unless the request names others."""
    kind = model_kind(name)
    if kind in ("segmentation", "detection"):
        raise RequestError(
            f"torchvision:{name}: no task evaluates {kind} models; brim finds, forecasts and trains them (brim find, "
            "brim forecast, brim train)"
        )
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
            f"torchvision:{name}: its published weights cannot be loaded ({reason}); give a file with "
            f"{written('weights', 'FILE')}, or {written('weights', 'none')} for random ones"
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
    """The transform of the published weights, at the size of the request; without such weights, the usual one."""
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
    if model_kind(name) == "detection" and not name.startswith("ssd"):
        return {"min_size": size, "max_size": max(size, _LONGEST_DETECTED)}
    if name in ("googlenet", "inception_v3"):
        return {"init_weights": False}  # their initialisation takes half a minute; memory and speed are the same
    return {}


def _set_clip_size(model: Any, frames: int, size: int) -> None:
    """Change an MViT to clips of another size: its builders fix 16 frames of 224 pixels, its class does not.

    Only the position encoding depends on the size; relative positions are interpolated.
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
    kind = model_kind(name)
    if kind == "detection":
        return _DETECTED_SIZES.get(name, _DETECTED_SIZE)
    if kind == "segmentation":
        return _SEGMENTED_SIZE
    return 299 if name == "inception_v3" else 224


def _size_step(name: str) -> int:
    if name.startswith("vit_"):
        return int(name.rpartition("_")[2])  # the patch size: vit_b_16, vit_h_14
    if name.startswith("maxvit_"):
        return _MAXVIT_STEP
    return 32 if name.startswith("mvit_") else 1


def model_kind(name: str) -> Kind:
    """What a model is for; one that brim does not build is a `RequestError`."""
    models = _models()
    for kind, module in _modules().items():
        if name in models.list_models(module=module):
            return kind
    everything = models.list_models()
    if name in everything:
        raise RequestError(
            f"torchvision:{name}: brim builds torchvision's classifiers, segmentation and detection models, but makes "
            "no batches for optical flow or quantised ones; write a factory for it: py:FILE:FACTORY"
        )
    raise RequestError(f"torchvision:{name}: torchvision has no such model{nearest_names(name, everything)}")


def _is_video(name: str) -> bool:
    return model_kind(name) == "video"


def _detected_classes(name: str) -> int:
    return _PERSON_CLASSES if name.startswith("keypointrcnn") else _DETECTED_CLASSES


def _modules() -> dict[Kind, Any]:
    models = _models()
    return {
        "video": models.video,
        "image": models,
        "segmentation": models.segmentation,
        "detection": models.detection,
    }


def _models() -> Any:
    try:
        from torchvision import models
    except ImportError as error:
        raise RequestError(f"torchvision models need torchvision ({error}): pip install 'brim[vision]'") from error
    return models
