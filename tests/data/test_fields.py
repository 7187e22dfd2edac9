from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from brim.data.base import Sample, SampleSet
from brim.data.samples import with_unique_ids
from brim.errors import RequestError
from brim.settings.declare import read_settings
from brim.settings.find_settings import DataSelection
from tests.data.media_files import opened, write_image, write_lines

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def parse_mapping(entries: list[str]) -> Mapping[str, str]:
    return read_settings(DataSelection, {"data": "d", **({"map": entries} if entries else {})}).mapping


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        write_image(tmp_path / name)
    (tmp_path / "a.avi").touch()
    return tmp_path / "data.jsonl"


def read(file: Path, *records: dict[str, Any], **options: Any) -> SampleSet:
    return opened(write_lines(file, *records), **options)


@pytest.mark.parametrize(
    ("record", "prompt", "references"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2", ("3",)),
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add.", ("3",)),
        ({"instruction": "Add.", "output": "3"}, "Add.", ("3",)),
        ({"input": "1 2", "output": "3"}, "1 2", ("3",)),
        ({"question": "Why?", "answer": "So."}, "Why?", ("So.",)),
        ({"question": "Why?", "answers": ["So.", "so"]}, "Why?", ("So.", "so")),
        ({"question": "Why?", "answers": [{"answer": "So."}, {"answer": "no"}]}, "Why?", ("So.", "no")),
        ({"question": "Why?", "answers": {"text": ["So.", "so"], "answer_start": [3, 4]}}, "Why?", ("So.", "so")),
        ({"question": "Why?", "answers": ["a"], "answer": "b"}, "Why?", ("a",)),
        ({"context": "It rains.", "question": "Why?", "answer": "So."}, "It rains.\nWhy?", ("So.",)),
        ({"prompt": "Say hi", "response": "hi"}, "Say hi", ("hi",)),
        ({"prompt": "Say hi", "completion": "hi"}, "Say hi", ("hi",)),
        ({"Question": "Why?", "ANSWER": 3}, "Why?", ("3",)),
        ({"question": "Is it?", "answer": True}, "Is it?", ("true",)),
        ({"prompt": "Say hi"}, "Say hi", ()),
        ({"question": "Why?", "answer": None}, "Why?", ()),
    ],
)
def test_prompt_and_answers_are_found_by_their_common_names(
    file: Path, record: dict[str, Any], prompt: str, references: tuple[str, ...]
) -> None:
    found = read(file, record)
    assert (found.samples[0].prompt, found.samples[0].references) == (prompt, references)
    assert found.suggested_task == "generate"


@pytest.mark.parametrize(
    ("record", "task"),
    [
        ({"image": "a.png", "question": "What?", "answer": "dog"}, "vqa"),
        ({"image": "a.png", "question": "What?"}, "vqa"),
        ({"image": "a.png", "instruction": "Name it.", "output": "dog"}, "generate"),
        ({"image": "a.png", "prompt": "Name it.", "answers": ["dog", "hound"]}, "vqa"),
        ({"image": "a.png", "label": 3}, "classify"),
        ({"image": "a.png", "captions": ["a dog", "a hound"]}, "generate"),
        ({"video_path": "a.avi", "label": "run"}, "classify"),
        ({"text": "good", "label": 1}, "classify"),
        ({"question": "What?", "options": ["a", "b"], "answer": 1}, "choice"),
        ({"image": "a.png", "question": "What?", "options": ["a", "b"], "answer": 1}, "choice"),
        ({"question": "What?", "answer": "dog"}, "generate"),
        ({"question": "What?", "answer": "dog", "label": "hard"}, "generate"),
    ],
)
def test_the_task_follows_from_the_fields(file: Path, record: dict[str, Any], task: str) -> None:
    assert read(file, record).suggested_task == task


