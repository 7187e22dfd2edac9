from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from tests.data.media_files import opened, write_image, write_lines

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

ANSWERS = ["yes"] * 7 + ["no"] * 3


def questions(subtype: str, *numbers: int) -> dict[str, Any]:
    return {
        "info": {"year": 2014},
        "task_type": "Open-Ended",
        "data_type": "mscoco",
        "data_subtype": subtype,
        "questions": [
            {"image_id": 42 + number, "question": f"Is it {number}?", "question_id": 42000 + number}
            for number in numbers
        ],
    }


def annotations(subtype: str, *numbers: int) -> dict[str, Any]:
    return {
        "data_type": "mscoco",
        "data_subtype": subtype,
        "annotations": [
            {
                "question_type": "is it",
                "multiple_choice_answer": "yes",
                "answers": [{"answer": text, "answer_confidence": "yes", "answer_id": 1} for text in ANSWERS],
                "image_id": 42 + number,
                "answer_type": "yes/no",
                "question_id": 42000 + number,
            }
            for number in numbers
        ],
    }


def write(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The published layout, with two questions of the validation split and one of the test split."""
    root = tmp_path / "vqa"
    write(root / "v2_OpenEnded_mscoco_val2014_questions.json", questions("val2014", 0, 1))
    write(root / "v2_mscoco_val2014_annotations.json", annotations("val2014", 1, 0))
    write(root / "v2_OpenEnded_mscoco_test-dev2015_questions.json", questions("test-dev2015", 5))
    for number in (0, 1):
        write_image(root / "val2014" / f"COCO_val2014_0000000000{42 + number}.jpg")
    write_image(root / "test2015" / "COCO_test2015_000000000047.jpg")
    return root


def test_a_question_becomes_a_sample_with_ten_references(folder: Path) -> None:
    found = opened(folder)
    assert (found.name, found.format, found.suggested_task) == ("vqa/val2014", "vqav2", "vqa")
    assert [each.id for each in found.samples] == ["42000", "42001"]
    sample = found.samples[1]
    assert (sample.prompt, sample.references, sample.group) == ("Is it 1?", tuple(ANSWERS), "yes/no/is it")
    assert sample.images[0].path == folder / "val2014" / "COCO_val2014_000000000043.jpg"
    assert sample.original["multiple_choice_answer"] == "yes"
    assert sample.original["question"] == "Is it 1?"
    assert found.fields["reference"] == "answers"


def test_the_questions_file_may_be_given_itself(folder: Path) -> None:
    found = opened(folder / "v2_OpenEnded_mscoco_val2014_questions.json")
    assert (found.format, len(found.samples)) == ("vqav2", 2)


def test_a_test_split_has_no_references_and_the_images_of_the_whole_test(folder: Path) -> None:
    found = opened(folder, split="test-dev2015")
    assert (found.samples[0].references, found.samples[0].group) == ((), None)
    assert found.samples[0].images[0].path == folder / "test2015" / "COCO_test2015_000000000047.jpg"
    assert "reference" not in found.fields


def test_a_split_is_picked_by_its_name_or_how_it_starts(folder: Path) -> None:
    assert opened(folder, split="val").name == "vqa/val2014"
    with pytest.raises(RequestError, match=r"--split train2014: .* has the splits test-dev2015, val2014"):
        opened(folder, split="train2014")
    with pytest.raises(RequestError, match="--split train2014"):
        opened(folder / "v2_OpenEnded_mscoco_val2014_questions.json", split="train2014")


@pytest.mark.parametrize("place", ["pictures/val2014", "pictures"])
def test_the_images_may_be_elsewhere(folder: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "pictures").mkdir()
    (folder / "val2014").rename(tmp_path / "moved")
    (tmp_path / place).parent.mkdir(exist_ok=True)
    if place == "pictures":
        (tmp_path / "pictures").rmdir()
    (tmp_path / "moved").rename(tmp_path / place)
    found = opened(folder, split="val", images=str(tmp_path / "pictures"))
    assert found.samples[0].images[0].path == tmp_path / place / "COCO_val2014_000000000042.jpg"


def test_missing_images_are_refused_with_the_folders_searched(folder: Path) -> None:
    for image in (folder / "val2014").iterdir():
        image.unlink()
    with pytest.raises(RequestError, match=r"of the first 2 images .*searched .*val2014.*--images FOLDER"):
        opened(folder)


def test_files_of_other_names_are_paired_by_their_split(tmp_path: Path) -> None:
    write(tmp_path / "my_questions.json", questions("mine", 0))
    write(tmp_path / "their_annotations.json", annotations("mine", 0))
    write(tmp_path / "other_annotations.json", annotations("other", 9))
    write_image(tmp_path / "mine" / "COCO_mine_000000000042.jpg")
    found = opened(tmp_path)
    assert (found.samples[0].references, found.facts["split"]) == (tuple(ANSWERS), "mine")


def test_a_question_without_annotation_is_a_bad_record(folder: Path) -> None:
    write(folder / "v2_mscoco_val2014_annotations.json", annotations("val2014", 1))
    with pytest.raises(RequestError, match=r"val2014_questions.json question 1: question_id 42000 has no annotation"):
        opened(folder)
    found = opened(folder, skip_bad=True)
    assert ([each.id for each in found.samples], len(found.bad)) == (["42001"], 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": None}, "has no question"),
        ({"image_id": None}, "has no image_id"),
        ({"image_id": "cat"}, "image_id 'cat' is not a number"),
    ],
)
def test_an_incomplete_question_is_a_bad_record(folder: Path, change: dict[str, Any], reason: str) -> None:
    document = questions("val2014", 0, 1)
    document["questions"][0] |= change
    write(folder / "v2_OpenEnded_mscoco_val2014_questions.json", document)
    with pytest.raises(RequestError, match=f"questions.json question 1: {reason}"):
        opened(folder)


def test_missing_annotations_are_refused(folder: Path) -> None:
    (folder / "v2_mscoco_val2014_annotations.json").unlink()
    with pytest.raises(RequestError, match=r"should be in v2_mscoco_val2014_annotations.json beside it, but it is not"):
        opened(folder)


def test_two_files_for_one_split_are_refused(folder: Path) -> None:
    write(folder / "OpenEnded_mscoco_val2014_questions.json", questions("val2014", 0))
    with pytest.raises(RequestError, match=r"several files of questions for one split: OpenEnded_.*give one of them"):
        opened(folder)


def test_a_broken_file_is_refused(folder: Path) -> None:
    path = folder / "v2_mscoco_val2014_annotations.json"
    path.write_text('{"annotations": [')
    with pytest.raises(RequestError, match=r"annotations.json is not JSON"):
        opened(folder)
    write(path, {"notes": []})
    with pytest.raises(RequestError, match="has no list 'annotations' as VQAv2's files have; it holds the keys notes"):
        opened(folder)


def test_a_plain_list_of_that_name_is_read_as_records(tmp_path: Path) -> None:
    write(tmp_path / "my_questions.json", [{"question": "a", "answer": "b"}])
    assert opened(tmp_path / "my_questions.json").format == "jsonl"


def test_columns_cannot_be_mapped_and_the_task_is_vqa_or_generate(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"--map: .*has no columns"):
        opened(folder, mapping={"prompt": "question"})
    assert opened(folder, task="generate").suggested_task == "generate"
    with pytest.raises(RequestError, match=r"--task classify: vqa/val2014 .vqav2. is for vqa or generate"):
        opened(folder, task="classify")


def test_a_limit_keeps_the_kinds_of_questions_in_proportion(folder: Path) -> None:
    document = annotations("val2014", *range(40))
    for number, annotation in enumerate(document["annotations"]):
        annotation["answer_type"] = "number" if number % 4 == 0 else "other"
    write(folder / "v2_mscoco_val2014_annotations.json", document)
    write(folder / "v2_OpenEnded_mscoco_val2014_questions.json", questions("val2014", *range(40)))
    groups = [each.group for each in opened(folder, limit=8).samples]
    assert (groups.count("number/is it"), groups.count("other/is it")) == (2, 6)


def test_annotations_without_questions_are_not_vqav2(tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", {"question": "a"})
    assert opened(tmp_path).format == "jsonl"
