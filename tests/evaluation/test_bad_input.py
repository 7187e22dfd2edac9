"""What people give by mistake: a clear message before any work, or one failed sample, never a lost run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.metrics import registry as metrics_registry
from brim.tasks import registry as tasks_registry
from tests.evaluation.evaluation_runs import predictions, run, shout, write_lines, write_words

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").touch()
    with pytest.raises(RequestError, match=r"questions.jsonl.*(exist|no such)"):
        run(shout(tmp_path), tmp_path / "questions.jsonl", tmp_path / "run")


def test_a_file_with_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n\n")
    with pytest.raises(RequestError, match=r"data.jsonl is empty"):
        run(shout(tmp_path), tmp_path / "data.jsonl", tmp_path / "run")


def test_a_broken_line_is_named_by_its_number_and_can_be_left_out(tmp_path: Path) -> None:
    data = write_words(tmp_path / "data.jsonl", 4)
    lines = data.read_text().splitlines()
    lines[2] = '{"id": "broken", "question": '
    data.write_text("\n".join(lines))
    with pytest.raises(RequestError, match=r"data.jsonl line 3.*--skip-bad"):
        run(shout(tmp_path), data, tmp_path / "run")
    result = run(shout(tmp_path), data, tmp_path / "run", skip_bad=True)
    assert [sample["id"] for sample in result.samples] == ["w0", "w1", "w3"]
    assert (result.summary["num_samples"], result.summary["num_bad_records"]) == (3, 1)
    assert result.metrics["exact_match"]["count"] == 3


def test_a_missing_field_names_those_that_are_there(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"query": "a", "gold": "A"}])
    with pytest.raises(RequestError, match=r"no column for the prompt.*columns of data.jsonl are query, gold.*--map"):
        run(shout(tmp_path), data, tmp_path / "run")
    mapping = {"prompt": "query", "reference": "gold"}
    assert run(shout(tmp_path), data, tmp_path / "run", mapping=mapping).metrics["exact_match"]["value"] == 1.0


def test_pictures_that_are_not_there_or_not_pictures_fail_alone(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path
) -> None:
    whole = run(vision_language_model, picture_questions, tmp_path / "whole", max_new_tokens=3)
    shutil.copytree(picture_questions.parent, tmp_path / "data")
    (tmp_path / "data" / "1.png").write_bytes(b"no picture")
    (tmp_path / "data" / "4.png").unlink()
    result = run(vision_language_model, tmp_path / "data" / picture_questions.name, tmp_path / "run", max_new_tokens=3)
    errors = [sample["error"] for sample in result.samples]
    assert [error is not None for error in errors] == [False, True, False, False, True, False]
    assert "in no format that Pillow knows" in errors[1]["message"]
    assert "does not exist" in errors[4]["message"]
    kept = [0, 2, 3, 5]
    assert [predictions(result)[n] for n in kept] == [predictions(whole)[n] for n in kept]
    assert result.metrics["exact_match"]["count"] == 6


@pytest.mark.parametrize("files", [("tokenizer.json", "tokenizer_config.json")])
def test_a_model_folder_without_its_tokenizer(
    language_model: Path, questions: Path, tmp_path: Path, files: tuple[str, ...]
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(language_model, folder)
    for name in files:
        (folder / name).unlink()
    with pytest.raises(RequestError, match=r"its tokenizer cannot be loaded.*config.json.*save_pretrained"):
        run(folder, questions, tmp_path / "run")


def test_a_model_folder_without_its_processor(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(vision_language_model, folder)
    for name in ("processor_config.json", "preprocessor_config.json"):  # one or both, by version
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(RequestError, match=r"its processor cannot be loaded"):
        run(folder, picture_questions, tmp_path / "run")


def test_weights_that_were_cut_short(language_model: Path, questions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(language_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(RequestError, match="cannot be loaded"):
        run(folder, questions, tmp_path / "run")


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RequestError, match="it is a file; give a folder"):
        run(shout(tmp_path), write_words(tmp_path / "data.jsonl"), tmp_path / "run")
    with pytest.raises(RequestError, match=r"--output .*run/deeper"):
        run(shout(tmp_path), write_words(tmp_path / "data.jsonl"), tmp_path / "run" / "deeper")
    assert (tmp_path / "run").read_text() == "mine"


def test_an_output_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.storage.run_folder.os.access", lambda *_: False)  # a test may run as root
    with pytest.raises(RequestError, match="is not writable; choose another folder"):
        run(shout(tmp_path), write_words(tmp_path / "data.jsonl"), tmp_path / "run")


# ------------------------------------------------------------------------------------------------- plugins

PLUGIN = """
from brim.tasks.base import Answer, ReadyAnswers, Task
from brim.metrics.base import TextMetric