def test_a_given_task_takes_precedence(file: Path) -> None:
    found = read(file, {"text": "good", "label": "pos"}, task="generate")
    assert (found.suggested_task, found.samples[0].references, found.class_names) == ("generate", ("pos",), ())
    found = read(file, {"question": "Is it?", "answer": "yes"}, {"question": "Or?", "answer": "no"}, task="classify")
    assert ([each.references for each in found.samples], found.class_names) == ([(1,), (0,)], ("no", "yes"))


@pytest.mark.parametrize(
    ("record", "task", "message"),
    [
        ({"question": "a", "answer": "b"}, "choice", "no choices .*columns of data.jsonl are question, answer"),
        ({"question": "a", "answer": "b"}, "vqa", "no image, which the task vqa needs"),
        ({"question": "a"}, "classify", "no answers, which the task classify needs.*--map label=COLUMN"),
        ({"question": "a", "choices": ["b", "c"]}, None, "no answers, which the task choice needs"),
        ({"question": "a"}, "clasify", "there are generate, vqa, choice, classify; did you mean classify"),
    ],
)
def test_a_task_that_the_data_lacks_columns_for_is_refused(
    file: Path, record: dict[str, Any], task: str | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        read(file, record, task=task)


def test_a_misspelt_prompt_column_is_refused_with_the_nearest_name(file: Path) -> None:
    with pytest.raises(RequestError, match=r"columns of data.jsonl are qestion, image, answer; did you mean qestion\?"):
        read(file, {"qestion": "Why?", "image": "a.png", "answer": "So."})
    found = read(file, {"qestion": "Why?", "image": "a.png", "answer": "So."}, mapping={"prompt": "qestion"})
    assert found.samples[0].prompt == "Why?"
    assert found.fields["prompt"] == "qestion"


def test_a_missing_prompt_is_refused_with_how_to_map_it(file: Path) -> None:
    with pytest.raises(RequestError, match=r"no column for the prompt.*are x, y.*--map prompt=COLUMN"):
        read(file, {"x": "a", "y": "b"})


class TestLabels:
    def test_texts_are_numbered_in_their_sorted_order(self, file: Path) -> None:
        found = read(file, *({"text": "t", "label": name} for name in ("pos", "neg", "pos ", "mixed")))
        assert found.class_names == ("mixed", "neg", "pos")
        assert [each.references for each in found.samples] == [(2,), (1,), (2,), (0,)]
        assert [each.group for each in found.samples] == ["pos", "neg", "pos", "mixed"]

    def test_whole_numbers_stay_as_they_are(self, file: Path) -> None:
        found = read(file, *({"text": "t", "label": label} for label in (10, "2", 3.0)))
        assert [each.references for each in found.samples] == [(10,), (2,), (3,)]
        assert found.class_names == ()
        assert found.samples[0].group == "10"

    def test_a_number_among_texts_is_a_name(self, file: Path) -> None:
        found = read(file, *({"text": "t", "label": label} for label in ("many", 3, "3")))
        assert (found.class_names, [each.references for each in found.samples]) == (("3", "many"), [(1,), (0,), (0,)])

    @pytest.mark.parametrize("label", [-1, None, ["a"], 0.5])
    def test_no_class_is_a_bad_record(self, file: Path, label: Any) -> None:
        with pytest.raises(RequestError, match=r"data.jsonl line 2: .*'label'"):
            read(file, {"text": "t", "label": 1}, {"text": "t", "label": label})

    def test_the_classes_do_not_depend_on_the_limit(self, file: Path) -> None:
        records = [{"text": "t", "label": name} for name in "abcdef"]
        assert read(file, *records, limit=2).class_names == tuple("abcdef")


class TestChoices:
    @pytest.mark.parametrize("answer", [1, "1", "B", "b", "blue", " blue "])
    def test_the_answer_is_a_position_a_letter_or_the_text(self, file: Path, answer: Any) -> None:
        found = read(file, {"question": "Which?", "choices": ["red", "blue"], "answer": answer})
        assert found.samples[0].choices == ("red", "blue")
        assert found.samples[0].references == (1,)

    def test_labels_of_the_choices_come_before_positions(self, file: Path) -> None:
        choices = {"text": ["red", "blue", "green"], "label": ["1", "2", "3"]}
        found = read(file, {"question": "Which?", "choices": choices, "answerKey": "2"})
        assert found.samples[0].references == (1,)

    def test_a_text_comes_before_a_position_and_a_number_does_not(self, file: Path) -> None:
        choices = ["2", "1", "0"]
        found = read(
            file,
            {"question": "Which?", "choices": choices, "answer": "0"},
            {"question": "Which?", "choices": choices, "answer": 0},
        )
        assert [each.references for each in found.samples] == [(2,), (0,)]

    def test_a_column_for_each_choice(self, file: Path) -> None:
        found = read(
            file,
            {"question": "Which?", "A": "red", "B": "blue", "C": 3, "answer": "C"},
            {"question": "Which?", "A": "red", "B": "blue", "C": "", "answer": "B"},
        )
        assert [each.choices for each in found.samples] == [("red", "blue", "3"), ("red", "blue")]
        assert [each.references for each in found.samples] == [(2,), (1,)]
        assert found.fields["choices"] == "A, B, C"

    def test_columns_for_the_choices_can_be_mapped(self, file: Path) -> None:
        record = {"question": "Which?", "good": "red", "poor": "blue", "best": "red"}
        found = read(file, record, mapping={"choices": "good, poor", "reference": "best"})
        assert (found.samples[0].choices, found.samples[0].references) == (("red", "blue"), (0,))

    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            ({"question": "?", "choices": ["a", "b"], "answer": "E"}, "is none of the 2 choices"),
            ({"question": "?", "choices": ["a", "b"], "answer": 2}, "is none of the 2 choices"),
            ({"question": "?", "choices": ["a", "b"], "answer": -1}, "is none of the 2 choices"),
            ({"question": "?", "choices": ["a"], "answer": 0}, "has 1 choice"),
            ({"question": "?", "choices": 7, "answer": 0}, "not a list of choices"),
            (
                {"question": "?", "choices": {"text": ["a", "b"], "label": ["A"]}, "answer": "A"},
                "2 choices and 1 label",
            ),
            ({"question": "?", "choices": ["a", "b"]}, "has no 'answer', which other records have; it has question"),
        ],
    )
    def test_an_invalid_choice_is_a_bad_record(self, file: Path, record: dict[str, Any], reason: str) -> None:
        good = {"question": "?", "choices": ["a", "b"], "answer": 0}
        found = read(file, good, record, skip_bad=True)
        assert [bad.place for bad in found.bad] == ["data.jsonl line 2"]
        assert reason in found.bad[0].reason


