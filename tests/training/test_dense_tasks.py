"""Segmentation and detection: whole runs, the data formats, and the objectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import brim
from brim.data.base import DataError
from brim.data.coco import read_coco
from brim.data.image_folders import read_mask_folder
from brim.data.images import load_mask, polygon_mask
from brim.errors import RequestError
from brim.training.dense_tasks import Segmentation
from brim.training.objective import Batch

SEGMENTER, DETECTOR = "lraspp_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn"


def save_masks(root: Path, **splits: int) -> Path:
    """Pictures of 40 × 60 with a rectangle of class 1 or 2 in turn, and a border of ignored pixels."""
    draw = np.random.default_rng(0)
    for split, count in splits.items():
        for folder in ("images", "masks"):
            (root / split / folder).mkdir(parents=True)
        for number in range(count):
            mask = np.zeros((40, 60), np.uint8)
            mask[5:20, 5:30], mask[0] = 1 + number % 2, 255
            Image.fromarray(draw.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(
                root / split / "images" / f"{number}.jpg"
            )
            Image.fromarray(mask).save(root / split / "masks" / f"{number}.png")
    return root


def save_coco(root: Path, **splits: int) -> Path:
    """The same pictures in the format of COCO; the first has no object."""
    save_masks(root / "source", **splits)
    (root / "annotations").mkdir()
    for split, count in splits.items():
        (root / "source" / split / "images").rename(root / f"{split}2017")
        document = {
            "images": [{"id": 10 + number, "file_name": f"{number}.jpg"} for number in range(count)],
            "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
            "annotations": [
                {"id": number, "image_id": 10 + number, "category_id": (3, 7)[number % 2], "bbox": [5, 5, 25, 15],
                 "iscrowd": 0, "segmentation": [[5, 5, 30, 5, 30, 20, 5, 20]]}
                for number in range(1, count)
            ],
        }  # fmt: skip
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(document))
    return root


def fit(name: str, output: Path, data: dict[str, Any], **more: Any) -> Any:
    settings = {
        "model": {"type": name, **more.pop("model", {})},
        "data": {"num_workers": 0, **data},
        "hp": {"epochs": 1, "effective_batch": 4, "size": 64, **more.pop("hp", {})},
        "training": {"device": "cpu"},
        **more,
    }
    return brim.fit(settings, output=output)


# ------------------------------------------------------------------------------------------------- whole runs


def test_segmentation_trains_on_masks_and_reports_mean_iou(tmp_path: Path) -> None:
    result = fit(SEGMENTER, tmp_path / "run", {"root": str(save_masks(tmp_path / "data", train=4, val=2))})
    assert set(result.metrics) == {"train_loss", "val_loss", "mean_iou"}
    assert 0 <= result.metrics["mean_iou"]["mean"] <= 1
    assert result.summary["steps"] == 1
    header = (tmp_path / "run" / "epochs.csv").read_text().splitlines()[0]
    assert "val_mean_iou" in header.split(",")


def test_detection_trains_on_boxes_and_reports_its_loss(tmp_path: Path) -> None:
    result = fit(DETECTOR, tmp_path / "run", {"root": str(save_coco(tmp_path / "data", train=4, val=2))})
    assert set(result.metrics) == {"train_loss", "val_loss"}
    assert all(np.isfinite(figure["mean"]) for figure in result.metrics.values())


@pytest.mark.parametrize("model", [SEGMENTER, DETECTOR])
def test_without_data_both_train_on_moving_shapes(tmp_path: Path, model: str) -> None:
    shapes = {"params": {"samples": 4, "val_samples": 2, "classes": 2}}
    result = fit(model, tmp_path / "run", shapes)
    assert result.summary["steps"] == 1
    assert all(np.isfinite(figure["mean"]) for figure in result.metrics.values())


def test_a_python_function_returns_pictures_with_masks(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import torch\n"
        "def pairs(count: int = 4):\n"
        "    pair = (torch.zeros(3, 64, 64), torch.ones(64, 64, dtype=torch.uint8))\n"
        "    return lambda split: [pair] * count if split == 'train' else None\n"
    )
    data = {"type": f"py:{tmp_path / 'data.py'}:pairs"}
    with pytest.raises(RequestError, match=r"model.num_classes is missing"):
        fit(SEGMENTER, tmp_path / "run", data)
    result = fit(SEGMENTER, tmp_path / "run", data, model={"num_classes": 2})
    assert result.summary["steps"] == 1


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (SEGMENTER, {"model": {"weights": "auto"}}, r"model.weights auto: .*heads for other classes"),
        (SEGMENTER, {"task": "classify"}, r"task classify: .* is a segmentation model"),
        (SEGMENTER, {"data": {"type": "coco"}}, r"data.type coco: a segmentation model learns from mask_folder"),
        (SEGMENTER, {"data": {"root": "ROOT"}}, r"needs folders images/ and masks/"),
        (DETECTOR, {"data": {"root": "ROOT"}}, r"there is no annotations/\*.json"),
        (DETECTOR, {"data": {"root": "ROOT/none.json"}}, r"there is no such file"),
        ("keypointrcnn_resnet50_fpn", {}, r"moving shapes have no keypoints"),
    ],
)
def test_wrong_requests_are_refused(tmp_path: Path, model: str, more: dict[str, Any], message: str) -> None:
    data = {key: value.replace("ROOT", str(tmp_path)) for key, value in more.pop("data", {}).items()}
    with pytest.raises(RequestError, match=message):
        fit(model, tmp_path / "run", data, **more)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_missing_picture_is_named(tmp_path: Path) -> None:
    root = save_coco(tmp_path / "data", train=2)
    (root / "train2017" / "0.jpg").unlink()
    with pytest.raises(RequestError, match=r"training sample 0.jpg cannot be used: .* does not exist"):
        fit(DETECTOR, tmp_path / "run", {"root": str(root), "val_split": "none"})


# ------------------------------------------------------------------------------------------------- the data


def test_masks_are_matched_to_pictures_by_name(tmp_path: Path) -> None:
    root = save_masks(tmp_path / "data", train=3, val=1)
    found = read_mask_folder(root, split="val")
    assert [(sample.id, Path(sample.original["mask"]).name) for sample in found.samples] == [("0.jpg", "0.png")]
    assert len(read_mask_folder(root / "train", split=None).samples) == 3
    (root / "train" / "masks" / "1.png").unlink()
    with pytest.raises(RequestError, match=r"1 images have no mask of the same name \(the first is 1.jpg\)"):
        read_mask_folder(root, split="train")


def test_a_resized_mask_keeps_its_classes_and_colour_masks_are_refused(tmp_path: Path) -> None:
    mask = load_mask(save_masks(tmp_path / "data", train=1) / "train" / "masks" / "0.png", 20)
    assert (mask.shape, set(np.unique(mask)) <= {0, 1, 255}) == ((20, 20), True)
    Image.new("RGB", (4, 4)).save(tmp_path / "colours.png")
    with pytest.raises(DataError, match="of the mode RGB"):
        load_mask(tmp_path / "colours.png", None)


def test_coco_classes_start_at_one_and_boxes_are_corners(tmp_path: Path) -> None:
    root = save_coco(tmp_path / "data", train=3)
    found = read_coco(root, split="train")
    assert found.class_names == ("background", "cat", "dog")
    assert [len(sample.original["objects"]) for sample in found.samples] == [0, 1, 1]
    (one,) = found.samples[1].original["objects"]
    assert (one["box"], one["label"]) == ([5, 5, 30, 20], 2)
    assert found.samples[1].images[0].path == root / "train2017" / "1.jpg"
    filled = polygon_mask(one["segmentation"], 60, 40)
    assert (filled.shape, filled[10, 10], filled[30, 50]) == ((40, 60), 1, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"images": [], "annotations": [{}], "categories": []}'])
def test_a_file_that_is_not_coco_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "boxes.json").write_text(text)
    with pytest.raises(RequestError, match="it is not a COCO file of objects"):
        read_coco(tmp_path / "boxes.json", split=None)


# ------------------------------------------------------------------------------------------------- the objective


class Scores(nn.Module):
    """A segmentation model that returns its input as scores."""

    def forward(self, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": scores, "aux": scores}


def test_losses_of_pictures_add_up_without_ignored_pixels() -> None:
    torch.manual_seed(0)
    scores, masks = torch.randn(3, 4, 5, 5), torch.randint(0, 4, (3, 5, 5))
    masks[0, :3] = 255
    objective = Segmentation(4)
    together = objective.loss(Scores(), Batch(scores, masks))
    apart = [objective.loss(Scores(), Batch(scores[item : item + 1], masks[item : item + 1])) for item in range(3)]
    assert torch.allclose(together.total, sum(one.total for one in apart))  # type: ignore[arg-type]
    assert together.weight == 3
    first = nn.functional.cross_entropy(scores[:1], masks[:1], ignore_index=255)
    assert torch.allclose(apart[0].total, 1.5 * first)  # the auxiliary classifier counts half


def test_mean_iou_is_over_all_pictures_and_occurring_classes() -> None:
    masks = torch.tensor([[[0, 0], [1, 1]], [[0, 255], [1, 1]]])
    answers = torch.tensor([[[0, 1], [1, 1]], [[0, 2], [0, 1]]])
    scores = nn.functional.one_hot(answers, 4).permute(0, 3, 1, 2).float()
    objective = Segmentation(4)
    rows = objective.sample_metrics(Scores(), Batch(scores, masks))
    assert rows.shape == (2, objective.columns)
    figures = objective.metrics_of_sums(rows.sum(dim=0).tolist())
    # intersection / union: class 0 has 2 / 4, class 1 has 3 / 5; classes 2 and 3 do not occur
    assert figures["mean_iou"] == pytest.approx((2 / 4 + 3 / 5) / 2)
