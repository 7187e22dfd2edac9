"""Classification: texts, images and videos, and whose class is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy
import pytest
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file

from brim.errors import RequestError
from brim.tasks.classify import align_classes
from tests.evaluation.evaluation_runs import predictions, run, write_lines

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w14 w15 w16 w17", "w18"]
NUMBERS = ("0", "1", "2")


@pytest.mark.parametrize(
    ("data", "model", "count", "labels", "told"),
    [
        (("cat", "dog"), ("dog", "cat"), 2, ("dog", "cat"), False),  # the model's order
        (
            ("Golden Retriever",),
            ("tabby", "golden_retriever"),
            2,
            ("tabby", "Golden Retriever"),
            False,
        ),  # in any spelling
        (("a", "b"), ("LABEL_0", "LABEL_1"), 2, ("a", "b"), False),  # a model without names
        (("a", "b"), (), 2, ("a", "b"), False),
        (("a", "b"), ("x", "y"), 2, ("a", "b"), True),  # other names: by order, and that is said
        (("a", "b"), ("x", "y", "z"), 3, ("a", "b", "z"), True),
        (("a", "b"), (), 3, ("a", "b", "2"), True),
        (("a", "a b"), ("ab", "a"), 2, ("a b", "a"), False),
        ((), ("x", "y", "z"), 3, NUMBERS, False),  # numbered classes are answered in numbers
        ((), ("crane", "crane", "x"), 3, NUMBERS, False),  # two classes of one name stay two
        ((), (), 3, NUMBERS, False),
    ],
)
def test_model_outputs_get_the_names_of_the_data(
    data: tuple[str, ...], model: tuple[str, ...], count: int, labels: tuple[str, ...], told: bool
) -> None:
    found, note = align_classes(data, model, count)
    assert (found, bool(note)) == (labels, told)


def test_more_classes_than_outputs_are_refused() -> None:
    with pytest.raises(RequestError, match="3 classes and the model 2 outputs"):
        align_classes(("a", "b", "c"), ("x", "y"), 2)


@torch.no_grad()
def text_ranks(folder: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    ranks = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        ranks.append(model(**inputs).logits[0].argsort(descending=True).tolist())
    return ranks


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("numbered", [False, True])
def test_batched_text_classification_equals_single_texts(
    text_classifier: Path, tmp_path: Path, size: int, numbered: bool
) -> None:
    ranks = text_ranks(text_classifier)
    names = ["calm", "angry", "sad"]
    labels = [row[0] if number % 2 else row[1] for number, row in enumerate(ranks)]  # every other one is right
    shown = [label if numbered else names[label] for label in labels]
    records = [
        {"id": str(n), "text": text, "label": label} for n, (text, label) in enumerate(zip(TEXTS, shown, strict=True))
    ]
    result = run(text_classifier, write_lines(tmp_path / "data.jsonl", records), tmp_path / "run", batch_size=size)
    assert predictions(result) == [[str(place) if numbered else names[place] for place in row] for row in ranks]
    assert [sample["reference"] for sample in result.samples] == [str(label) for label in shown]
    assert result.metrics["top1"]["value"] == 0.5
    assert result.metrics["top5"]["value"] == 1.0
    assert all(0.3 < sample["confidence"] <= 1 for sample in result.samples)


def test_a_class_number_beyond_the_outputs_is_refused(text_classifier: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"text": "w1", "label": 1}, {"text": "w2", "label": 3}])
    with pytest.raises(RequestError, match=r"data.jsonl has a class 3, and hf:.* the classes 0 to 2"):
        run(text_classifier, data, tmp_path / "run")


def test_a_text_too_long_fails_only_its_sample(text_classifier: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"text": "w1", "label": "sad"}, {"text": "w2 " * 65, "label": "calm"}])
    result = run(text_classifier, data, tmp_path / "run")
    assert [sample["error"] is None for sample in result.samples] == [True, False]
    assert "65 tokens, the model 64 positions" in result.samples[1]["error"]["message"]


# ------------------------------------------------------------------------------------------------- images


def write_pictures(folder: Path, names: tuple[str, ...] = ("cat", "dog"), count: int = 3) -> Path:
    colours = numpy.random.default_rng(2)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            picture = colours.integers(0, 255, (20 + number, 30, 3), dtype=numpy.uint8)
            Image.fromarray(picture).save(folder / name / f"{number}.png")
    return folder


def test_an_image_that_does_not_decode_fails_only_its_sample(image_classifier: Path, tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "pictures")
    whole = run(image_classifier, data, tmp_path / "whole", batch_size=4)
    model = transformers.AutoModelForImageClassification.from_pretrained(image_classifier)
    processor = transformers.AutoImageProcessor.from_pretrained(image_classifier)
    for sample in whole.samples:
        pixels = processor(Image.open(sample["input"]), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            best = int(model(pixels).logits[0].argmax())
        assert sample["prediction"][0] == ["cat", "dog"][best]
        assert sample["reference"] == Path(sample["input"]).parent.name

    broken = data / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    result = run(image_classifier, data, tmp_path / "broken", batch_size=4)
    failed = [sample for sample in result.samples if sample["error"]]
    assert [sample["input"] for sample in failed] == [str(broken)]
    assert "cannot be read" in failed[0]["error"]["message"]
    assert failed[0]["score"] == 0
    others = [sample["prediction"] for sample in whole.samples if sample["input"] != str(broken)]
    assert [sample["prediction"] for sample in result.samples if not sample["error"]] == others
    assert result.metrics["top1"]["count"] == 6
    assert (result.summary["num_samples"], result.summary["num_failed"]) == (6, 1)


def test_a_torchvision_model_reads_its_weights_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = torchvision.models.shufflenet_v2_x0_5().eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    data = write_pictures(tmp_path / "pictures", ("0", "1"), count=2)
    weights = {"weights": str(tmp_path / "weights.safetensors"), "knobs": {"size": "32"}}
    result = run("torchvision:shufflenet_v2_x0_5", data, tmp_path / "run", **weights)
    preset = torchvision.transforms._presets.ImageClassification(crop_size=32, resize_size=37)
    for sample in result.samples:
        with torch.no_grad():
            best = model(preset(Image.open(sample["input"])).unsqueeze(0))[0].argmax()
        assert sample["prediction"][0] == str(int(best))
    assert not any("random weights" in note for note in result.notes)
    assert any("matched by their order" in note for note in result.notes)


def test_random_weights_are_noted_and_reproducible(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "pictures", count=2)
    options: dict[str, Any] = {"weights": "none", "knobs": {"size": 32}}
    first = run("torchvision:squeezenet1_1", data, tmp_path / "first", **options)
    again = run("torchvision:squeezenet1_1", data, tmp_path / "again", **options)
    assert any("random weights" in note for note in first.notes)
    assert predictions(first) == predictions(again)


# ------------------------------------------------------------------------------------------------- videos


def write_video(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = numpy.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(12):
            picture = colours.integers(0, 255, (48, 64, 3), dtype=numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_a_truncated_video_fails_only_its_sample(tmp_path: Path) -> None:
    records = [{"id": str(n), "video": f"{n}.avi", "label": n % 2} for n in range(4)]
    data = write_lines(tmp_path / "data.jsonl", records)
    for number in range(4):
        write_video(tmp_path / f"{number}.avi", number)
    options: dict[str, Any] = {"weights": "none", "knobs": {"frames": 2, "size": 32}, "num_workers": 0}
    whole = run("torchvision:mc3_18", data, tmp_path / "whole", batch_size=1, **options)
    assert [sample["error"] for sample in whole.samples] == [None] * 4
    cut = tmp_path / "2.avi"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    result = run("torchvision:mc3_18", data, tmp_path / "cut", batch_size=4, **options)
    assert [sample["error"] is None for sample in result.samples] == [True, True, False, True]
    assert "cut short" in result.samples[2]["error"]["message"]
    kept = [0, 1, 3]
    assert [predictions(result)[n][0] for n in kept] == [predictions(whole)[n][0] for n in kept]
    assert result.metrics["top1"]["count"] == 4


def test_images_are_refused_for_a_video_model(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "pictures", count=1)
    with pytest.raises(RequestError, match=r"reads a video, and 2 samples have none"):
        run("torchvision:mc3_18", data, tmp_path / "run", weights="none", knobs={"frames": 2, "size": 32})
