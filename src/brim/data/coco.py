"""Images with objects in COCO's format: one JSON file with `images`, `annotations` and `categories`.

`ROOT` is that file, with the images beside it or in a folder `images`; or a folder with `annotations/*SPLIT*.json`
and the images of a split in a folder of its name, as COCO is unpacked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.data.base import ImageFile, Sample, SampleSet
from brim.data.files import text_digest
from brim.data.selection import choose_split, refuse_split
from brim.errors import RequestError

__all__ = ["read_coco"]


def read_coco(root: Path, *, split: str | None, of: str = "instances") -> SampleSet:
    """One sample per image; `original["objects"]` has `box` (left, top, right, bottom), `label` from 1 on, and more.

    Of several files for a split, the one whose name begins with `of` is read (`instances`, `person_keypoints`). Crowds
    are left out, since they are not single objects.
    """
    file, split = _annotation_file(root, split, of)
    content = file.read_bytes()
    try:
        document = json.loads(content)
        categories = {one["id"]: one["name"] for one in sorted(document["categories"], key=lambda one: one["id"])}
        labels = {category: place for place, category in enumerate(categories, start=1)}
        objects: dict[Any, list[dict[str, Any]]] = {one["id"]: [] for one in document["images"]}
        for annotation in document["annotations"]:
            if not annotation.get("iscrowd"):
                objects[annotation["image_id"]].append(_object(annotation, labels))
        folder = _image_folder(file, split)
        samples = [
            Sample(
                id=str(one["file_name"]),
                images=(ImageFile(path=folder / one["file_name"]),),
                original={"objects": objects[one["id"]]},
            )
            for one in document["images"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RequestError(
            f"data.root {file}: it is not a COCO file of objects ({reason}); it needs images, annotations, categories"
        ) from error
    return SampleSet(
        name=file.name,
        format="coco",
        samples=tuple(samples),
        suggested_task="classify",
        class_names=("background", *categories.values()),
        facts={"split": split, "content": text_digest([content])},
    )


def _object(annotation: Mapping[str, Any], labels: Mapping[Any, int]) -> dict[str, Any]:
    left, top, width, height = (float(side) for side in annotation["bbox"])
    return {
        "box": [left, top, left + width, top + height],
        "label": labels[annotation["category_id"]],
        "segmentation": annotation.get("segmentation"),
        "keypoints": annotation.get("keypoints"),
    }


def _annotation_file(root: Path, split: str | None, of: str) -> tuple[Path, str | None]:
    if root.is_file():
        refuse_split(split, where=str(root))
        return root, None
    files = sorted((root / "annotations").glob("*.json"))
    if not files:
        raise RequestError(
            f"data.root {root}: there is no annotations/*.json, as a detection model needs; name the COCO file itself"
        )
    wanted = [file for file in files if file.stem.startswith(f"{of}_")] or files
    found = {file.stem.rpartition("_")[2]: file for file in wanted}
    split = choose_split(sorted(found), split, where=str(root))
    return found[split], split


def _image_folder(file: Path, split: str | None) -> Path:
    beside = file.parent if split is None else file.parent.parent
    places = [beside / "images", *([beside / split, beside / "images" / split] if split else [])]
    return next((place for place in reversed(places) if place.is_dir()), beside)