class TestIncompleteRows:
    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            (
                {"qestion": "b", "answer": "c"},
                "has no 'question', which other records have; it has qestion, answer; did",
            ),
            ({"question": "b"}, "has no 'answer', which other records have; it has question"),
            ({"question": " ", "answer": "c"}, "'question' is empty"),
            ({"question": "b", "answer": []}, "'answer' is empty"),
            ({"question": ["b"], "answer": "c"}, "'question' holds a list, not a text"),
            ({"question": "b", "answer": {"score": 3}}, "'answer' holds an object with the keys score"),
        ],
    )
    def test_they_are_bad_records(self, file: Path, record: dict[str, Any], reason: str) -> None:
        good = {"question": "a", "answer": "b"}
        with pytest.raises(RequestError, match=r"data.jsonl line 2: "):
            read(file, good, record)
        found = read(file, good, record, skip_bad=True)
        assert len(found.samples) == 1
        assert reason in found.bad[0].reason

    def test_a_null_image_is_none_and_a_missing_one_is_a_bad_record(self, file: Path) -> None:
        first = {"question": "a", "answer": "b", "image": "a.png"}
        found = read(file, first, {"question": "a", "answer": "b", "image": None})
        assert [len(each.images) for each in found.samples] == [1, 0]
        with pytest.raises(RequestError, match="line 2: has no 'image'"):
            read(file, first, {"question": "a", "answer": "b"})

    def test_a_row_without_image_and_prompt_is_a_bad_record(self, file: Path) -> None:
        with pytest.raises(RequestError, match="line 2: 'image' is empty"):
            read(file, {"image": "a.png", "label": 1}, {"image": None, "label": 1})


