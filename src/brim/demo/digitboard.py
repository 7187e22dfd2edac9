"""DigitBoard: questions about boards of handwritten digits, in VQAv2's format.

A board is an image of rows and columns; some of its cells hold a digit, a real scan of scikit-learn's bundled 8×8
digits scaled to 7 to 42 pixels. The smallest digits become unreadable when the board is shrunk, so only a model
with enough crops can read them. One scan in five is held out: no training board shows it.

    write_digitboard(Path("boards"), questions=400, seed=1)

All content follows from the seed. Knows nothing of models.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "ALL_KINDS",
    "KINDS",
    "LAYOUTS",
    "NUMBER_WORDS",
    "SIDES",
    "Board",
    "Digit",
    "Layout",
    "Question",
    "Split",
    "board_pixels",
    "boards",
    "draw_board",
    "draw_questions",
    "scan_numbers",
    "scan_value",
    "write_digitboard",
]

Split = Literal["train", "heldout"]

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS_PER_BOARD = 4
LARGEST = (36, 42)  # sides of a board's largest digit, in pixels
SIDES = (7, 16)  # of the others; 7 pixels are readable only where the board is not shrunk
_HOLD_OUT_EVERY = 5
_ANNOTATORS = 10
KINDS = {"cell": 0.65, "corner": 0.18, "largest": 0.17}  # shares of the questions
ALL_KINDS = {
    "cell": 0.55,
    "corner": 0.15,
    "largest": 0.14,
    "presence": 0.16,
}  # with one that the shipped model only guesses at


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Cells and pixels of a board; a cell has about 52 pixels each way."""

    rows: int
    columns: int
    height: int
    width: int


# Three shapes, so that the number of crops saturates at different values: 12, 12 and 10 of 64 pixels show every pixel.
LAYOUTS = (
    Layout(rows=3, columns=4, height=160, width=208),
    Layout(rows=4, columns=3, height=208, width=160),
    Layout(rows=2, columns=5, height=112, width=256),
)


@dataclass(frozen=True, kw_only=True)
class Digit:
    """One scan on a board: its cell, counted from 0, and its square of pixels."""

    value: int
    scan: int
    row: int
    column: int
    top: int
    left: int
    side: int


