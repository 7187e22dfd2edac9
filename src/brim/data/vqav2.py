"""VQAv2 as published: a file of questions, a file of annotations, and a folder of images.

    v2_OpenEnded_mscoco_val2014_questions.json
    v2_mscoco_val2014_annotations.json          none for the test splits, whose answers are not public
    val2014/COCO_val2014_000000000042.jpg

Any pair `*questions.json`, `*annotations.json` of that structure is read; `data_subtype` in them is the split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.data.base import BadRecord, ImageFile, Sample, SampleFormat, SampleSet
from brim.data.files import IMAGE_SUFFIXES, decoded, holds_any, read_content, text_digest
from brim.data.selection import choose_split
from brim.errors import RequestError

__all__ = ["VQAV2", "is_questions_file", "question_files", "read_vqav2"]

_SUBTYPE_IN_NAME = re.compile(r"((?:train|val|test|test-dev)20\d\d)_(?:questions|annotations)\.json$")


def is_questions_file(path: Path) -> bool:
    """Whether a file has that structure: by its name, and by the list in it."""
    if not path.name.endswith("questions.json") or not path.is_file():
        return False
    content = read_content(path)
    return content.lstrip()[:1] != b"[" and b'"questions"' in content


def question_files(folder: Path) -> list[Path]:
    """The files of questions in a folder."""
    return sorted(path for path in folder.glob("*questions.json") if is_questions_file(path))


def read_vqav2(path: Path, split: str | None, images: Path | None) -> SampleSet:
    """One sample per question; `path` is the folder or a file of questions; the ten answers are the references."""
    questions_file = _chosen_file(path, split)
    questions = _document(questions_file, "questions")
    subtype = str(questions.get("data_subtype") or _subtype(questions_file))
    annotations_file = _annotations_file(questions_file, subtype)
    annotations = _annotations(annotations_file) if annotations_file else None
    reader = _Reader(
        annotations=annotations,
        folder=_image_folder(questions_file.parent, images, _image_subtype(subtype)),
        pattern=_image_pattern(str(questions.get("data_type", "mscoco")), _image_subtype(subtype)),
    )
    read = [
        reader.sample(f"{questions_file.name} question {number}", question)
        for number, question in enumerate(questions["questions"], start=1)
    ]
    files = [questions_file, *([annotations_file] if annotations_file else [])]
    return SampleSet(
        name=f"{questions_file.parent.name}/{subtype}",
        format="vqav2",
        samples=tuple(item for item in read if isinstance(item, Sample)),
        suggested_task="vqa",
        bad=tuple(item for item in read if isinstance(item, BadRecord)),
        facts={"split": subtype, "content": {"sha256": text_digest(map(read_content, files))}},
        fields=_fields(subtype, annotations_file is not None),
    )


def _fields(subtype: str, answered: bool) -> dict[str, str]:
    fields = {"prompt": "question", "image": "image_id", "id": "question_id", "split": subtype}
    return fields | ({"reference": "answers", "group": "answer_type/question_type"} if answered else {})


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Turns questions into samples."""

    annotations: Mapping[str, dict[str, Any]] | None  # by question_id
    folder: Path
    pattern: str  # of an image's name
    images: dict[int, ImageFile] = field(default_factory=dict)  # several questions are about one image

    def sample(self, place: str, question: Any) -> Sample | BadRecord:
        missing = [key for key in ("question_id", "question", "image_id") if not _has(question, key)]
        if missing:
            return BadRecord(place=place, reason=f"has no {', '.join(missing)}")
        record: dict[str, Any] = question
        references: tuple[str, ...] = ()
        if self.annotations is not None:
            annotation = self.annotations.get(str(question["question_id"]), {})
            references = _answers(annotation)
            if not references:
                reason = f"question_id {question['question_id']} has no annotation with answers"
                return BadRecord(place=place, reason=reason)
            record = question | annotation
        try:
            image = self._image(int(question["image_id"]))
        except (TypeError, ValueError):
            return BadRecord(place=place, reason=f"image_id {question['image_id']!r} is not a number")
        kinds = [str(record[key]) for key in ("answer_type", "question_type") if key in record]
        return Sample(
            id=str(question["question_id"]),
            prompt=str(question["question"]),
            images=(image,),
            references=references,
            group="/".join(kinds) or None,
            original=record,
        )

    def _image(self, number: int) -> ImageFile:
        if number not in self.images:
            self.images[number] = ImageFile(path=self.folder / self.pattern.format(number))
        return self.images[number]


