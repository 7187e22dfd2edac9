"""`brim profile` and `brim demo`: one document, a table that fits, and how each kind of request ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.demo.model import weights_folder
from tests import saved_models

Brim = Callable[..., Any]

MODELS = """
import time

def reader(reach: int = 4):
    return lambda samples: ["yes" if int(sample.id) < reach else "no" for sample in samples]

def broken(reach: int = 4):
    if reach == 3:
        raise ValueError("three is [not] supported")
    return lambda samples: ["yes" for sample in samples]

def even(reach: int = 4):
    def answer(samples):
        time.sleep(0.16 / reach)  # measured faster at larger values
        return ["yes" for sample in samples]
    return answer

def wrong(reach: int = 4):
    return lambda samples: ["no" for sample in samples]

def slow(reach: int = 4):
    def answer(samples):
        time.sleep(0.2)
        return ["yes" for sample in samples]
    return answer
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"id": str(number), "question": f"number {number}?", "answer": "yes"} for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def profile(brim: Brim, models: Path, questions: Path) -> Brim:
    def call(*arguments: str, name: str = "reader") -> Any:
        fixed = ("--metrics", "exact_match", "--device", "cpu", "--no-cache", "--latency-samples", "2")
        return brim("profile", "-m", f"py:{models}:{name}", "-d", str(questions), *fixed, *arguments)

    return call


def test_the_document_the_table_and_the_report(profile: Brim, tmp_path: Path) -> None:
    shown = profile("--knob", "reach=2,4,8", "-o", str(tmp_path / "shown"))
    assert shown.code == 0
    assert all(len(line) <= 80 for line in shown.out.splitlines() if str(tmp_path) not in line)
    heading, *rows = shown.out.splitlines()
    assert heading.split() == ["reach", "accuracy", "samples/s", "batch", "peak", "latency", "OOM"]
    assert [row.split()[-9] for row in rows[:3]] == ["0.250", "0.500", "1.000"]
    assert "reach=8" in shown.out
    page = (tmp_path / "shown" / "report.html").read_text()
    assert str(tmp_path / "shown" / "report.html") in shown.out
    assert "reach" in page
    as_json = profile("--knob", "reach", "--values", "2,4", "-o", str(tmp_path / "json"), "--json")
    document = json.loads(as_json.out)
    assert document["schema"] == "brim.profile/1"
    assert [entry["reach"] for entry in document["summary"]] == [2, 4]


def test_equal_scores_recommend_the_smallest_value_and_zeros_are_noted(profile: Brim, tmp_path: Path) -> None:
    arguments = ("--knob", "reach=8,2,4", "-b", "8", "--json")
    equal = json.loads(profile(*arguments, "-o", str(tmp_path / "equal"), name="even").out)
    advice = equal["recommendation"]
    assert [equal["summary"][place]["reach"] for place in (advice["cheapest_within"], advice["best"])] == [2, 2]
    assert [equal["summary"][place]["reach"] for place in advice["front"]] == [2]
    assert advice["all_zero"] is False
    assert "every point has the same accuracy" in advice["text"][0]
    wrong = json.loads(profile(*arguments, "-o", str(tmp_path / "wrong"), name="wrong").out)
    assert wrong["recommendation"]["all_zero"] is True
    assert wrong["recommendation"]["text"][0].startswith("Every point scored 0")
    assert "Every point scored 0" in (tmp_path / "wrong" / "report.html").read_text()