class Reverse(Task):
    name = "reverse"
    default_metrics = ("same_length",)

    def cost(self, item):
        return len(self.samples[item].prompt)

    def prepare(self, item):
        return self.samples[item].prompt

    def launch(self, items, prepared):
        return ReadyAnswers([Answer(prediction=text[::-1]) for text in prepared])


class SameLength(TextMetric):
    name = "same_length"

    def similarity(self, prediction, reference):
        return float(len(prediction) == len(reference))
"""


@pytest.fixture(autouse=True)
def _nothing_added_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file adds stays for the life of the process."""
    monkeypatch.setattr(metrics_registry, "_added", {})
    monkeypatch.setattr(tasks_registry, "_TASKS", dict(tasks_registry._TASKS))


def plugin(folder: Path, text: str = PLUGIN) -> str:
    file = folder / "plugin.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_file_can_add_a_task_and_a_metric(tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "data.jsonl", [{"question": "abc", "answer": "xyz"}, {"question": "de", "answer": "x"}]
    )
    result = run(shout(tmp_path), data, tmp_path / "run", plugins=[plugin(tmp_path)], task="reverse")
    assert predictions(result) == ["cba", "ed"]
    assert result.metrics["same_length"]["value"] == 0.5
    both = run(shout(tmp_path), data, tmp_path / "both", plugins=[plugin(tmp_path)], metrics="same_length,exact_match")
    assert predictions(both) == ["ABC", "DE"]
    assert set(both.metrics) == {"same_length", "exact_match"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines neither a metric nor a task"),
        ("def f(:\n", "SyntaxError"),
        ("import not_there_at_all\n", "not_there_at_all"),
        (PLUGIN.replace('name = "reverse"', 'name = "generate"'), "generate, which is one of brim's own"),
        (PLUGIN.replace('    name = "reverse"\n', ""), "the task Reverse has no name"),
        (PLUGIN.replace('name = "same_length"', 'name = "bleu"'), "bleu, which is one of brim's own"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_reported(tmp_path: Path, text: str, words: str) -> None:
    data = write_words(tmp_path / "data.jsonl")
    with pytest.raises(RequestError, match=words) as caught:
        run(shout(tmp_path), data, tmp_path / "run", plugins=[plugin(tmp_path, text)])
    assert str(caught.value).startswith("--plugin ")


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--plugin .*absent.py.*no such file"):
        run(shout(tmp_path), write_words(tmp_path / "data.jsonl"), tmp_path / "run", plugins=["absent.py"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return {}['x']", r"metric same_length: sample w\d+ raised KeyError: 'x'"),
        ("return 3.0", r"metric same_length: scored 3.0"),
    ],
)
def test_a_metric_that_raises_names_itself_and_the_sample(tmp_path: Path, body: str, words: str) -> None:
    text = PLUGIN.replace("return float(len(prediction) == len(reference))", body)
    data = write_words(tmp_path / "data.jsonl")
    with pytest.raises(RequestError, match=words):
        run(shout(tmp_path), data, tmp_path / "run", plugins=[plugin(tmp_path, text)], metrics="same_length")


def test_a_task_that_raises_costs_only_its_samples(tmp_path: Path) -> None:
    text = PLUGIN.replace("return self.samples[item].prompt\n", "return 1 / (item % 4)\n")
    text = text.replace("text[::-1]", "str(text)")
    data = write_words(tmp_path / "data.jsonl", 8)
    result = run(shout(tmp_path), data, tmp_path / "run", plugins=[plugin(tmp_path, text)], task="reverse")
    assert [sample["error"] is not None for sample in result.samples] == [number % 4 == 0 for number in range(8)]
    assert "ZeroDivisionError" in result.samples[0]["error"]["message"]