@dataclass(frozen=True, kw_only=True)
class Board:
    """The digits of one image; exactly one of them is by far the largest."""

    layout: Layout
    digits: tuple[Digit, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a board, with VQAv2's two ways of sorting questions: by opening words, by kind of answer."""

    text: str
    answer: str
    cells: tuple[tuple[int, int], ...]  # rows and columns, from 0, of the digits that give the answer
    question_type: str
    answer_type: Literal["number", "yes/no"]


def boards(*, seed: int, split: Split, layout: Layout | None = None) -> Iterator[tuple[Board, random.Random]]:
    """Boards without end, each with the generator that its questions are to be drawn by."""
    for number in itertools.count():
        generator = random.Random(f"digitboard {split} {seed} {number}")
        yield draw_board(generator, split=split, layout=layout), generator


def draw_board(
    generator: random.Random, *, split: Split, layout: Layout | None = None, sides: tuple[int, int] = SIDES
) -> Board:
    """Two cells in three hold a digit; one digit is large, the sides of the others are spread evenly by ratio."""
    layout = layout or generator.choice(LAYOUTS)
    cells = list(itertools.product(range(layout.rows), range(layout.columns)))
    filled = generator.sample(cells, k=round(len(cells) * 2 / 3))
    smallest, spread = sides[0], math.log(sides[1] / sides[0])
    others = [round(smallest * math.exp(generator.random() * spread)) for _ in filled[1:]]
    digits = [
        _placed(generator, layout, cell, side, generator.choice(_scans_by_value(split)[generator.randrange(10)]))
        for cell, side in zip(filled, [generator.randint(*LARGEST), *others], strict=True)
    ]
    return Board(layout=layout, digits=tuple(sorted(digits, key=lambda digit: (digit.row, digit.column))))


def _placed(generator: random.Random, layout: Layout, cell: tuple[int, int], side: int, scan: int) -> Digit:
    (row, column), margin = cell, 3
    top, bottom = row * layout.height // layout.rows, (row + 1) * layout.height // layout.rows
    left, right = column * layout.width // layout.columns, (column + 1) * layout.width // layout.columns
    return Digit(
        value=scan_value(scan),
        scan=scan,
        row=row,
        column=column,
        top=generator.randint(top + margin, bottom - margin - side),
        left=generator.randint(left + margin, right - margin - side),
        side=side,
    )


def draw_questions(
    generator: random.Random, board: Board, *, count: int, kinds: Mapping[str, float] = KINDS
) -> list[Question]:
    """Different questions about a board, of several kinds by their shares; there are at least as many as digits."""
    if not 1 <= count <= len(board.digits) + ("presence" in kinds) * 10:
        raise ValueError(f"{count} different questions cannot be drawn about a board of {len(board.digits)} digits")
    drawn: dict[str, Question] = {}
    while len(drawn) < count:
        kind = generator.choices(list(kinds), weights=list(kinds.values()))[0]
        question = _drawn(generator, board, kind)
        drawn.setdefault(question.text, question)
    return list(drawn.values())


def _drawn(generator: random.Random, board: Board, kind: str) -> Question:
    at_corners = _at_corners(board)
    if kind == "presence":
        return _presence(generator, board)
    if kind == "largest":
        largest = max(board.digits, key=lambda digit: digit.side)
        return _which("which digit is the", "largest", largest)
    if kind == "corner" and at_corners:
        corner, digit = generator.choice(at_corners)
        return _which("which digit is at the", corner, digit)
    digit = generator.choice(board.digits)
    return _which("which digit is in row", f"{digit.row + 1} column {digit.column + 1}", digit)


def _which(opening: str, rest: str, digit: Digit) -> Question:
    return Question(
        text=f"{opening.capitalize()} {rest}?",
        answer=str(digit.value),
        cells=((digit.row, digit.column),),
        question_type=opening,
        answer_type="number",
    )


def _at_corners(board: Board) -> list[tuple[str, Digit]]:
    rows, columns = {0: "top", board.layout.rows - 1: "bottom"}, {0: "left", board.layout.columns - 1: "right"}
    return [
        (f"{rows[digit.row]} {columns[digit.column]}", digit)
        for digit in board.digits
        if digit.row in rows and digit.column in columns
    ]


def _presence(generator: random.Random, board: Board) -> Question:
    """As often about a digit that is there as about one that is not."""
    present = {digit.value for digit in board.digits}
    yes = generator.random() < 0.5
    value = generator.choice(sorted(present if yes else set(range(10)) - present))
    article = "an" if NUMBER_WORDS[value] == "eight" else "a"
    return Question(
        text=f"Is there {article} {NUMBER_WORDS[value]}?",
        answer="yes" if yes else "no",
        cells=tuple((digit.row, digit.column) for digit in board.digits if digit.value == value),
        question_type="is there a",
        answer_type="yes/no",
    )


def board_pixels(board: Board) -> NDArray[np.uint8]:
    """The image, [height, width, 3]: white on a background that gets redder to the right and bluer downwards."""
    import numpy as np

    layout = board.layout
    ground = np.zeros((layout.height, layout.width, 3), dtype=np.float32)
    ground[..., 0] = 16 + 0.45 * np.arange(layout.width, dtype=np.float32)[None, :]
    ground[..., 1] = 16
    ground[..., 2] = 16 + 0.55 * np.arange(layout.height, dtype=np.float32)[:, None]
    for digit in board.digits:
        ink = _ink(digit.scan, digit.side)[..., None]  # [side, side, 1]
        square = ground[digit.top : digit.top + digit.side, digit.left : digit.left + digit.side]
        square += (255 - square) * ink
    return ground.round().clip(0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=60_000)  # at most about 60 MB, for training; a set of 1,000 questions fills 2 MB
def _ink(scan: int, side: int) -> NDArray[np.float32]:
    """A scan scaled to a square, 0 (paper) to 1 (ink)."""
    import numpy as np
    from PIL import Image

    small = Image.fromarray(_scans()[0][scan])
    scaled = small.resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(scaled, dtype=np.float32) * np.float32(1 / 255)


@functools.cache
def _scans() -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    """Every scan, [1797, 8, 8] with ink as 255, and what it shows."""
    import numpy as np

    try:
        digits: Any = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise RequestError("DigitBoard is made from scikit-learn's digits: pip install scikit-learn") from error
    return (digits.images * (255 / 16)).round().astype(np.uint8), tuple(int(value) for value in digits.target)


def scan_numbers(split: Split) -> tuple[int, ...]:
    """The scans that a split may show; no scan belongs to both."""
    if split not in ("train", "heldout"):
        raise RequestError(f"DigitBoard has the splits train and heldout, not {split!r}")
    held_out = split == "heldout"
    numbers = range(len(_scans()[1]))
    return tuple(number for number in numbers if (number % _HOLD_OUT_EVERY == _HOLD_OUT_EVERY - 1) == held_out)


def scan_value(scan: int) -> int:
    """The digit that a scan shows."""
    return _scans()[1][scan]


@functools.cache
def _scans_by_value(split: Split) -> tuple[tuple[int, ...], ...]:
    values = _scans()[1]
    return tuple(tuple(scan for scan in scan_numbers(split) if values[scan] == value) for value in range(10))


def write_digitboard(folder: Path, *, questions: int, seed: int, split: Split = "heldout") -> Path:
    """Write a split as VQAv2's files: questions, annotations of ten answers each, and a folder of images.

    Equal arguments give equal files. Four questions share one image; returns the folder.
    """
    from PIL import Image

    if questions < 1:
        raise RequestError(f"DigitBoard: {questions} questions were asked for; at least 1 is needed")
    images = folder / split
    images.mkdir(parents=True, exist_ok=True)
    asked: list[dict[str, Any]] = []
    annotated: list[dict[str, Any]] = []
    supply = boards(seed=seed, split=split)
    for image_id in range(1, math.ceil(questions / QUESTIONS_PER_BOARD) + 1):
        board, generator = next(supply)
        Image.fromarray(board_pixels(board)).save(images / f"digitboard_{split}_{image_id:012d}.png")
        count = min(QUESTIONS_PER_BOARD, questions - len(asked))
        for number, question in enumerate(draw_questions(generator, board, count=count)):
            key = {"image_id": image_id, "question_id": image_id * 1000 + number}
            asked.append({**key, "question": question.text})
            annotated.append({**key, **_annotation(generator, question)})
    for name, entries in (("questions", asked), ("annotations", annotated)):
        form = "OpenEnded_" if name == "questions" else ""
        document = {**_heading(split), **({"task_type": "Open-Ended"} if form else {}), name: entries}
        path = folder / f"v2_{form}digitboard_{split}_{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return folder


def _heading(split: Split) -> dict[str, Any]:
    return {
        "info": {"description": "DigitBoard: questions about boards of handwritten digits", "version": "1.0"},
        "license": {"name": "scans: UCI Optical Recognition of Handwritten Digits, as scikit-learn ships them"},
        "data_type": "digitboard",
        "data_subtype": split,
    }


def _annotation(generator: random.Random, question: Question) -> dict[str, Any]:
    return {
        "question_type": question.question_type,
        "answer_type": question.answer_type,
        "multiple_choice_answer": question.answer,
        "answers": _ten_answers(generator, question),
    }


def _ten_answers(generator: random.Random, question: Question) -> Sequence[dict[str, Any]]:
    """Eight annotators or more are right, some of them in words; the last two are wrong at times, as people are."""
    answers = []
    for number in range(1, _ANNOTATORS + 1):
        answer, confidence = question.answer, "yes"
        if number > _ANNOTATORS - 2 and generator.random() < 0.15:
            choices = ("yes", "no") if question.answer_type == "yes/no" else tuple(map(str, range(10)))
            answer = generator.choice([choice for choice in choices if choice != question.answer])
            confidence = "maybe"
        elif question.answer_type == "number" and generator.random() < 0.1:
            answer = NUMBER_WORDS[int(answer)]
        answers.append({"answer": answer, "answer_confidence": confidence, "answer_id": number})
    return answers