class TestMapping:
    def test_a_mapped_column_takes_precedence(self, file: Path) -> None:
        record = {"question": "a", "query": "b", "answer": "c", "gold": "d", "uid": "e", "kind": "f"}
        found = read(file, record, mapping={"prompt": "query", "reference": "GOLD", "id": "uid", "group": "kind"})
        sample = found.samples[0]
        assert (sample.prompt, sample.references, sample.id, sample.group) == ("b", ("d",), "e", "f")
        assert found.fields == {"prompt": "query", "reference": "gold", "id": "uid", "group": "kind"}

    def test_a_mapped_column_is_not_used_twice(self, file: Path) -> None:
        found = read(file, {"text": "a", "label": "b"}, mapping={"reference": "label"})
        assert (found.suggested_task, found.samples[0].references) == ("generate", ("b",))
        found = read(file, {"question": "a", "prompt": "b"}, mapping={"reference": "question"})
        assert (found.samples[0].prompt, found.samples[0].references) == ("b", ("a",))

    def test_an_unknown_column_is_refused_with_the_known_ones(self, file: Path) -> None:
        message = (
            r"--map prompt=qury: data.jsonl has no column 'qury'; its columns are query, answer; did you mean query\?"
        )
        with pytest.raises(RequestError, match=message):
            read(file, {"query": "a", "answer": "b"}, mapping={"prompt": "qury"})

    def test_an_unknown_field_is_refused(self, file: Path) -> None:
        with pytest.raises(RequestError, match="--map promt=query: there is no field 'promt'; did you mean prompt"):
            read(file, {"query": "a"}, mapping={"promt": "query"})

    def test_entries_are_parsed(self) -> None:
        assert parse_mapping(["prompt=query", " Reference = a=b "]) == {"prompt": "query", "reference": "a=b"}
        assert parse_mapping([]) == {}

    @pytest.mark.parametrize("entry", ["prompt", "prompt=", "=query", " = "])
    def test_an_entry_without_equals_sign_is_refused(self, entry: str) -> None:
        with pytest.raises(RequestError, match=f"--map {entry}: write it as FIELD=COLUMN"):
            parse_mapping([entry])

    def test_an_unknown_or_repeated_field_is_refused(self) -> None:
        with pytest.raises(RequestError, match=r"--map refrence=a: there is no 'refrence' among .*; did you mean"):
            parse_mapping(["refrence=a"])
        with pytest.raises(RequestError, match=r"--map prompt=b: prompt is given twice \(a and b\)"):
            parse_mapping(["prompt=a", "prompt=b"])


class TestIds:
    @pytest.mark.parametrize("column", ["id", "question_id", "idx", "sample_id"])
    def test_they_come_from_their_column(self, file: Path, column: str) -> None:
        assert read(file, {"question": "a", column: 77}).samples[0].id == "77"

    def test_a_repeated_id_gets_a_number(self) -> None:
        samples = [Sample(id=name) for name in ("a", "a", "b", "a", "a#2")]
        assert [each.id for each in with_unique_ids(samples)] == ["a", "a#3", "b", "a#4", "a#2"]

    def test_two_files_lines_with_one_id_stay_two_samples(self, file: Path) -> None:
        found = read(file, {"question": "a", "id": 1}, {"question": "b", "id": 1})
        assert [each.id for each in found.samples] == ["1", "1#2"]


