"""Pictures, clips, texts, tables and the user's own code: each kind of data with a model that reads it."""

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
from brim.training.data_sets import make_items, read_data
from brim.training.feature_head import FeatureHead
from brim.training.features import read_features
from brim.training.learner import build_learner, model_reads, smallest_micro_batch
from brim.training.moving_shapes import DIRECTIONS, SHAPES, MovingShapes, shape_class_names
from tests import saved_models
from tests.training.training_runs import Watcher, record_of, run, settings_of, weights, write_features

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


def base(**changes: Any) -> dict[str, Any]:
    nested = settings_of(Path("unused"), **{"training__dtype": "float32", "hp__epochs": 2, **changes})
    nested["model"].pop("params") if "model__params" not in changes else None
    return nested


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
    def test_a_folder_with_splits_is_learnt_from_and_validated_on(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets" / "train", 8, "cat", "dog")
        write_pictures(tmp_path / "pets" / "val", 3, "cat", "dog")
        nested = base(model__type=f"py:{nets}:pictures", data__root=str(tmp_path / "pets"), hp__epochs=30,
                      hp__learning_rate=0.1, hp__effective_batch=8)  # fmt: skip
        result = run(nested, tmp_path / "run")
        assert result.metrics["top1"]["mean"] == 1.0
        record = record_of(tmp_path / "run")
        assert record["summary"]["samples"] == 30 * 16

    def test_without_a_validation_split_some_samples_are_held_out(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets", 10, "cat", "dog")
        watcher = Watcher()
        run(base(model__type=f"py:{nets}:pictures", data__root=str(tmp_path / "pets")), tmp_path / "run",
            listener=watcher)  # fmt: skip
        assert watcher.facts is not None
        assert (watcher.facts.train_samples, watcher.facts.validation_samples) == (18, 2)
        assert any("2 of the training samples were held out" in note for note in watcher.notes)

    def test_a_part_of_the_data_keeps_every_class(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets" / "train", 10, "cat", "dog")
        nested = base(model__type=f"py:{nets}:pictures", data__root=str(tmp_path / "pets"), data__percentage=30,
                      data__val_split="none")  # fmt: skip
        settings = train_settings(nested)
        read = read_data(settings, model_reads(settings))
        data = make_items(read, build_learner(settings, outputs=read.outputs))
        assert data.train.labels is not None
        assert sorted(data.train.labels.tolist()) == [0, 0, 0, 1, 1, 1]
        assert data.validation is None

    def test_a_transformers_classifier_gets_a_head_for_the_classes(self, tmp_path: Path) -> None:
        folder = saved_models.save_image_classifier(tmp_path / "vit")
        write_pictures(tmp_path / "pets" / "train", 4, "cat", "dog", "owl")
        write_pictures(tmp_path / "pets" / "val", 2, "cat", "dog", "owl")
        watcher = Watcher()
        run(base(model__type=f"hf:{folder}", data__root=str(tmp_path / "pets"), hp__effective_batch=6),
            tmp_path / "run", listener=watcher)  # fmt: skip
        assert any("the head had 2 outputs and was replaced by one with 3" in note for note in watcher.notes)
        assert weights(tmp_path / "run")["classifier.weight"].shape[0] == 3

    def test_a_picture_that_cannot_be_read_is_named(self, tmp_path: Path, nets: Path) -> None:
        write_pictures(tmp_path / "pets" / "train", 4, "cat", "dog")
        (tmp_path / "pets" / "train" / "cat" / "2.png").write_bytes(b"no picture")
        nested = base(model__type=f"py:{nets}:pictures", data__root=str(tmp_path / "pets"), data__val_split="none")
        with pytest.raises(RequestError, match=r"training sample cat/2\.png cannot be used"):
            run(nested, tmp_path / "run")

    @pytest.mark.parametrize("model", ["timm:test_resnet", "squeezenet1_1"])
    def test_library_models_learn_shapes_where_no_data_is_named(self, tmp_path: Path, model: str) -> None:
        nested = base(model__type=model, hp__size=48, hp__epochs=1, hp__max_steps=2, hp__effective_batch=4,
                      data__params={"samples": 8, "val_samples": 4, "classes": 4})  # fmt: skip
        del nested["data"]["root"]
        watcher = Watcher()
        result = run(nested, tmp_path / "run", listener=watcher)
        assert any("no data was named: training on 8 built-in moving shapes" in note for note in watcher.notes)
        assert result.summary["steps"] == 2


class TestClips:
    def test_ucf101_by_its_lists(self, tmp_path: Path, nets: Path) -> None:
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
        nested = base(model__type=f"py:{nets}:clips", data__root=str(root), hp__epochs=30, hp__learning_rate=0.2,
                      hp__frames=4, hp__effective_batch=4)  # fmt: skip
        nested["hp"].pop("frames")
        watcher = Watcher()
        result = run(nested, tmp_path / "run", listener=watcher)
        assert watcher.facts is not None
        assert (watcher.facts.train_samples, watcher.facts.validation_samples) == (8, 2)
        assert result.metrics["top1"]["mean"] == 1.0

    def write_groups(self, root: Path, groups: int) -> list[str]:
        """Four clips of each of some groups of two classes; empty files, which are not opened before training."""
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
        read = read_data(settings, model_reads(settings))
        data = make_items(read, build_learner(settings, outputs=read.outputs))
        assert data.validation is not None
        return list(data.train.ids), list(data.validation.ids), read.notes

    def test_the_lists_beside_the_folder_of_clips_are_found(self, tmp_path: Path, nets: Path) -> None:
        names = self.write_groups(tmp_path / "UCF-101", groups=3)
        lists = tmp_path / "ucfTrainTestlist"
        lists.mkdir()
        (lists / "classInd.txt").write_text("1 Fade\n2 Glow\n")
        tests = [name for name in names if "_g01_" in name]
        (lists / "testlist01.txt").write_text("\n".join(tests))
        (lists / "trainlist01.txt").write_text("\n".join(name for name in names if name not in tests))
        nested = base(model__type=f"py:{nets}:clips", data__root=str(tmp_path / "UCF-101"))
        train, validation, _ = self.split_ids(nested)
        assert sorted(validation) == sorted(tests)
        assert len(train) == 16

    @pytest.mark.parametrize("fraction", [0.1, 0.3, 0.9])
    def test_without_lists_whole_groups_of_clips_are_held_out(
        self, tmp_path: Path, nets: Path, fraction: float
    ) -> None:
        self.write_groups(tmp_path / "clips", groups=5)
        nested = base(model__type=f"py:{nets}:clips", data__root=str(tmp_path / "clips"), data__val_fraction=fraction)
        train, validation, notes = self.split_ids(nested)
        groups = [{name.rpartition("_c")[0] for name in side} for side in (train, validation)]
        assert not groups[0] & groups[1]
        assert {name.partition("/")[0] for name in train} == {"Fade", "Glow"}
        assert len(validation) == pytest.approx(fraction * 40, abs=8)
        assert len(train) + len(validation) == 40
        assert "whole groups of clips" in notes[-1]

    def test_classes_of_one_group_are_divided_and_that_is_said(self, tmp_path: Path, nets: Path) -> None:
        self.write_groups(tmp_path / "clips", groups=1)
        nested = base(model__type=f"py:{nets}:clips", data__root=str(tmp_path / "clips"), data__val_fraction=0.25)
        train, validation, notes = self.split_ids(nested)
        assert (len(train), len(validation)) == (6, 2)
        assert "clips of one group are on both sides" in notes[-1]


class TestTexts:
    def write(self, path: Path, count: int) -> Path:
        lines = [
            {"text": f"w{n % 7} " * (1 + n % 9) + ("plus" if n % 2 else "is"), "label": n % 2} for n in range(count)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    def test_a_text_classifier_learns_from_lines(self, tmp_path: Path) -> None:
        folder = saved_models.save_text_classifier(tmp_path / "bert", ("no", "yes"))
        (folder / "model.safetensors").unlink()  # transformers' own random weights: those saved are too loud to learn
        nested = base(model__type=f"hf:{folder}", data__root=str(self.write(tmp_path / "texts.jsonl", 60)),
                      hp__epochs=8, hp__learning_rate=0.003, hp__effective_batch=8)  # fmt: skip
        result = run(nested, tmp_path / "run")
        assert result.plan is not None
        assert result.plan.unit == "tokens"  # texts differ in length: the cap counts tokens
        assert result.metrics["train_loss"]["mean"] < 0.6
        assert result.summary["samples"] == 8 * 54

    def test_the_dearest_come_first_so_that_little_is_padding(self, tmp_path: Path) -> None:
        folder = saved_models.save_text_classifier(tmp_path / "bert", ("no", "yes"))
        settings = train_settings(base(model__type=f"hf:{folder}", hp__tokens=6,
                                       data__root=str(self.write(tmp_path / "texts.jsonl", 20))))  # fmt: skip
        read = read_data(settings, model_reads(settings))
        items = make_items(read, build_learner(settings, outputs=read.outputs)).train
        assert max(items.cost(item) for item in range(len(items))) == 6  # cut at hp.tokens
        batch = items.batch([0, 1], [items.prepare(0), items.prepare(1)])
        assert batch.inputs["input_ids"].shape == batch.inputs["attention_mask"].shape
        assert batch.inputs["attention_mask"].sum() == items.cost(0) + items.cost(1)

    def test_a_language_model_gets_a_head(self, tmp_path: Path) -> None:
        folder = saved_models.save_language_model(tmp_path / "lm")
        nested = base(
            model__type=f"hf:{folder}", data__root=str(self.write(tmp_path / "texts.jsonl", 24)), hp__epochs=1
        )
        watcher = Watcher()
        run(nested, tmp_path / "run", listener=watcher)
        assert any("has a new head for 2 outputs" in note for note in watcher.notes)

    def test_values_are_learnt_by_regression(self, tmp_path: Path) -> None:
        folder = saved_models.save_text_classifier(tmp_path / "bert", ("no", "yes"))
        lines = [{"text": f"w{n % 5}", "label": (n % 5) / 2} for n in range(30)]
        (tmp_path / "values.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        nested = base(model__type=f"hf:{folder}", data__root=str(tmp_path / "values.jsonl"), task="regress",
                      hp__epochs=2)  # fmt: skip
        nested["task"] = "regress"
        result = run(nested, tmp_path / "run")
        assert "mae" in result.metrics


class TestOwnCode:
    def test_pairs_from_a_function(self, tmp_path: Path, nets: Path) -> None:
        nested = base(model__type=f"py:{nets}:pictures", data__type=f"py:{nets}:pairs", data__params={"count": 20},
                      hp__epochs=8, hp__learning_rate=0.1)  # fmt: skip
        del nested["data"]["root"]
        result = run(nested, tmp_path / "run")
        assert result.metrics["top1"]["mean"] == 1.0
        assert result.summary["samples"] == 8 * 20

    def test_a_model_with_its_own_loss_counts_tokens(self, tmp_path: Path, nets: Path) -> None:
        nested = base(model__type=f"py:{nets}:counted", data__type=f"py:{nets}:sequences", hp__epochs=40,
                      hp__learning_rate=0.1, hp__effective_batch=8)  # fmt: skip
        del nested["data"]["root"]
        nested["training"]["dtype"] = "float64"
        result = run(nested | {"hp": nested["hp"] | {"batch_size": 8}}, tmp_path / "whole")
        assert result.metrics["train_loss"]["mean"] < 0.2
        run(nested | {"hp": nested["hp"] | {"batch_size": 3}}, tmp_path / "parts")
        found, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
        torch.testing.assert_close(found["table.weight"], other["table.weight"], rtol=0, atol=1e-10)

    def test_a_data_set_that_never_says_where_it_ends_is_not_iterated(self, tmp_path: Path, nets: Path) -> None:
        """As many data sets for torch do, it has a length and gives something for any number."""
        nets.write_text(nets.read_text() + ENDLESS, encoding="utf-8")
        nested = base(model__type=f"py:{nets}:pictures", data__type=f"py:{nets}:endless", hp__epochs=2)
        del nested["data"]["root"]
        assert run(nested, tmp_path / "run").summary["samples"] == 2 * 12

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ("py:{nets}:sequences", "no method training_loss"),
            ("py:{nets}:nothing", "nothing does not exist"),
        ],
    )
    def test_what_does_not_go_together_is_told(self, tmp_path: Path, nets: Path, data: str, words: str) -> None:
        nested = base(model__type=f"py:{nets}:pictures", data__type=data.format(nets=nets))
        del nested["data"]["root"]
        with pytest.raises(RequestError, match=words):
            run(nested, tmp_path / "run")


class TestFeatures:
    def test_every_format_gives_the_same_rows(self, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        rows = numpy.arange(12, dtype="float32").reshape(4, 3)
        labels = numpy.array([0, 1, 1, 2])
        numpy.savez(tmp_path / "a.npz", features=rows, labels=labels)
        save_file({"features": rows, "labels": labels}, tmp_path / "a.safetensors")
        numpy.save(tmp_path / "a.npy", rows)
        numpy.save(tmp_path / "labels.npy", labels)
        lines = [
            "id,x,y,z,label",
            *(f"r{n},{a},{b},{c},{k}" for n, ((a, b, c), k) in enumerate(zip(rows, labels, strict=True))),
        ]
        (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
        found = [
            read_features(str(tmp_path / "a.npz")),
            read_features(str(tmp_path / "a.safetensors")),
            read_features(str(tmp_path / "a.npy"), labels_file=str(tmp_path / "labels.npy")),
            read_features(str(tmp_path / "a.csv")),
        ]
        for one in found:
            assert torch.equal(one.rows, torch.from_numpy(rows))
            assert list(one.labels) == [0, 1, 1, 2]
        assert found[3].ids == ["r0", "r1", "r2", "r3"]

    @pytest.mark.parametrize(
        ("write", "words"),
        [
            (lambda p: numpy.savez(p, features=numpy.ones((4, 3)), labels=numpy.ones(5)), "4 rows .* and 5 labels"),
            (lambda p: numpy.savez(p, features=numpy.ones(4), labels=numpy.ones(4)), r"the shape \(4,\)"),
            (lambda p: numpy.savez(p, features=numpy.ones((0, 3)), labels=numpy.ones(0)), "it has no rows"),
            (lambda p: numpy.savez(p, feature=numpy.ones((4, 3)), labels=numpy.ones(4)), "did you mean feature"),
            (lambda p: numpy.savez(p, features=numpy.full((4, 3), numpy.nan), labels=numpy.ones(4)), "4 rows have NaN"),
            (lambda p: p.write_bytes(b"no archive"), "cannot be read"),
        ],
    )
    def test_what_is_wrong_with_a_file_is_told(self, tmp_path: Path, write: Any, words: str) -> None:
        write(tmp_path / "bad.npz")
        with pytest.raises(RequestError, match=words):
            read_features(str(tmp_path / "bad.npz"))

    def test_text_classes_are_numbered_by_name_and_a_new_one_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text(
            "x,label\n" + "".join(f"{n},{'dog' if n % 2 else 'cat'}\n" for n in range(9))
        )
        (tmp_path / "val.csv").write_text("x,label\n1,owl\n")
        nested = settings_of(tmp_path / "train.csv", data__val_root=str(tmp_path / "val.csv"))
        with pytest.raises(RequestError, match="the class 'owl' is not among those"):
            run(nested, tmp_path / "run")

    def test_a_column_that_is_no_number_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("x,colour,label\n1,red,0\n2,blue,1\n")
        with pytest.raises(RequestError, match=r"line 2: 'colour' is 'red', not a number"):
            run(settings_of(tmp_path / "train.csv"), tmp_path / "run")

    def test_standardisation_comes_from_the_training_rows_and_travels_with_the_weights(self, tmp_path: Path) -> None:
        path = write_features(tmp_path / "features.npz", count=50)
        run(settings_of(path, hp__epochs=1), tmp_path / "run")
        stored = weights(tmp_path / "run")
        assert stored["mean"].shape == (6,)
        assert not torch.equal(stored["mean"], torch.zeros(6, dtype=torch.float64))

    def test_a_column_that_never_changes_does_no_harm(self) -> None:
        head = FeatureHead(2, [], 2)
        head.standardise(torch.tensor([[5.0, 1.0], [5.0, 3.0]]))
        assert torch.isfinite(head(torch.tensor([[5.0, 2.0]]))).all()


class TestMovingShapes:
    def test_items_are_the_same_each_time_and_differ_from_each_other(self) -> None:
        shapes = MovingShapes(8, classes=4, frames=4, size=24)
        assert torch.equal(shapes.prepare(3), shapes.prepare(3))
        assert not torch.equal(shapes.prepare(3), shapes.prepare(7))  # the same class, another clip
        assert shapes.prepare(0).shape == (3, 4, 24, 24)
        assert MovingShapes(8, classes=8, frames=None, size=24).prepare(0).shape == (3, 24, 24)

    def test_single_frames_do_not_tell_directions_apart(self) -> None:
        """The centre of a shape over many clips: the same in the middle frame, different in its movement."""
        shapes = MovingShapes(200, classes=4, frames=5, size=32, noise=0.0)
        rows = torch.arange(32.0)[:, None].expand(32, 32)
        columns = rows.T
        middles: dict[int, list[torch.Tensor]] = {}
        moves: dict[int, list[torch.Tensor]] = {}
        for item in range(200):
            clip = shapes.prepare(item).sum(dim=0)  # [frames, size, size]
            bright = (clip > (clip.max() + clip.min()) / 2).float()
            total = bright.sum(dim=(1, 2))
            centres = torch.stack([(bright * rows).sum((1, 2)), (bright * columns).sum((1, 2))], dim=1) / total[:, None]
            middles.setdefault(item % 4, []).append(centres[2])
            moves.setdefault(item % 4, []).append(centres[-1] - centres[0])
        for number, direction in enumerate(DIRECTIONS.values()):
            moved = torch.stack(moves[number])
            along = moved @ torch.tensor(direction)
            assert (along > 4).all()  # every clip moves its own way
            middle = torch.stack(middles[number]).mean(dim=0)
            assert (middle - 15.5).abs().max() < 2.5  # and stands at no place of its own

    def test_classes_have_names_and_bounds(self) -> None:
        assert shape_class_names(5, video=True)[:5] == (
            "square left", "square right", "square up", "square down", "disc left",
        )  # fmt: skip
        assert shape_class_names(len(SHAPES), video=False) == tuple(SHAPES)
        with pytest.raises(RequestError, match="2 to 8 classes"):
            shape_class_names(9, video=False)

    def test_a_small_net_learns_the_pictures(self, tmp_path: Path) -> None:
        from torch import nn

        torch.manual_seed(0)
        shapes = MovingShapes(256, classes=4, frames=None, size=24)
        inputs = torch.stack([shapes.prepare(item) for item in range(256)])
        net = nn.Sequential(
            nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(1),
            nn.Flatten(), nn.Linear(32, 4),
        )  # fmt: skip
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), shapes.labels).backward()  # type: ignore[arg-type]
            optimizer.step()
        fresh = MovingShapes(128, classes=4, frames=None, size=24, seed=9)
        unseen = torch.stack([fresh.prepare(item) for item in range(128)])
        assert (net(unseen).argmax(dim=1) == fresh.labels).float().mean() > 0.6  # by chance: a quarter


class TestModels:
    def test_random_weights_follow_the_seed(self, tmp_path: Path) -> None:
        def first_weight(seed: int) -> torch.Tensor:
            settings = train_settings(base(model__type="squeezenet1_1", hp__seed=seed, hp__size=32))
            return next(build_learner(settings, outputs=3).model.parameters()).detach()

        assert torch.equal(first_weight(1), first_weight(1))
        assert not torch.equal(first_weight(1), first_weight(2))

    def test_batch_normalisation_of_single_values_needs_two_samples(self) -> None:
        from torch import nn

        flat = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        assert smallest_micro_batch(flat, lambda: torch.zeros(1, 3)) == 2
        wide = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        assert smallest_micro_batch(wide, lambda: torch.zeros(1, 3, 8, 8)) == 1
        assert smallest_micro_batch(nn.Linear(3, 4), lambda: torch.zeros(1, 3)) == 1

    def test_a_file_of_weights_is_started_from(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        settings = train_settings(base(model__type="squeezenet1_1", hp__size=32))
        state = build_learner(settings, outputs=3).model.state_dict()
        save_file({name: torch.full_like(tensor, 0.5) for name, tensor in state.items()}, tmp_path / "w.safetensors")
        started = train_settings(
            base(model__type="squeezenet1_1", hp__size=32, model__weights=str(tmp_path / "w.safetensors"))
        )
        model = build_learner(started, outputs=3).model
        assert all((tensor == 0.5).all() for tensor in model.state_dict().values())
        other = build_learner(started, outputs=5)
        assert any("the head had 3 outputs" in note for note in other.notes)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model__type": "squeezenet1_1", "model__params": {"depth": 3}}, "takes none"),
            ({"model__type": "mlp", "model__params": {"hiden": [3]}}, "did you mean hidden"),
            ({"model__type": "resnet5000"}, "no torchvision or timm model"),
            ({"model__type": "squeezenet1_1", "hp__frames": 4}, "no such knob"),
        ],
    )
    def test_what_a_model_does_not_take_is_refused(self, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
        path = write_features(tmp_path / "features.npz")
        nested = settings_of(path, **{"model__params": {}, **changes})
        if changes["model__type"] != "mlp":
            del nested["data"]["root"]
        with pytest.raises(RequestError, match=words):
            run(nested, tmp_path / "run")
