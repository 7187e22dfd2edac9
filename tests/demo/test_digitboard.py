"""DigitBoard: the same files from the same seed, in VQAv2's form, and no held-out scan in training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from brim.data.images import image_size
from brim.data.open import DataRequest, open_data
from brim.demo.digitboard import (
    ALL_KINDS,
    LAYOUTS,
    Board,
    board_pixels,
    boards,
    draw_board,
    draw_questions,
    scan_numbers,
    write_digitboard,
)
from brim.errors import RequestError

pytest.importorskip("sklearn")


def documents(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    (questions,) = folder.glob("v2_OpenEnded_*_questions.json")
    (annotations,) = folder.glob("v2_*_annotations.json")
    return json.loads(questions.read_text()), json.loads(annotations.read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_equal_seeds_write_equal_files_and_other_seeds_do_not(tmp_path: Path) -> None:
    one, same, other = (
        contents(write_digitboard(tmp_path / name, questions=21, seed=seed))
        for name, seed in (("one", 5), ("same", 5), ("other", 6))
    )
    assert one == same
    assert all(one[name] != other[name] for name in one)


def test_the_files_have_the_official_fields_and_ten_answers(tmp_path: Path) -> None:
    questions, annotations = documents(write_digitboard(tmp_path, questions=42, seed=1))
    assert {"info", "license", "data_type", "data_subtype", "task_type", "questions"} == set(questions)
    assert {"info", "license", "data_type", "data_subtype", "annotations"} == set(annotations)
    assert len(questions["questions"]) == len(annotations["annotations"]) == 42
    assert len({question["question_id"] for question in questions["questions"]}) == 42
    for question, annotation in zip(questions["questions"], annotations["annotations"], strict=True):
        assert set(question) == {"image_id", "question_id", "question"}
        assert set(annotation) == {
            "image_id", "question_id", "question_type", "answer_type", "multiple_choice_answer", "answers",
        }  # fmt: skip
        assert (question["image_id"], question["question_id"]) == (annotation["image_id"], annotation["question_id"])
        assert annotation["answer_type"] in ("number", "yes/no")
        assert [answer["answer_id"] for answer in annotation["answers"]] == list(range(1, 11))
        assert all(set(answer) == {"answer", "answer_confidence", "answer_id"} for answer in annotation["answers"])
        wrong = [answer for answer in annotation["answers"] if answer["answer_confidence"] == "maybe"]
        assert len(wrong) <= 2  # so that the right answer is worth 1


def test_questions_about_a_board_differ_and_are_answered_by_its_digits() -> None:
    for board, generator in (next(boards(seed=seed, split="train")) for seed in range(40)):
        questions = draw_questions(generator, board, count=12, kinds=ALL_KINDS)
        assert len({question.text for question in questions}) == 12
        for question in questions:
            assert question.answer == expected_answer(board, question.text)


def expected_answer(board: Board, question: str) -> str:
    """The answer, worked out from the question's words alone."""
    words = question.lower().rstrip("?").split()
    last_row, last_column = board.layout.rows - 1, board.layout.columns - 1
    if words[0] == "is":
        value = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"].index(words[-1])
        return "yes" if any(digit.value == value for digit in board.digits) else "no"
    if words[-1] == "largest":
        return str(max(board.digits, key=lambda digit: digit.side).value)
    if "row" in words:
        cell = int(words[-3]) - 1, int(words[-1]) - 1
    else:
        cell = {"top": 0, "bottom": last_row}[words[-2]], {"left": 0, "right": last_column}[words[-1]]
    (digit,) = (digit for digit in board.digits if (digit.row, digit.column) == cell)
    return str(digit.value)


def test_validation_scans_are_disjoint_from_training_scans() -> None:
    from sklearn.datasets import load_digits

    train, held_out = scan_numbers("train"), scan_numbers("heldout")
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 1797
    scans = load_digits().images
    assert not {scans[scan].tobytes() for scan in train} & {scans[scan].tobytes() for scan in held_out}
    for split, allowed in (("train", set(train)), ("heldout", set(held_out))):
        generator = random.Random(1)
        used = {digit.scan for _ in range(100) for digit in draw_board(generator, split=split).digits}
        assert used <= allowed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_board_has_its_digits_in_cells_and_one_largest(layout: Any) -> None:
    board = draw_board(random.Random(2), split="train", layout=layout)
    pixels = board_pixels(board)
    assert pixels.shape == (layout.height, layout.width, 3)
    sides = sorted(digit.side for digit in board.digits)
    assert sides[0] >= 7
    assert sides[-1] >= 36
    assert sides[-2] <= 16
    for digit in board.digits:
        inside = pixels[digit.top : digit.top + digit.side, digit.left : digit.left + digit.side, 1]
        assert inside.max() > 200  # the ground's green is 16
        assert digit.row == (digit.top + digit.side // 2) * layout.rows // layout.height
        assert digit.column == (digit.left + digit.side // 2) * layout.columns // layout.width


def test_brim_opens_it_as_vqav2(tmp_path: Path) -> None:
    folder = write_digitboard(tmp_path / "boards", questions=10, seed=3)
    data = open_data(DataRequest(path=str(folder)))
    assert (data.format, data.suggested_task, data.name) == ("vqav2", "vqa", "boards/heldout")
    assert len(data.samples) == 10
    assert data.bad == ()
    shapes = {(layout.width, layout.height) for layout in LAYOUTS}
    for sample in data.samples:
        assert len(sample.references) == 10
        assert image_size(sample.images[0]) in shapes


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        write_digitboard(tmp_path, questions=0, seed=1)
    with pytest.raises(RequestError, match="train and heldout"):
        write_digitboard(tmp_path, questions=1, seed=1, split="val")  # type: ignore[arg-type]