def test_flags_may_have_underscores_and_start_from_drops_values(profile: Brim, tmp_path: Path) -> None:
    result = profile("--knob", "reach", "--values", "2-6", "--start_from", "5", "--batch_size_for", "6=2",
                     "--batch_size", "4", "-o", str(tmp_path / "run"), "--json")  # fmt: skip
    document = json.loads(result.out)
    assert [(entry["reach"], entry["batch_size_used"]) for entry in document["summary"]] == [(5, 4), (6, 2)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--knob is missing"),
        (("--knob", "reach="), "whole range"),
        (("--knob", "reach", "--values", ""), "names no value"),
        (("--knob", "reach=2,many"), "whole number"),
        (("--knob", "reech=2"), "did you mean reach"),
        (("--knob", "reach", "--values", "2-4", "--start-from", "9"), "above every value"),
        (("--knob", "reach=2,3", "--knob", "dtype=float32", "--pairing", "zip"), "differ in length"),
        (("--knob", "reach=2", "--pairing", "sideways"), "--pairing"),
        (("--knob", "reach=2", "--sample", "lhs"), "--num-points"),
        (("--knob", "reach=2", "--batch-size-for", "3=8"), "no point"),
        (("--knob", "reach=2", "--resume"), "--output DIR"),
        (("--knob", "reach=2", "--order", "odd"), "--order"),
        (("--explain-speed", "--knob", "reach=2,3"), "one value"),
    ],
)
def test_a_wrong_request_ends_with_two_and_its_reason(
    profile: Brim, arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = profile(*arguments)
    assert result.code == 2, result.err
    assert says in " ".join(result.err.split())
    assert not (tmp_path / "runs").exists(), "nothing is written for a wrong request"


def test_one_point_that_fails_is_reported_and_ends_with_one(profile: Brim, tmp_path: Path) -> None:
    result = profile("--knob", "reach=2,3,4", "-o", str(tmp_path / "run"), name="broken")
    assert result.code == 1
    assert "failed: reach=3: " in result.out
    assert "three is [not] supported" in " ".join(result.out.split())
    again = profile("--knob", "reach=2,3,4", "-o", str(tmp_path / "run"), "--resume", name="broken")
    assert again.code == 1
    assert "2 were done already" in again.err


def test_ctrl_c_is_exit_130_and_resume_continues(brim: Brim, models: Path, questions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [
        sys.executable, "-m", "brim", "profile", "-m", f"py:{models}:slow", "-d", str(questions), "--device", "cpu",
        "--knob", "reach=2,4,6", "-b", "1", "--no-cache", "--latency-samples", "0", "-o", str(folder),
    ]  # fmt: skip
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"})
    try:
        deadline = time.monotonic() + 120
        second = folder / "values" / "reach=4" / "samples.jsonl"
        while not second.exists() or not second.read_text():  # from here on it is asleep most of the time
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, told
    assert f"--resume -o {folder}" in told.replace("\n", " ")
    done = brim(*command[3:], "--resume", "--json")
    assert done.code == 0, done.err
    assert [entry["num_samples"] for entry in json.loads(done.out)["summary"]] == [8, 8, 8]


def test_the_demo_profiles_the_shipped_model(brim: Brim, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Molmo2ForConditionalGeneration"):
        pytest.skip("transformers has no Molmo2 before 5.22")
    result = brim("demo", "--questions", "8", "--memory-limit", "12MiB", "-o", str(tmp_path / "demo"), "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    sizes = [entry["batch_size_used"] for entry in document["summary"]]
    assert sizes[0] == 8
    assert sum(size < 8 for size in sizes) >= 2, "a dear value does not fit all eight boards"
    assert {"profile.json", "profile.csv", "report.html", "run.json", "model", "boards", "values"} <= {
        path.name for path in (tmp_path / "demo").iterdir()
    }


def test_the_demo_leaves_the_boards_of_a_finished_one_alone(brim: Brim, tmp_path: Path) -> None:
    (tmp_path / "values" / "max_crops=1").mkdir(parents=True)
    (tmp_path / "values" / "max_crops=1" / "samples.jsonl").write_text("{}\n")
    result = brim("demo", "-o", str(tmp_path))
    assert result.code == 2
    assert "holds a profile already" in " ".join(result.err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["values"]


def test_the_demo_writes_files_for_commands_of_your_own(brim: Brim, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path / "demo"
    result = brim("demo", "--only-files", "--questions", "8", "-o", str(folder))
    assert result.code == 0, result.err
    assert {path.name for path in folder.iterdir()} == {"model", "boards"}
    assert (folder / "model" / "config.json").read_text() == (weights_folder() / "config.json").read_text()
    asked = brim("knobs", str(folder / "model"), "--json")
    assert "max_crops" in {knob["name"] for knob in json.loads(asked.out)["knobs"]}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.jsonl"
    path.write_text('{"question": "w1 w2", "answer": "w3"}\n')
    return path


@pytest.mark.parametrize(("tokens", "most"), [("600", "320"), ("319", "--max-tokens 318 or less")])
def test_answers_longer_than_the_position_limit_are_refused(
    brim: Brim, words: Path, tmp_path: Path, tokens: str, most: str
) -> None:
    model = saved_models.save_language_model(tmp_path / "lm")
    result = brim("profile", str(model), "-d", str(words), "--knob", "layers=1,2", "--max-tokens", tokens,
                  "--device", "cpu", "--no-cache", "-o", str(tmp_path / "run"))  # fmt: skip
    assert result.code == 2
    assert f"--max-tokens {tokens}" in result.err
    assert "320 positions" in " ".join(result.err.split())
    assert most in " ".join(result.err.split())


def test_layers_that_an_earlier_point_cut_off_come_back_at_a_later_one(brim: Brim, words: Path, tmp_path: Path) -> None:
    model = saved_models.save_language_model(tmp_path / "lm")
    result = brim("profile", str(model), "-d", str(words), "--knob", "layers=1,2", "--max-tokens", "2", "--json",
                  "--device", "cpu", "--no-cache", "--latency-samples", "0", "-o", str(tmp_path / "run"))  # fmt: skip
    assert result.code == 0, result.err
    assert [entry["state"] for entry in json.loads(result.out)["summary"]] == ["done", "done"]