def test_the_kind_of_question_is_the_group(file: Path) -> None:
    record = {"question": "a", "answer": "b", "answer_type": "number", "question_type": "how many"}
    assert read(file, record).samples[0].group == "number/how many"
    assert read(file, {"question": "a", "answer": "b", "category": "birds"}).samples[0].group == "birds"
    assert read(file, {"question": "a", "answer": "b"}).samples[0].group is None


def test_the_original_can_be_written_as_strict_json(file: Path) -> None:
    file.write_text('{"question": "a", "answer": "b", "score": NaN, "deep": [{"x": Infinity}]}')
    assert opened(file).samples[0].original == {"question": "a", "answer": "b", "score": None, "deep": [{"x": None}]}


class TestFileNames:
    def test_they_start_from_the_folder_of_the_data(self, file: Path, tmp_path: Path) -> None:
        found = read(file, {"image": "a.png", "question": "?"})
        assert found.samples[0].images[0].path == tmp_path / "a.png"

    def test_or_from_images_in_it(self, file: Path, tmp_path: Path) -> None:
        write_image(tmp_path / "images" / "c.png")
        found = read(file, {"image": "c.png", "question": "?"})
        assert found.samples[0].images[0].path == tmp_path / "images" / "c.png"

    def test_or_from_the_folder_given(self, file: Path, tmp_path: Path) -> None:
        write_image(tmp_path / "elsewhere" / "a.png")
        found = read(file, {"image": "a.png", "question": "?"}, images=str(tmp_path / "elsewhere"))
        assert found.samples[0].images[0].path == tmp_path / "elsewhere" / "a.png"
        with pytest.raises(RequestError, match=r"--images .*nowhere: there is no such folder"):
            read(file, {"image": "a.png", "question": "?"}, images=str(tmp_path / "nowhere"))

    def test_an_absolute_name_is_kept(self, file: Path, tmp_path: Path) -> None:
        found = read(file, {"image": str(tmp_path / "b.png"), "question": "?"}, images=str(tmp_path))
        assert found.samples[0].images[0].path == tmp_path / "b.png"

    def test_there_may_be_several_images(self, file: Path, tmp_path: Path) -> None:
        found = read(file, {"images": ["a.png", {"path": "b.png", "bytes": None}], "question": "?"})
        assert [image.path for image in found.samples[0].images] == [tmp_path / "a.png", tmp_path / "b.png"]

    def test_a_video(self, file: Path, tmp_path: Path) -> None:
        assert read(file, {"video": "a.avi", "question": "?"}).samples[0].video == tmp_path / "a.avi"

    def test_one_missing_image_fails_only_its_sample(self, file: Path) -> None:
        records = [{"image": "gone.png", "question": "?"}, {"image": "a.png", "question": "?"}]
        assert len(read(file, *records).samples) == 2

    def test_missing_images_are_refused_with_the_folders_searched(self, file: Path, tmp_path: Path) -> None:
        records = [{"image": f"{number}.png", "question": "?"} for number in range(30)] + [
            {"image": "a.png", "question": "?"}
        ]
        with pytest.raises(
            RequestError, match=r"of the first 20 images or videos none exists, such as 0.png"
        ) as caught:
            read(file, *records)
        assert f"searched {tmp_path}, {tmp_path / 'images'}" in str(caught.value)
        assert "--images FOLDER" in str(caught.value)

    @pytest.mark.parametrize("value", [7, {"url": "x"}, "https://host/a.png"])
    def test_an_invalid_name_is_a_bad_record(self, file: Path, value: Any) -> None:
        found = read(file, {"image": "a.png", "question": "?"}, {"image": value, "question": "?"}, skip_bad=True)
        assert [bad.place for bad in found.bad] == ["data.jsonl line 2"]
        assert "'image' holds" in found.bad[0].reason