def _answers(annotation: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return tuple(str(answer["answer"]) for answer in annotation["answers"])
    except (KeyError, TypeError):
        return ()


def _has(record: Any, key: str) -> bool:
    return isinstance(record, dict) and record.get(key) is not None


def _annotations(path: Path) -> dict[str, dict[str, Any]]:
    return {
        str(annotation["question_id"]): annotation
        for annotation in _document(path, "annotations")["annotations"]
        if _has(annotation, "question_id")
    }


def _document(path: Path, wanted: str) -> dict[str, Any]:
    try:
        document = json.loads(decoded(read_content(path), path))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(document, dict) or not isinstance(document.get(wanted), list):
        found = f"the keys {', '.join(document)}" if isinstance(document, dict) else "a list"
        raise RequestError(f"{path} has no list {wanted!r} as VQAv2's files have; it holds {found}")
    return document


def _chosen_file(path: Path, split: str | None) -> Path:
    if path.is_file():
        if split is not None:
            choose_split([_subtype(path)], split, where=str(path))
        return path
    by_split: dict[str, list[Path]] = {}
    for file in question_files(path):
        by_split.setdefault(_subtype(file), []).append(file)
    chosen = by_split[choose_split(list(by_split), split, where=str(path))]
    if len(chosen) > 1:
        names = ", ".join(file.name for file in chosen)
        raise RequestError(
            f"{path} has several files of questions for one split: {names}; give one of them as the path"
        )
    return chosen[0]


def _subtype(path: Path) -> str:
    """The split of a file: from its name as published, else from its content."""
    match = _SUBTYPE_IN_NAME.search(path.name)
    if match:
        return match[1]
    document = _document(path, "questions" if path.name.endswith("questions.json") else "annotations")
    return str(document.get("data_subtype") or path.name.removesuffix(".json"))


def _annotations_file(questions: Path, subtype: str) -> Path | None:
    """The annotations of the questions: by the published name, else by the split."""
    name = re.sub(r"(OpenEnded|MultipleChoice)_", "", questions.name).removesuffix("questions.json")
    published = questions.with_name(f"{name}annotations.json")
    if published.is_file():
        return published
    others = sorted(questions.parent.glob("*annotations.json"))
    found = [path for path in others if _subtype(path) == subtype]
    if len(found) == 1:
        return found[0]
    if not found and subtype.startswith("test"):
        return None
    problem = f"there are several: {', '.join(path.name for path in found)}" if found else "it is not there"
    raise RequestError(f"{questions}: its annotations should be in {published.name} beside it, but {problem}")


def _image_subtype(subtype: str) -> str:
    return subtype.replace("test-dev", "test")  # a part of the test questions, with the same images


def _image_pattern(data_type: str, subtype: str) -> str:
    if data_type == "mscoco":
        return f"COCO_{subtype}_{{:012d}}.jpg"
    return f"{data_type}_{subtype}_{{:012d}}.png"  # the abstract scenes


def _image_folder(beside: Path, images: Path | None, subtype: str) -> Path:
    """The folder of the images: named after the split, or the folder given, or `images`."""
    root = images if images is not None else beside
    named = [root / subtype, root / "images" / subtype]
    plain = [root] if images is not None or holds_any(beside, IMAGE_SUFFIXES) else [root / "images"]
    return next((folder for folder in [*named, *plain] if folder.is_dir()), named[0])


def _has_questions(path: Path) -> bool:
    return bool(question_files(path)) if path.is_dir() else is_questions_file(path)


VQAV2 = SampleFormat(
    name="vqav2",
    title="VQAv2",
    found_in=_has_questions,
    owns=_has_questions,
    read=read_vqav2,
    tasks=("vqa", "generate"),
)
