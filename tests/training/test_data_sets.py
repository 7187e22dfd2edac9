"""Pictures, clips, texts and Python functions: each kind of data with a model that reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy
import pytest
import torch
from PIL import Image

from brim.errors import RequestError
from brim.settings.train_settings import train_settings
from brim.training.data_sets import make_training_data, open_training_source
from brim.training.models import build_model, input_kind
from tests import saved_models
from tests.training.training_runs import Watcher, model_settings, record_of, run, weights

TINY = """
import torch
from torch import nn
from torch.nn import functional

class Tiny(nn.Module):
    def __init__(self, outputs, clips=False):
        super().__init__()
        self.head = nn.Linear(3 * (2 if clips else 1), outputs)
        self.clips = clips

    def transform(self, picture):
        if self.clips:                       # [frames, 3, height, width]
            return picture.float().mean(dim=(2, 3))[[0, -1]].flatten() / 255
        import numpy
        return torch.from_numpy(numpy.asarray(picture).astype("float32")).mean(dim=(0, 1)) / 255

    def forward(self, rows):
        return self.head(rows)

def pictures(num_classes: int = 2):
    return Tiny(num_classes)

def clips(num_classes: int = 2):
    return Tiny(num_classes, clips=True)

class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def training_loss(self, batch):
        ids = batch["ids"]
        scores = self.table(ids[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="none", ignore_index=0)
        return loss.sum(), (ids[:, 1:] != 0).sum()

def counted():
    return Counted()

def sequences(count: int = 24):
    def split(name):
        if name != "train":
            return None
        return [[1 + (start + step) % 8 for step in range(2 + start % 4)] for start in range(count)]

    def collate(samples):
        longest = max(map(len, samples))
        return {"ids": torch.tensor([s + [0] * (longest - len(s)) for s in samples])}

    split.collate = collate
    return split

def pairs(count: int = 40):
    def split(name):
        if name == "validation":
            return [(torch.full((3,), float(n % 2)), n % 2) for n in range(6)]
        return [(torch.full((3,), float(n % 2)), n % 2) for n in range(count)]
    return split
"""


ENDLESS = """
class Endless:
    def __len__(self):
        return 12
    def __getitem__(self, item):
        return torch.full((3,), float(item % 2)), item % 2

def endless():
    return lambda split: Endless() if split == "train" else None
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(TINY, encoding="utf-8")
    return tmp_path / "nets.py"


def write_pictures(folder: Path, count: int, *names: str) -> Path:
    for place, name in enumerate(names):
        for number in range(count):
            file = folder / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            shade = 40 + 150 * place + number
            Image.new("RGB", (16, 16), (shade, 60, 255 - shade)).save(file)
    return folder


def write_clip(path: Path, first: int, last: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in numpy.linspace(first, last, 6):
            picture = numpy.full((48, 64, 3), int(shade), numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


class TestPictures:
    def test_a_folder_with_splits_is_trained_and_validated_on(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets" / "train", 8, "cat", "dog")
        write_pictures(tmp_path / "pets" / "val", 3, "cat", "dog")
        nested = model_settings(
            model__type=f"py:{nets}:pictures",
            data__root=str(tmp_path / "pets"),
            hp__epochs=30,
            hp__learning_rate=0.1,
            hp__effective_batch=8,
        )
        result = run(nested, tmp_path / "run")
        assert result.metrics["top1"]["mean"] == 1.0
        record = record_of(tmp_path / "run")
        assert record["summary"]["samples"] == 30 * 16

    def test_without_a_validation_split_some_samples_are_held_out(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets", 10, "cat", "dog")
        watcher = Watcher()
        run(
            model_settings(model__type=f"py:{nets}:pictures", data__root=str(tmp_path / "pets")),
            tmp_path / "run",
            listener=watcher,
        )
        assert watcher.facts is not None
        assert (watcher.facts.train_samples, watcher.facts.validation_samples) == (18, 2)
        assert any("2 of the training samples were held out" in note for note in watcher.notes)

    def test_a_part_of_the_data_keeps_every_class(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets" / "train", 10, "cat", "dog")
        nested = model_settings(
            model__type=f"py:{nets}:pictures",
            data__root=str(tmp_path / "pets"),
            data__percentage=30,
            data__val_split="none",
        )
        settings = train_settings(nested)
        read = open_training_source(settings, input_kind(settings))
        data = make_training_data(read, build_model(settings, outputs=read.outputs))
        assert data.train.labels is not None
        assert sorted(data.train.labels.tolist()) == [0, 0, 0, 1, 1, 1]
        assert data.validation is None

    @pytest.mark.parametrize(("model", "draws"), [("py:{nets}:pictures", True), ("squeezenet1_1", False)])
    def test_only_what_a_models_own_transform_draws_is_seeded(
        self, tmp_path: Path, nets: Path, model: str, draws: bool
    ) -> None:
        """Seeding takes as long as reading a small picture, and the transforms of libraries draw nothing."""
        write_pictures(tmp_path / "pets" / "train", 4, "cat", "dog")
        nested = model_settings(
            model__type=model.format(nets=nets), data__root=str(tmp_path / "pets"), data__val_split="none"
        )
        settings = train_settings(nested)
        read = open_training_source(settings, input_kind(settings))
        assert make_training_data(read, build_model(settings, outputs=read.outputs)).train.is_random is draws

    def test_a_transformers_classifier_gets_a_head_for_the_classes(self, tmp_path: Path) -> None:
        folder = saved_models.save_image_classifier(tmp_path / "vit")
        write_pictures(tmp_path / "pets" / "train", 4, "cat", "dog", "owl")
        write_pictures(tmp_path / "pets" / "val", 2, "cat", "dog", "owl")
        watcher = Watcher()
        run(
            model_settings(model__type=f"hf:{folder}", data__root=str(tmp_path / "pets"), hp__effective_batch=6),
            tmp_path / "run",
            listener=watcher,
        )
        assert any("the head had 2 outputs and was replaced by one with 3" in note for note in watcher.notes)
        assert weights(tmp_path / "run")["classifier.weight"].shape[0] == 3

    def test_an_unreadable_picture_is_named(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets" / "train", 4, "cat", "dog")
        (tmp_path / "pets" / "train" / "cat" / "2.png").write_bytes(b"no picture")
        nested = model_settings(
            model__type=f"py:{nets}:pictures", data__root=str(tmp_path / "pets"), data__val_split="none"
        )
        with pytest.raises(RequestError, match=r"training sample cat/2\.png cannot be used"):
            run(nested, tmp_path / "run")

    @pytest.mark.parametrize("model", ["timm:test_resnet", "squeezenet1_1"])
    def test_without_data_library_models_train_on_moving_shapes(self, tmp_path: Path, model: str) -> None:
        nested = model_settings(
            model__type=model,
            hp__size=48,
            hp__epochs=1,
            hp__max_steps=2,
            hp__effective_batch=4,
            data__params={"samples": 8, "val_samples": 4, "classes": 4},
        )
        del nested["data"]["root"]
        watcher = Watcher()
        result = run(nested, tmp_path / "run", listener=watcher)
        assert any("no data was named: training on 8 built-in moving shapes" in note for note in watcher.notes)
        assert result.summary["steps"] == 2


class TestClips:
    def test_ucf101_splits_come_from_its_lists(self, tmp_path: Path, nets: Path) -> None:
        root = tmp_path / "UCF101"
        lists: dict[str, list[str]] = {"train": [], "test": []}
        for place, name in enumerate(("Fade", "Glow")):
            for number in range(5):
                first, last = (200, 40) if place == 0 else (40, 200)
                write_clip(root / "UCF-101" / name / f"v_{number}.avi", first, last)
                lists["train" if number < 4 else "test"].append(f"{name}/v_{number}.avi {place + 1}")
        (root / "ucfTrainTestlist").mkdir()
        (root / "ucfTrainTestlist" / "classInd.txt").write_text("1 Fade\n2 Glow\n")
        for split, names in lists.items():
            (root / "ucfTrainTestlist" / f"{split}list01.txt").write_text("\n".join(names) + "\n")
        nested = model_settings(
            model__type=f"py:{nets}:clips",
            data__root=str(root),
            hp__epochs=30,
            hp__learning_rate=0.2,
            hp__frames=4,
            hp__effective_batch=4,
        )
        nested["hp"].pop("frames")
        watcher = Watcher()
        result = run(nested, tmp_path / "run", listener=watcher)
        assert watcher.facts is not None
        assert (watcher.facts.train_samples, watcher.facts.validation_samples) == (8, 2)
        assert result.metrics["top1"]["mean"] == 1.0

    def write_groups(self, root: Path, groups: int) -> list[str]:
        """Two classes with four clips of each group, as empty files: clips are opened in training only."""
        names = [
            f"{name}/v_{name}_g{group:02d}_c{clip:02d}.avi"
            for name in ("Fade", "Glow")
            for group in range(1, groups + 1)
            for clip in range(1, 5)
        ]
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        return names

    def split_ids(self, nested: dict[str, Any]) -> tuple[list[str], list[str], tuple[str, ...]]:
        settings = train_settings(nested)
        read = open_training_source(settings, input_kind(settings))
        data = make_training_data(read, build_model(settings, outputs=read.outputs))
        assert data.validation is not None
        return list(data.train.ids), list(data.validation.ids), read.notes

    def test_lists_next_to_the_folder_of_clips_are_found(self, tmp_path: Path, nets: Path) -> None:
        names = self.write_groups(tmp_path / "UCF-101", groups=3)
        lists = tmp_path / "ucfTrainTestlist"
        lists.mkdir()
        (lists / "classInd.txt").write_text("1 Fade\n2 Glow\n")
        tests = [name for name in names if "_g01_" in name]
        (lists / "testlist01.txt").write_text("\n".join(tests))
        (lists / "trainlist01.txt").write_text("\n".join(name for name in names if name not in tests))
        nested = model_settings(model__type=f"py:{nets}:clips", data__root=str(tmp_path / "UCF-101"))
        train, validation, _ = self.split_ids(nested)
        assert sorted(validation) == sorted(tests)
        assert len(train) == 16

    @pytest.mark.parametrize("fraction", [0.1, 0.3, 0.9])
    def test_without_lists_whole_groups_of_clips_are_held_out(
        self, tmp_path: Path, nets: Path, fraction: float
    ) -> None:
        self.write_groups(tmp_path / "clips", groups=5)
        nested = model_settings(
            model__type=f"py:{nets}:clips", data__root=str(tmp_path / "clips"), data__val_fraction=fraction
        )
        train, validation, notes = self.split_ids(nested)
        groups = [{name.rpartition("_c")[0] for name in split} for split in (train, validation)]
        assert not groups[0] & groups[1]
        assert {name.partition("/")[0] for name in train} == {"Fade", "Glow"}
        assert len(validation) == pytest.approx(fraction * 40, abs=8)
        assert len(train) + len(validation) == 40
        assert "whole groups of clips" in notes[-1]

    def test_a_class_with_one_group_is_divided_with_a_note(self, tmp_path: Path, nets: Path) -> None:
        self.write_groups(tmp_path / "clips", groups=1)
        nested = model_settings(
            model__type=f"py:{nets}:clips", data__root=str(tmp_path / "clips"), data__val_fraction=0.25
        )
        train, validation, notes = self.split_ids(nested)
        assert (len(train), len(validation)) == (6, 2)
        assert "clips of one group are in both splits" in notes[-1]


class TestTexts:
    def write(self, path: Path, count: int) -> Path:
        lines = [
            {"text": f"w{n % 7} " * (1 + n % 9) + ("plus" if n % 2 else "is"), "label": n % 2} for n in range(count)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    def test_a_text_classifier_trains_on_jsonl(self, tmp_path: Path) -> None:
        folder = saved_models.save_text_classifier(tmp_path / "bert", ("no", "yes"))
        (folder / "model.safetensors").unlink()  # the saved weights are too large to learn
        nested = model_settings(
            model__type=f"hf:{folder}",
            data__root=str(self.write(tmp_path / "texts.jsonl", 60)),
            hp__epochs=8,
            hp__learning_rate=0.003,
            hp__effective_batch=8,
        )
        result = run(nested, tmp_path / "run")
        assert result.plan is not None
        assert result.plan.unit == "tokens"  # texts differ in length, so that batches are sized in tokens
        assert result.metrics["train_loss"]["mean"] < 0.6
        assert result.summary["samples"] == 8 * 54

    def test_texts_are_cut_and_their_cost_is_their_tokens(self, tmp_path: Path) -> None:
        folder = saved_models.save_text_classifier(tmp_path / "bert", ("no", "yes"))
        settings = train_settings(
            model_settings(
                model__type=f"hf:{folder}", hp__tokens=6, data__root=str(self.write(tmp_path / "texts.jsonl", 20))
            )
        )
        read = open_training_source(settings, input_kind(settings))
        items = make_training_data(read, build_model(settings, outputs=read.outputs)).train
        assert max(items.cost(item) for item in range(len(items))) == 6  # cut at hp.tokens
        batch = items.batch([0, 1], [items.prepare(0), items.prepare(1)])
        assert batch.inputs["input_ids"].shape == batch.inputs["attention_mask"].shape
        assert batch.inputs["attention_mask"].sum() == items.cost(0) + items.cost(1)

    def test_a_language_model_gets_a_new_head(self, tmp_path: Path) -> None:
        folder = saved_models.save_language_model(tmp_path / "lm")
        nested = model_settings(
            model__type=f"hf:{folder}", data__root=str(self.write(tmp_path / "texts.jsonl", 24)), hp__epochs=1
        )
        watcher = Watcher()
        run(nested, tmp_path / "run", listener=watcher)
        assert any("has a new head for 2 outputs" in note for note in watcher.notes)

    def test_values_are_trained_by_regression(self, tmp_path: Path) -> None:
        folder = saved_models.save_text_classifier(tmp_path / "bert", ("no", "yes"))
        lines = [{"text": f"w{n % 5}", "label": (n % 5) / 2} for n in range(30)]
        (tmp_path / "values.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        nested = model_settings(
            model__type=f"hf:{folder}", data__root=str(tmp_path / "values.jsonl"), task="regress", hp__epochs=2
        )
        nested["task"] = "regress"
        result = run(nested, tmp_path / "run")
        assert "mae" in result.metrics


class TestPythonFunctions:
    def test_a_function_returns_pairs(self, tmp_path: Path, nets: Path) -> None:
        nested = model_settings(
            model__type=f"py:{nets}:pictures",
            data__type=f"py:{nets}:pairs",
            data__params={"count": 20},
            hp__epochs=8,
            hp__learning_rate=0.1,
        )
        del nested["data"]["root"]
        result = run(nested, tmp_path / "run")
        assert result.metrics["top1"]["mean"] == 1.0
        assert result.summary["samples"] == 8 * 20

    def test_a_model_loss_per_token_does_not_depend_on_micro_batches(self, tmp_path: Path, nets: Path) -> None:
        nested = model_settings(
            model__type=f"py:{nets}:counted",
            data__type=f"py:{nets}:sequences",
            hp__epochs=40,
            hp__learning_rate=0.1,
            hp__effective_batch=8,
        )
        del nested["data"]["root"]
        nested["training"]["dtype"] = "float64"
        result = run(nested | {"hp": nested["hp"] | {"batch_size": 8}}, tmp_path / "whole")
        assert result.metrics["train_loss"]["mean"] < 0.2
        run(nested | {"hp": nested["hp"] | {"batch_size": 3}}, tmp_path / "parts")
        found, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
        torch.testing.assert_close(found["table.weight"], other["table.weight"], rtol=0, atol=1e-10)

    def test_a_data_set_without_index_errors_is_read_by_its_length(self, tmp_path: Path, nets: Path) -> None:
        """Like many data sets for torch, it has a length and returns a sample for any index."""
        nets.write_text(nets.read_text() + ENDLESS, encoding="utf-8")
        nested = model_settings(model__type=f"py:{nets}:pictures", data__type=f"py:{nets}:endless", hp__epochs=2)
        del nested["data"]["root"]
        assert run(nested, tmp_path / "run").summary["samples"] == 2 * 12

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ("py:{nets}:sequences", "no method training_loss"),
            ("py:{nets}:nothing", "nothing does not exist"),
        ],
    )
    def test_data_that_the_model_cannot_use_is_refused(self, tmp_path: Path, nets: Path, data: str, words: str) -> None:
        nested = model_settings(model__type=f"py:{nets}:pictures", data__type=data.format(nets=nets))
        del nested["data"]["root"]
        with pytest.raises(RequestError, match=words):
            run(nested, tmp_path / "run")
