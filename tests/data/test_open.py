from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brim.data.selection import choose_split
from brim.errors import RequestError
from brim.storage.fingerprint import fingerprint
from tests.data.media_files import opened, write_image, write_lines

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

QA = [{"question": "Is it red?", "answer": "yes"}, {"question": "How many?", "answer": "2"}]


class TestFormats:
    def test_a_missing_path_is_refused_with_the_nearest_name(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "validation.jsonl", *QA)
        with pytest.raises(
            RequestError, match=r"validaton.jsonl: there is no such file or folder; did you mean validation.j"
        ):
            opened(tmp_path / "validaton.jsonl")

    def test_a_hub_name_is_refused_because_nothing_is_downloaded(self) -> None:
        with pytest.raises(RequestError, match="no such file or folder; brim downloads nothing"):
            opened(Path("some-lab/some-set"))

    @pytest.mark.parametrize("name", ["data.xlsx", "data", "data.parquet.gz", "photo.jpg"])
    def test_a_file_of_another_kind_is_refused_with_what_can_be_read(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("x")
        with pytest.raises(RequestError, match=rf"{name}: .*brim reads .*JSONL \(.jsonl, .ndjson, .json, also .gz\)"):
            opened(tmp_path / name)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ([], "is an empty folder; brim reads"),
            (["notes.txt"], r"holds no data that brim can read \(notes.txt"),
            (["a.jpg", "b.jpg"], "holds images, but no folder for each class"),
            (["a.json", "b.json"], "holds no data"),
        ],
    )
    def test_a_folder_without_data_is_refused(self, tmp_path: Path, names: list[str], message: str) -> None:
        for name in names:
            (tmp_path / name).write_text("[]")
        with pytest.raises(RequestError, match=message):
            opened(tmp_path)

    def test_a_folder_of_two_kinds_is_refused(self, tmp_path: Path) -> None:
        for name in ("cat/1.jpg", "dog/1.jpg"):
            write_image(tmp_path / name)
        (tmp_path / "cat" / "1.avi").touch()
        with pytest.raises(RequestError, match="could be read as image_folder or as ucf101"):
            opened(tmp_path)
        (tmp_path / "cat" / "1.avi").unlink()
        write_lines(tmp_path / "data.jsonl", *QA)
        with pytest.raises(RequestError, match="could be read as jsonl or as image_folder; give the file"):
            opened(tmp_path)

    def test_one_table_with_a_folder_of_images_is_that_table(self, tmp_path: Path) -> None:
        write_image(tmp_path / "images" / "1.jpg")
        write_lines(tmp_path / "data.jsonl", {"image": "1.jpg", "question": "?"})
        assert opened(tmp_path).format == "jsonl"

    def test_one_json_document_is_read_unless_there_are_classes(self, tmp_path: Path) -> None:
        (tmp_path / "data.json").write_text(json.dumps(QA))
        assert opened(tmp_path).format == "jsonl"
        for name in ("cat/1.jpg", "dog/1.jpg"):
            write_image(tmp_path / name)
        assert opened(tmp_path).format == "image_folder"

    def test_the_home_folder_may_be_abbreviated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        write_lines(tmp_path / "data.jsonl", *QA)
        assert len(opened(Path("~/data.jsonl")).samples) == 2

    def test_a_file_that_may_not_be_read_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        write_lines(tmp_path / "data.jsonl", *QA)
        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(RequestError, match=r"cannot read .*data.jsonl"):
            opened(tmp_path / "data.jsonl")


