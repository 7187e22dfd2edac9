from __future__ import annotations

from pathlib import Path

import pytest

from brim.errors import RequestError
from tests.data.media_files import opened, write_image

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


class TestImages:
    def test_the_folder_is_the_class(self, tmp_path: Path) -> None:
        for name in ("dog/b.PNG", "dog/a.jpg", "cat/1.jpeg", "dog/deep/c.png"):
            write_image(tmp_path / "pets" / name)
        touch(tmp_path / "pets", "cat/notes.txt", "cat/.hidden.jpg", ".cache/x.jpg", "notes/readme.txt")
        found = opened(tmp_path / "pets")
        assert (found.name, found.format, found.suggested_task) == ("pets", "image_folder", "classify")
        assert found.class_names == ("cat", "dog")
        assert [(each.id, each.references, each.group) for each in found.samples] == [
            ("cat/1.jpeg", (0,), "cat"),
            ("dog/a.jpg", (1,), "dog"),
            ("dog/b.PNG", (1,), "dog"),
            ("dog/deep/c.png", (1,), "dog"),
        ]
        assert found.samples[0].images[0].path == tmp_path / "pets" / "cat" / "1.jpeg"

    def test_splits_above_class_folders_share_class_numbers(self, tmp_path: Path) -> None:
        touch(tmp_path, "train/ant/1.jpg", "train/cat/1.jpg", "val/cat/1.jpg", "val/cat/2.jpg", "val/dog/1.jpg")
        found = opened(tmp_path)
        assert found.fields["split"] == "val"
        assert found.class_names == ("ant", "cat", "dog")
        assert [(each.id, each.references) for each in found.samples] == [
            ("cat/1.jpg", (1,)),
            ("cat/2.jpg", (1,)),
            ("dog/1.jpg", (2,)),
        ]
        assert len(opened(tmp_path, split="train").samples) == 2
        assert opened(tmp_path, split="validation").fields["split"] == "val"
        with pytest.raises(RequestError, match=r"--split test: .* has the splits train, val"):
            opened(tmp_path, split="test")

    def test_an_empty_folder_is_a_class_without_images(self, tmp_path: Path) -> None:
        touch(tmp_path, "b/1.jpg", "c/1.jpg")
        (tmp_path / "a").mkdir()
        found = opened(tmp_path)
        assert (found.class_names, [each.references for each in found.samples]) == (("a", "b", "c"), [(1,), (2,)])

    def test_a_split_of_a_folder_without_splits_is_refused(self, tmp_path: Path) -> None:
        touch(tmp_path, "a/1.jpg")
        with pytest.raises(RequestError, match=r"--split val: .* has no splits"):
            opened(tmp_path, split="val")

    def test_only_classification_is_possible(self, tmp_path: Path) -> None:
        touch(tmp_path, "a/1.jpg")
        with pytest.raises(RequestError, match=r"--task generate: .*image_folder. is for classify"):
            opened(tmp_path, task="generate")


