"""Moving shapes: a built-in data set of clips or pictures with classes that a model can learn, made on access.

A clip shows one shape that moves in one of four directions over noise; position, size, colour and speed vary. The first
four classes differ in direction alone, so that no single frame is enough to tell them apart. A picture shows one of
eight shapes. Item n of a seed is always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from brim.errors import RequestError, nearest_names
from brim.settings.train_settings import TrainSettings
from brim.training.items import Items, StackedItems, TrainingSource, labels_tensor, samples_kept
from brim.training.models import InputKind, ModelBundle, input_shape

__all__ = ["DIRECTIONS", "SHAPES", "MovingShapes", "open_moving_shapes", "shape_class_names", "shape_params"]

Grid = npt.NDArray[np.float32]

MEAN = DEVIATION = 0.3  # of the brightness, approximately

DEFAULTS = {"samples": 512, "val_samples": 128, "classes": 8, "noise": 0.1, "seed": 0}  # data.params
DIRECTIONS = {"left": (0.0, -1.0), "right": (0.0, 1.0), "up": (-1.0, 0.0), "down": (1.0, 0.0)}  # rows, columns
SHAPES: dict[str, Callable[[Grid, Grid], npt.NDArray[np.bool_]]] = {  # of offsets from the centre, in radii
    "square": lambda y, x: np.maximum(abs(y), abs(x)) <= 0.85,
    "disc": lambda y, x: y * y + x * x <= 1,
    "cross": lambda y, x: (np.minimum(abs(y), abs(x)) <= 0.3) & (np.maximum(abs(y), abs(x)) <= 1),
    "ring": lambda y, x: abs(np.sqrt(y * y + x * x) - 0.8) <= 0.2,
    "triangle": lambda y, x: (y <= 0.7) & (abs(x) <= (y + 1) * 0.55),
    "diamond": lambda y, x: abs(y) + abs(x) <= 1,
    "bar": lambda y, x: (abs(y) <= 0.3) & (abs(x) <= 1),
    "pillar": lambda y, x: (abs(x) <= 0.3) & (abs(y) <= 1),
}


class MovingShapes(StackedItems):
    """Clips [3, frames, size, size], or pictures [3, size, size] where `frames` is None."""

    def __init__(
        self, count: int, *, classes: int, frames: int | None, size: int, seed: int = 0, noise: float = 0.1
    ) -> None:
        self.class_names = shape_class_names(classes, video=frames is not None)
        labels = labels_tensor([item % classes for item in range(count)], task="classify")
        super().__init__([f"{self.class_names[item % classes]} {item}" for item in range(count)], labels)
        self._frames, self._size, self._seed, self._noise = frames, size, seed, noise

    def prepare(self, item: int) -> torch.Tensor:
        """The item, normalised to approximately zero mean and unit deviation."""
        picture, _ = self.drawn(item)
        return picture if self._frames is not None else picture[:, 0]

    def drawn(self, item: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The item's frames [3, frames, size, size], and the pixels of the shape in each, [frames, size, size]."""
        draw = np.random.default_rng([self._seed, item])
        name = self.class_names[item % len(self.class_names)]
        shape, _, direction = name.partition(" ")
        frames, size = self._frames or 1, self._size
        radius = size * draw.uniform(0.12, 0.2)
        travel = size * draw.uniform(0.25, 0.45) if direction else 0.0
        centre = draw.uniform(radius + travel / 2, size - radius - travel / 2, size=2)
        way = np.array(DIRECTIONS.get(direction, (0.0, 0.0)))
        when = np.linspace(-0.5, 0.5, frames)[:, None]
        centres = (centre + travel * when * way).astype(np.float32)[..., None, None]  # [frames, 2, 1, 1]
        rows, columns = np.mgrid[0:size, 0:size].astype(np.float32)
        reach = np.float32(radius)
        inside = SHAPES[shape]((rows - centres[:, 0]) / reach, (columns - centres[:, 1]) / reach)
        tones = np.stack([draw.uniform(0.6, 1.0, size=3), draw.uniform(0.0, 0.3, size=3)])  # of shape and background
        tones = ((tones - MEAN) / DEVIATION).astype(np.float32)
        picture = draw.standard_normal((3, *inside.shape), dtype=np.float32)  # noise, to which the tones are added
        picture *= np.float32(self._noise / DEVIATION)
        for channel, shape_tone, background_tone in zip(picture, *tones, strict=True):
            channel += np.where(inside, shape_tone, background_tone)
        return torch.from_numpy(picture), torch.from_numpy(inside)


def shape_class_names(count: int, *, video: bool) -> tuple[str, ...]:
    """The first classes: shapes with their directions for clips, shapes for pictures."""
    most = len(SHAPES) * (len(DIRECTIONS) if video else 1)
    if not 2 <= count <= most:
        raise RequestError(f"data.params.classes {count}: moving shapes have 2 to {most} classes")
    if not video:
        return tuple(SHAPES)[:count]
    return tuple(f"{shape} {direction}" for shape in SHAPES for direction in DIRECTIONS)[:count]


def shape_params(settings: TrainSettings, *, whole_numbers: bool = False) -> dict[str, Any]:
    """`data.params` over the defaults; with `whole_numbers`, there is no noise to choose."""
    defaults = {name: value for name, value in DEFAULTS.items() if not (whole_numbers and name == "noise")}
    for name, value in settings.data.params.items():
        if name not in defaults:
            has = ", ".join(defaults)
            raise RequestError(f"data.params.{name}: moving_shapes takes {has}{nearest_names(name, defaults)}")
        numeric = isinstance(value, int if whole_numbers else (int, float)) and not isinstance(value, bool)
        if not numeric or value < 0:
            kind = "whole number" if whole_numbers else "number"
            raise RequestError(f"data.params.{name} {value!r}: give a {kind} from 0")
    return {**defaults, **settings.data.params}


def open_moving_shapes(settings: TrainSettings, kind: InputKind) -> TrainingSource:
    """Moving shapes of the model's input size, for a classifier."""
    if kind not in ("video", "image"):
        raise RequestError(f"data.type moving_shapes: {settings.model.type} reads neither pictures nor clips")
    params = shape_params(settings)
    classes = settings.model.num_classes or int(params["classes"])
    shape = input_shape(settings)
    count = samples_kept(int(params["samples"]), settings.data)

    def make_items(bundle: ModelBundle, dtype: torch.dtype) -> tuple[Items, Items | None]:
        del bundle, dtype
        options: dict[str, Any] = {
            "classes": classes,
            "frames": shape.get("frames") if kind == "video" else None,
            "size": shape["size"],
            "noise": float(params["noise"]),
        }
        seed = int(params["seed"])
        train = MovingShapes(count, seed=2 * seed, **options)
        if settings.data.val_split == "none" or not params["val_samples"]:
            return train, None
        return train, MovingShapes(int(params["val_samples"]), seed=2 * seed + 1, **options)

    note = f"no data was named: training on {count} built-in moving shapes of {classes} classes"
    return TrainingSource(
        name="moving_shapes",
        task=settings.task or "classify",
        outputs=classes,
        make_items=make_items,
        facts={"format": "moving_shapes", **params, "classes": classes, **shape},
        notes=() if settings.data.type == "moving_shapes" else (note,),
    )
