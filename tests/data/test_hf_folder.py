from __future__ import annotations

import pickle
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from brim.data.images import load_image
from brim.errors import RequestError
from tests.data.media_files import encoded, opened, write_image, write_lines

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

ANIMALS = ["zebra", "ant"]
CARD = """---
homepage: https://host/page
configs:
- config_name: default
  data_files:
  - split: gold
    path: {}
---
"""


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, and the library's own cache in a folder of the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    cache = tmp_path_factory.mktemp("hf-cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", cache)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def data(*prompts: str) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"question": list(prompts), "answer": ["yes"] * len(prompts)})


def pictures() -> datasets.Dataset:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=ANIMALS),
            "more": datasets.List(datasets.Image()),
        }
    )
    cells = [{"bytes": encoded(shade), "path": f"{shade}.png"} for shade in (10, 20, 30)]
    return datasets.Dataset.from_dict(
        {"image": cells, "label": [1, 0, 1], "more": [[cells[2], cells[1]], [], None]}, features=features
    )


def shades(sample: Any) -> list[int]:
    return [load_image(image).getpixel((0, 0))[0] for image in sample.images]


class TestSavedToDisk:
    def test_one_data_set(self, tmp_path: Path) -> None:
        data("a", "b").save_to_disk(tmp_path / "saved")
        found = opened(tmp_path / "saved")
        assert (found.format, found.name) == ("hf", "saved")
        assert [(each.id, each.prompt, each.references) for each in found.samples] == [
            ("1", "a", ("yes",)),
            ("2", "b", ("yes",)),
        ]
        with pytest.raises(RequestError, match=r"--split test: .*saved has no splits; leave --split out"):
            opened(tmp_path / "saved", split="test")

    def test_the_validation_split_is_taken_unless_another_is_asked_for(self, tmp_path: Path) -> None:
        splits = {"train": data("a"), "test": data("b"), "validation": data("c")}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
        found = opened(tmp_path / "saved")
        assert (found.name, found.fields["split"], found.samples[0].prompt) == ("saved/validation", "validation", "c")
        assert opened(tmp_path / "saved", split="train").samples[0].prompt == "a"
        with pytest.raises(
            RequestError, match=r"--split tset: .* has the splits train, test, validation; did you mean test"
        ):
            opened(tmp_path / "saved", split="tset")

    def test_stored_images_and_class_names(self, tmp_path: Path) -> None:
        pictures().save_to_disk(tmp_path / "saved")
        found = opened(tmp_path / "saved")
        assert (found.suggested_task, found.class_names) == ("classify", ("zebra", "ant"))
        assert [each.references for each in found.samples] == [(1,), (0,), (1,)]
        assert [shades(pickle.loads(pickle.dumps(each))) for each in found.samples] == [[10], [20], [30]]
        assert found.samples[0].original["image"] == "<stored image>"
        found = opened(tmp_path / "saved", mapping={"image": "more", "prompt": "label"}, task="generate")
        assert [shades(each) for each in found.samples] == [[30, 20], [], []]

    def test_a_bad_row_is_named(self, tmp_path: Path) -> None:
        datasets.Dataset.from_dict({"question": ["a", None]}).save_to_disk(tmp_path / "saved")
        with pytest.raises(RequestError, match="saved row 2: 'question' is empty"):
            opened(tmp_path / "saved")

    def test_a_damaged_folder_is_refused(self, tmp_path: Path) -> None:
        data("a").save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"junk")
        with pytest.raises(RequestError, match="saved: the datasets library cannot read it"):
            opened(tmp_path / "saved")
        (tmp_path / "dict").mkdir()
        (tmp_path / "dict" / "dataset_dict.json").write_text("{}")
        with pytest.raises(RequestError, match=r"dataset_dict.json cannot be read"):
            opened(tmp_path / "dict")

    def test_a_folder_that_was_rewritten_is_read_again(self, tmp_path: Path) -> None:
        for prompt in ("a", "b"):
            data(prompt).save_to_disk(tmp_path / "saved")
            assert opened(tmp_path / "saved").samples[0].prompt == prompt
            shutil.rmtree(tmp_path / "saved")

    def test_saving_it_again_elsewhere_keeps_its_identity(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            pictures().save_to_disk(tmp_path / name)
        assert opened(tmp_path / "one").facts == opened(tmp_path / "two").facts


class TestHubLayout:
    def test_parquet_files_by_split(self, tmp_path: Path) -> None:
        folder = tmp_path / "set" / "data"
        folder.mkdir(parents=True)
        pictures().to_parquet(folder / "train-00000-of-00001.parquet")
        pictures().select([2]).to_parquet(folder / "test-00000-of-00001.parquet")
        found = opened(tmp_path / "set")
        assert (found.format, found.name, found.fields["split"]) == ("hf", "set/test", "test")
        assert [shades(each) for each in found.samples] == [[30]]
        assert found.class_names == ("zebra", "ant")
        assert len(opened(tmp_path / "set", split="train").samples) == 3
        with pytest.raises(RequestError, match=r"--split validation: .*set has the splits train, test"):
            opened(tmp_path / "set", split="validation")

    def test_json_lines_by_split_name_the_broken_line(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "train.jsonl", {"question": "a"})
        write_lines(tmp_path / "test.jsonl", {"question": "b"}, ["stray"])
        with pytest.raises(RequestError, match=r"test.jsonl line 2: holds a list"):
            opened(tmp_path)
        found = opened(tmp_path, skip_bad=True)
        assert (found.format, [each.prompt for each in found.samples]) == ("hf", ["b"])

    def test_other_kinds_of_files_are_left_to_the_library(self, tmp_path: Path) -> None:
        folder = tmp_path / "set" / "data"
        data("a", "b").save_to_disk(tmp_path / "saved")
        folder.mkdir(parents=True)
        saved = next((tmp_path / "saved").glob("*.arrow"))
        saved.rename(folder / "test-00000-of-00001.arrow")
        found = opened(tmp_path / "set")
        assert (found.format, [each.prompt for each in found.samples]) == ("hf", ["a", "b"])

    def test_a_card_that_points_to_the_network_is_refused(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "data" / "test-0-of-1.jsonl", {"question": "a"})
        (tmp_path / "README.md").write_text(CARD.format("hf://datasets/a/b/c.csv"))
        with pytest.raises(RequestError, match=r"data are at hf://datasets/a/b/c.csv; brim downloads nothing"):
            opened(tmp_path)

    def test_a_card_that_names_local_files_is_used(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "data" / "x-0-of-1.jsonl", {"question": "a"})
        (tmp_path / "README.md").write_text(CARD.format("data/x*"))
        assert opened(tmp_path).fields["split"] == "gold"


def test_images_beside_their_table_are_read_from_it(tmp_path: Path) -> None:
    write_image(tmp_path / "cats" / "a.png", 40)
    write_image(tmp_path / "dogs" / "b.png", 50)
    write_lines(tmp_path / "metadata.jsonl", {"file_name": "cats/a.png", "text": "What?", "answer": "cat"})
    found = opened(tmp_path)
    assert (found.format, shades(found.samples[0])) == ("jsonl", [40])