class TestVideos:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        """Two classes whose numbers are not in the order of their names, and the published lists."""
        root = touch(tmp_path / "ucf", "Surf/v_1.avi", "Surf/v_2.avi", "Apply/v_1.avi", "Apply/v_2.avi")
        lists = root / "ucfTrainTestlist"
        lists.mkdir()
        (lists / "classInd.txt").write_bytes(b"1 Surf\r\n2 Apply\r\n")
        (lists / "testlist01.txt").write_bytes(b"Surf/v_1.avi\r\nApply/v_2.avi\r\n")
        (lists / "testlist02.txt").write_bytes(b"Surf/v_2.avi\r\n")
        (lists / "trainlist01.txt").write_bytes(b"Surf/v_2.avi 1\r\nApply/v_1.avi 2\r\n")
        return root

    def test_the_first_test_list_is_read(self, root: Path) -> None:
        found = opened(root)
        assert (found.name, found.format, found.suggested_task) == ("ucf/test01", "ucf101", "classify")
        assert found.class_names == ("Surf", "Apply")
        assert [(each.id, each.references, each.group) for each in found.samples] == [
            ("Surf/v_1.avi", (0,), "Surf"),
            ("Apply/v_2.avi", (1,), "Apply"),
        ]
        assert found.samples[0].video == root / "Surf" / "v_1.avi"

    @pytest.mark.parametrize(
        ("asked", "ids"),
        [
            ("test", ["Surf/v_1.avi", "Apply/v_2.avi"]),
            ("test02", ["Surf/v_2.avi"]),
            ("testlist02", ["Surf/v_2.avi"]),
            ("train01", ["Surf/v_2.avi", "Apply/v_1.avi"]),
            ("train", ["Surf/v_2.avi", "Apply/v_1.avi"]),
        ],
    )
    def test_another_list_can_be_asked_for(self, root: Path, asked: str, ids: list[str]) -> None:
        assert [each.id for each in opened(root, split=asked).samples] == ids

    def test_an_unknown_list_is_refused(self, root: Path) -> None:
        with pytest.raises(RequestError, match=r"--split test07: .* has the splits test01, test02, train01"):
            opened(root, split="test07")

    def test_lists_may_be_in_the_root_and_videos_in_ucf_101(self, root: Path) -> None:
        (root / "UCF-101").mkdir()
        for name in ("Surf", "Apply"):
            (root / name).rename(root / "UCF-101" / name)
        for file in list((root / "ucfTrainTestlist").iterdir()):
            file.rename(root / file.name)
        (root / "ucfTrainTestlist").rmdir()
        assert opened(root).samples[0].video == root / "UCF-101" / "Surf" / "v_1.avi"

    def test_lists_of_other_videos_beside_the_folder_are_ignored(self, root: Path) -> None:
        other = touch(root / "other", "Cat/1.avi", "Dog/1.avi")
        assert opened(other).facts["split"] is None
        assert opened(other).class_names == ("Cat", "Dog")

    def test_without_lists_all_videos_are_read_and_classes_are_sorted(self, tmp_path: Path) -> None:
        touch(tmp_path, "b/2.mp4", "b/1.avi", "a/1.avi", "c/notes.txt")
        found = opened(tmp_path)
        assert [(each.id, each.references) for each in found.samples] == [
            ("a/1.avi", (0,)),
            ("b/1.avi", (1,)),
            ("b/2.mp4", (1,)),
        ]
        assert found.class_names == ("a", "b")
        with pytest.raises(RequestError, match=r"--split test01: .* has no lists such as testlist01.txt"):
            opened(tmp_path, split="test01")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("Fly/v_1.avi", "the class Fly of Fly/v_1.avi is not among the known classes"),
            ("Surf/v_1.avi 2", "has class number 2, but Surf has the number 1"),
        ],
    )
    def test_a_class_number_that_disagrees_is_a_bad_record(self, root: Path, line: str, reason: str) -> None:
        (root / "ucfTrainTestlist" / "testlist01.txt").write_text(f"Surf/v_1.avi\n\n{line}\n")
        with pytest.raises(RequestError, match=f"testlist01.txt line 3: {reason}"):
            opened(root)
        assert len(opened(root, skip_bad=True).samples) == 1

    @pytest.mark.parametrize(
        ("content", "message"),
        [("Surf\n", "line 1: 'Surf' is not a class"), ("1 Surf\n3 Apply\n", "not numbered 1, 2, 3")],
    )
    def test_a_broken_list_of_classes_is_refused(self, root: Path, content: str, message: str) -> None:
        (root / "ucfTrainTestlist" / "classInd.txt").write_text(content)
        with pytest.raises(RequestError, match=message):
            opened(root)

    def test_a_list_of_missing_videos_is_refused(self, root: Path) -> None:
        for video in root.rglob("*.avi"):
            video.unlink()
        with pytest.raises(RequestError, match=r"of the first 2 images or videos none exists.*searched .*Surf"):
            opened(root)