class TestSplits:
    def test_one_file_has_none(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=r"--split val: .*data.jsonl has no splits; leave --split out"):
            opened(write_lines(tmp_path / "data.jsonl", *QA), split="val")

    @pytest.mark.parametrize(
        ("available", "asked", "chosen"),
        [
            (["train"], None, "train"),
            (["train", "test"], None, "test"),
            (["train", "test", "val"], None, "val"),
            (["train", "Validation"], None, "Validation"),
            (["train2014", "val2014"], None, "val2014"),
            (["train2014", "val2014"], "val", "val2014"),
            (["train", "validation"], "val", "validation"),
            (["dev", "test"], "validation", "dev"),
            (["val", "validation"], "validation", "validation"),
            (["train", "test"], "TEST", "test"),
        ],
    )
    def test_splits_are_found_by_synonyms(self, available: list[str], asked: str | None, chosen: str) -> None:
        assert choose_split(available, asked, where="x") == chosen

    @pytest.mark.parametrize(
        ("available", "asked"),
        [
            (["train", "extra"], None),
            (["test01", "test02"], None),
            (["val2014", "val2017"], "val"),
            (["train"], "test"),
            (["validation_matched", "validation_mismatched"], "validation"),
        ],
    )
    def test_an_ambiguous_split_is_refused_with_those_present(self, available: list[str], asked: str | None) -> None:
        with pytest.raises(RequestError, match=f"x has the splits {', '.join(available)}"):
            choose_split(available, asked, where="x")


class TestLimit:
    def test_it_takes_that_many_evenly(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "data.jsonl", *({"question": str(number)} for number in range(100)))
        assert [each.prompt for each in opened(path, limit=4).samples] == ["12", "37", "62", "87"]
        assert len(opened(path, limit=1000).samples) == 100

    @pytest.mark.parametrize("limit", [0, -1])
    def test_none_is_refused(self, tmp_path: Path, limit: int) -> None:
        with pytest.raises(RequestError, match=f"--limit {limit}: it must be at least 1"):
            opened(write_lines(tmp_path / "data.jsonl", *QA), limit=limit)


class TestIdentity:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_image(tmp_path / "one" / "images" / "a.png", 10)
        write_lines(tmp_path / "one" / "data.jsonl", *({**record, "image": "a.png"} for record in QA))
        return tmp_path / "one"

    def identity(self, path: Path, **options: object) -> str:
        return fingerprint(opened(path, **options).facts)

    def test_it_is_json_and_independent_of_path_and_date(self, folder: Path, tmp_path: Path) -> None:
        before = self.identity(folder / "data.jsonl")
        shutil.copytree(folder, tmp_path / "two", copy_function=shutil.copyfile)
        os.utime(tmp_path / "two" / "data.jsonl", (1, 1))
        os.utime(tmp_path / "two" / "images" / "a.png", (1, 1))
        assert self.identity(tmp_path / "two" / "data.jsonl") == before
        assert str(tmp_path) not in json.dumps(opened(folder / "data.jsonl").facts)

    def test_a_limit_above_the_number_of_samples_changes_nothing(self, folder: Path) -> None:
        assert self.identity(folder / "data.jsonl", limit=2) == self.identity(folder / "data.jsonl")

    def test_it_changes_with_content_images_limit_and_fields(self, folder: Path) -> None:
        path = folder / "data.jsonl"
        seen = [
            self.identity(path),
            self.identity(path, limit=1),
            self.identity(path, mapping={"prompt": "answer"}),
        ]
        (folder / "images" / "a.png").write_bytes(b"other bytes")
        seen.append(self.identity(path))
        path.write_text(path.read_text() + "\n")
        seen.append(self.identity(path))
        assert len(set(seen)) == len(seen)

    def test_class_folders_are_identified_by_names_and_sizes(self, tmp_path: Path) -> None:
        write_image(tmp_path / "cat" / "1.png", 10)
        write_image(tmp_path / "dog" / "1.png", 10)
        before = self.identity(tmp_path)
        os.utime(tmp_path / "cat" / "1.png", (1, 1))
        assert self.identity(tmp_path) == before
        (tmp_path / "cat" / "1.png").write_bytes(b"other")
        changed = self.identity(tmp_path)
        (tmp_path / "cat").rename(tmp_path / "cow")
        assert len({before, changed, self.identity(tmp_path)}) == 3


def test_opening_a_text_file_imports_no_heavy_library(tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", *QA)
    code = (
        "import sys; from brim.data.open import DataRequest, open_data; import brim.data.images, brim.data.video; "
        f"open_data(DataRequest(path={str(tmp_path / 'data.jsonl')!r})); "
        "print([name for name in ('torch', 'pyarrow', 'datasets', 'PIL', 'av', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
