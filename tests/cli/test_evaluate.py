"""`brim eval`: one document, a table that fits, and how each kind of run ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from brim.cli.evaluate import EvalProgress, comparison_table, print_result
from brim.evaluation.run import EvalResult
from brim.running.results import ExecutionFigures
from tests import saved_models

Brim = Callable[..., Any]

MODELS = """
import time

def shout():
    return lambda samples: [sample.prompt.upper() for sample in samples]

def picky():
    def answer(samples):
        if any("bad" in sample.prompt for sample in samples):
            raise ValueError("this [one] cannot be answered")
        return [sample.prompt.upper() for sample in samples]
    return answer

def hungry(fits=0):
    def answer(samples):
        if len(samples) > fits:
            raise MemoryError
        return [sample.prompt.upper() for sample in samples]
    return answer

def interrupted():
    seen = []
    def answer(samples):
        seen.append(len(samples))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return [sample.prompt.upper() for sample in samples]
    return answer

def lost():
    seen = []
    def answer(samples):
        seen.append(len(samples))
        if len(seen) == 3:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return [sample.prompt.upper() for sample in samples]
    return answer

def unordered(kind="set"):
    kinds = {"set": set, "dict": lambda texts: dict.fromkeys(texts, 1), "generator": iter, "text": "".join,
             "none": lambda texts: None, "number": len}
    return lambda samples: kinds[kind]([sample.prompt.upper() for sample in samples])

def crowded():
    calls = []
    def answer(samples):
        calls.append(len(samples))
        if 2 <= len(calls) < 8 or any("giant" in sample.prompt for sample in samples):
            raise MemoryError
        return [sample.prompt.upper() for sample in samples]
    return answer
def halves():
    return lambda samples: ["\\ud83d \\udc80" for sample in samples]

def slow():
    def answer(samples):
        time.sleep(0.05)
        return [sample.prompt.upper() for sample in samples]
    return answer
"""


class Case:
    """A folder with models, questions and a place for runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = str(root / "run")
        (root / "models.py").write_text(MODELS)
        self.data = str(self.questions("data.jsonl", [f"a{number}" for number in range(12)]))

    def model(self, name: str = "shout") -> str:
        return f"py:{self.root / 'models.py'}:{name}"

    def questions(self, name: str, prompts: list[str]) -> Path:
        path = self.root / name
        path.write_text("".join(json.dumps({"question": text, "answer": text.upper()}) + "\n" for text in prompts))
        return path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (Path(self.out) / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    return Case(tmp_path)


SMALL = ("--device", "cpu", "--no-cache")


# ------------------------------------------------------------------------------------------------- what is printed


def test_json_is_one_document_and_nothing_else(brim: Brim, case: Case) -> None:
    result = brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, "--json", *SMALL)
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document == json.loads((Path(case.out) / "run.json").read_text())
    assert (document["schema"], document["kind"]) == ("brim.run/1", "eval")
    assert document["summary"]["metrics"]["exact_match"]["value"] == 1.0


def test_a_language_model_prints_no_other_word_on_standard_output(brim: Brim, case: Case) -> None:
    model = saved_models.save_language_model(case.root / "lm")
    data = case.questions("words.jsonl", ["w1 w2", "w3"])
    result = brim("eval", str(model), "-d", str(data), "-o", case.out, "--max-tokens", "3", "--json", *SMALL)
    assert result.code == 0, result.err
    assert json.loads(result.out)["summary"]["answer_tokens"]["max"] <= 3


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        (
            "w1 w2",
            ("--max-tokens", "600"),
            "--max-tokens 600: the shortest prompt has 2 tokens .* 320 positions.* 318 or",
        ),
        (
            "w1 " * 300,
            (),
            r"--max-tokens 256 \(the default\): .* 300 tokens .* 320 positions.* --max-tokens 20 or less",
        ),
        ("w1 " * 330, ("--max-tokens", "1"), "--data: the shortest prompt has 330 tokens .* 320 positions"),
    ],
)
def test_answers_too_long_for_every_prompt_are_refused_before_the_run(
    brim: Brim, case: Case, prompt: str, tokens: tuple[str, ...], words: str
) -> None:
    model = saved_models.save_language_model(case.root / "lm")
    data = case.questions("words.jsonl", [prompt, f"{prompt} w3"])
    result = brim("eval", str(model), "-d", str(data), "-o", case.out, *tokens, *SMALL)
    assert result.code == 2
    assert re.search(words, " ".join(result.err.split()))
    assert not (Path(case.out) / "samples.jsonl").exists()


def test_the_result_is_a_table_of_eighty_columns(brim: Brim, case: Case) -> None:
    result = brim(
        "eval", "-m", case.model(), "-d", case.data, "-o", case.out, "--metrics", "exact_match, rouge", *SMALL
    )
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split() == ["exact_match", "1.0000", "±", "0.0000"]
    assert lines[1].startswith("rouge_l")
    assert any(line.split() == ["samples", "12"] for line in lines)
    assert any(line.startswith("batch size") for line in lines)
    assert f"in {case.out}" in lines
    assert "12 samples of data.jsonl on cpu\n  prompt from question, reference from answer\n" in result.err
    assert "\x1b" not in result.out + result.err


SUMMARY: dict[str, Any] = {
    "num_samples": 214_354,
    "num_failed": 12,
    "metrics": {
        "choice_accuracy_normalised": {"value": 0.512345, "ci95": 0.00212},
        "vqa_accuracy_simple": {"value": 1.0, "ci95": 0.0},
    },
    "samples_per_second": 12_345.678,
    "batch_size_used": 4096,
    "batch_sizes": {"smallest": 1, "median": 4096, "largest": 8192, "per_rank": None},
    "oom_events": 103,
    "padding_fraction": 0.0312,
    "gpu_wait_fraction": 0.0003,
    "gpu_utilisation_mean": 0.98,
    "peak_reserved_bytes": 139 * 2**30,
    "answer_tokens": {"p50": 3, "p95": 5, "p99": 9, "max": 29, "truncated_fraction": 0.0123},
}


def printed(width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=False), file


def test_large_figures_and_long_errors_do_not_wrap_the_table() -> None:
    error = {"reason": "error", "message": "image /data/" + "x" * 300 + ".png cannot be read\nand more"}
    failed = {"id": "q[1]", "prediction": None, "reference": "1", "error": error}
    result = EvalResult(summary=SUMMARY, folder=Path("runs/eval"), plan=None, samples=tuple([failed] * 12))
    console, file = printed()
    print_result(console, result, examples=1)
    lines = file.getvalue().splitlines()
    heading = lines.index(next(line for line in lines if line.startswith("q[1]: None")))
    table = lines[:heading]
    assert len(table) == 2 + 9
    assert all(len(line) <= 80 for line in table)
    assert [line.split()[0] for line in table[:3]] == ["choice_accuracy_normalised", "vqa_accuracy_simple", "samples"]
    text = file.getvalue().replace("\n", "")
    assert "failed: q[1]: image" in text
    assert "… and 9 more" in text
    assert "and more" not in text.replace("and 9 more", "")


def test_compared_sizes_fit_eighty_columns() -> None:
    row = {
        "batch_size": 16_384, "seconds": 12_345.67, "samples_per_second": 123_456.7, "speed_up": 123.45,
        "gpu_utilisation_mean": 1.0, "peak_reserved_bytes": 139 * 2**30, "clear": True, "speed_up_low": 123.4,
        "speed_up_high": 123.5,
    }  # fmt: skip
    console, file = printed()
    console.print(comparison_table([row, {**row, "gpu_utilisation_mean": None, "peak_reserved_bytes": None}]))
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].split() == ["batch", "seconds", "samples/s", "speed-up", "95", "%", "GPU", "use", "peak", "memory"]


def test_the_bar_shows_rate_batch_memory_and_ooms_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    with EvalProgress(console) as progress:
        progress.started(100, 20)
        figures = ExecutionFigures(items=30, seconds=2.0, batch_counts=[16, 14], oom_events=2)
        progress.batch(figures, cap=64, reserved_bytes=3 * 2**30)
        progress.note("a batch of 16 failed")
        progress._progress.refresh()
    shown = file.getvalue()
    for words in (
        "50/100",
        "15.0/s",
        "batch 14",
        "3.0 GiB",
        "2 OOM",
        "note: a batch of 16 failed",
        "resumed: 20 of 100",
    ):
        assert words in shown, words


def test_verbose_shows_the_first_answers(brim: Brim, case: Case) -> None:
    result = brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, "--verbose", *SMALL)
    assert "'A0' (reference 'A0')" in result.out


@pytest.mark.usefixtures("quick_rounds")
def test_batch_sizes_are_compared_in_a_table(brim: Brim, case: Case) -> None:
    arguments = ("eval", "-m", case.model(), "-d", case.data, "--compare-batch", "1,4", *SMALL, "-o", case.out)
    shown = brim(*arguments)
    assert shown.code == 0, shown.err
    rows = [line.split() for line in shown.out.splitlines()]
    assert [row[0] for row in rows[1:3]] == ["1", "4"]
    assert rows[1][3] == "1.00×"
    assert "recommended: " in shown.out
    assert max(map(len, shown.out.splitlines()[:3])) <= 80
    names = sorted(path.name for path in Path(case.out).iterdir())
    assert names == ["comparison.csv", "report.html", "run.json"]
    assert brim(*arguments).code == 2, "the folder holds a comparison"
    document = json.loads(brim(*arguments[:-2], "--json").out)
    assert document["schema"] == "brim.compare/1"
    assert [row["batch_size"] for row in document["rows"]] == [1, 4]
    assert set(document) >= {"rows", "recommendation", "notes", "folder"}
    assert Path(document["folder"]).name.startswith("compare-")
    assert brim(*arguments, "--resume").code == 2
    assert brim("eval", "-m", case.model(), "-d", case.data, "--compare-batch", "1,two", *SMALL).code == 2


# ------------------------------------------------------------------------------------------------- what is asked


def test_old_spellings_and_both_ways_to_name_the_model(brim: Brim, case: Case) -> None:
    arguments = (
        "--batch_size",
        "4",
        "--no_auto_batch_size",
        "--torch_dtype",
        "float32",
        "--save_predictions",
        "--json",
    )
    flag = brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, *arguments, *SMALL)
    alone = brim("eval", case.model(), "--data", case.data, f"--output={case.out}2", *arguments, *SMALL)
    for result in (flag, alone):
        assert result.code == 0, result.err
        request = json.loads(result.out)["request"]
        assert (request["batch_size"], request["fixed"], request["dtype"]) == (4, True, "float32")


def test_a_run_has_a_folder_of_its_own_by_default(brim: Brim, case: Case) -> None:
    assert brim("eval", case.model(), "-d", case.data, *SMALL).code == 0
    (folder,) = (case.root / "runs").iterdir()
    assert folder.name.startswith("eval-")
    assert {file.name for file in folder.iterdir()} >= {"run.json", "samples.jsonl", "monitor.csv"}


WRONG: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("no data", ("MODEL",), ("--data is missing", "questions.jsonl")),
    ("no model", ("-d", "DATA"), ("--model is missing",)),
    ("two models", ("MODEL", "-m", "MODEL", "-d", "DATA"), ("both name a model",)),
    ("no such model", ("-m", "resnet51", "-d", "DATA"), ("resnet51", "resnet50")),
    ("no such data", ("-m", "MODEL", "-d", "absent.jsonl"), ("absent.jsonl",)),
    ("no such task", ("-m", "MODEL", "-d", "DATA", "--task", "generte"), ("--task generte", "did you mean generate")),
    ("no such metric", ("-m", "MODEL", "-d", "DATA", "--metrics", "blue"), ("'blue'", "bleu")),
    ("no such field", ("-m", "MODEL", "-d", "DATA", "--map", "promt=question"), ("--map promt=question", "prompt")),
    ("no such column", ("-m", "MODEL", "-d", "DATA", "--map", "prompt=query"), ("prompt=query", "question, answer")),
    ("bad batch size", ("-m", "MODEL", "-d", "DATA", "-b", "many"), ("--batch-size many",)),
    ("fixed without size", ("-m", "MODEL", "-d", "DATA", "--no-auto-batch-size"), ("size: add --batch-size N",)),
    ("oom flag alone", ("-m", "MODEL", "-d", "DATA", "--fail-on-oom"), ("--fail-on-oom goes with",)),
    ("tokens twice", ("-m", "MODEL", "-d", "DATA", "--max-tokens=4", "--knob", "max_new_tokens=5"), ("keep one",)),
    ("resume what", ("-m", "MODEL", "-d", "DATA", "--resume"), ("--resume: name the run with --output",)),
    ("launcher", ("-m", "MODEL", "-d", "DATA", "--on", "slurm"), ("--on slurm", "torchrun")),
    ("zero limit", ("-m", "MODEL", "-d", "DATA", "--limit", "0"), ("--limit 0",)),
    ("no such plugin", ("-m", "MODEL", "-d", "DATA", "--plugin", "absent.py"), ("--plugin absent.py",)),
    ("unknown option", ("-m", "MODEL", "-d", "DATA", "--batchsize", "4"), ("--batchsize",)),
    ("bad device", ("-m", "MODEL", "-d", "DATA", "--device", "tpu"), ("--device tpu",)),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_request_ends_with_two_and_says_what_to_do(
    brim: Brim, case: Case, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    named = {"MODEL": case.model(), "DATA": case.data}
    result = brim("eval", *(named.get(argument, argument) for argument in arguments))
    assert (result.code, result.out) == (2, "")
    message = " ".join(result.err.split())
    assert "Traceback" not in message
    for word in words:
        assert word in message or word.replace(" ", "") in message.replace(" ", "")


def test_help_names_every_flag_of_the_interface(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = brim("eval", "--help").out
    for flag in (
        "--model", "--data", "--split", "--limit", "--map", "--images", "--skip-bad", "--task", "--metrics", "--plugin",
        "--knob", "--max-tokens", "--temperature", "--top-p", "--seed", "--stop", "--chat", "--system", "--weights",
        "--batch-size", "--no-auto-batch-size", "--fail-on-oom", "--memory-limit", "--margin", "--offload",
        "--compare-batch", "--no-cache", "--device", "--dtype", "--torch-dtype", "--num-workers", "--pin-memory",
        "--prefetch-factor", "--fail-fast", "--resume", "--output", "--json", "--verbose", "--on",
    ):  # fmt: skip
        assert flag in shown, flag


# ------------------------------------------------------------------------------------------------- how it ends


def test_a_failed_sample_ends_with_one_and_is_shown(brim: Brim, case: Case) -> None:
    data = str(case.questions("mixed.jsonl", ["a", "bad b", "c"]))
    result = brim("eval", "-m", case.model("picky"), "-d", data, "-o", case.out, *SMALL)
    assert result.code == 1
    assert "failed: 2: ValueError: this [one] cannot be answered" in result.out
    assert [line["prediction"] for line in case.lines()] == ["A", None, "C"]
    document = brim("eval", "-m", case.model("picky"), "-d", data, "-o", case.out, "--resume", "--json", *SMALL)
    assert document.code == 1
    assert json.loads(document.out)["summary"]["num_failed"] == 1
    stopped = brim("eval", "-m", case.model("picky"), "-d", data, "-o", f"{case.out}2", "--fail-fast", *SMALL)
    assert stopped.code == 2
    assert "--fail-fast: a sample failed with ValueError: this [one] cannot be answered" in " ".join(
        stopped.err.split()
    )


@pytest.mark.parametrize("kind", ["set", "dict", "generator", "text", "none", "number"])
def test_answers_without_an_order_of_their_own_end_with_two(brim: Brim, case: Case, kind: str) -> None:
    """Paired by chance, they would score other samples' answers."""
    result = brim("eval", case.model("unordered"), "-d", case.data, "-o", case.out, "--knob", f"kind={kind}", *SMALL)
    assert (result.code, result.err.count("Traceback")) == (2, 0)
    assert "a batch of 2" in result.err


def test_skipped_records_are_counted_and_reported(brim: Brim, case: Case) -> None:
    with Path(case.data).open("a") as file:
        file.write("{broken\n")
    refused = brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, *SMALL)
    assert refused.code == 2
    assert "line 13" in " ".join(refused.err.split())
    result = brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, "--skip-bad", *SMALL)
    assert result.code == 0
    assert re.search(r"note: 1 record .*data\.jsonl line 13", " ".join(result.err.split()))


def test_out_of_memory_is_reported_in_one_line_and_survived(brim: Brim, case: Case) -> None:
    arguments = ("--knob", "fits=3", "-b", "12", *SMALL)
    result = brim("eval", "-m", case.model("hungry"), "-d", case.data, "-o", case.out, *arguments)
    assert result.code == 0, result.err
    told = [line for line in result.err.splitlines() if "a batch of 12 failed" in line]
    assert len(told) == 1
    assert "a batch of 12 failed (host out of memory)" in told[0]
    assert any(line.split() == ["out", "of", "memory", "2", "times"] for line in result.out.splitlines())


def test_a_sample_that_was_short_of_memory_for_a_moment_is_not_given_up(brim: Brim, case: Case) -> None:
    """Another process took the memory for six batches; only what does not fit in any of its tries has failed."""
    result = brim("eval", case.model("crowded"), "-d", case.data, "-o", case.out, *SMALL)
    assert result.code == 0, result.err
    assert len(case.lines()) == 12
    assert all(line["error"] is None for line in case.lines())
    data = case.questions("giant.jsonl", ["giant", *(f"a{number}" for number in range(20))])
    case.out += "-giant"
    result = brim("eval", case.model("crowded"), "-d", str(data), "-o", case.out, *SMALL)
    assert result.code == 1, result.err
    (giant,) = (line["error"] for line in case.lines() if line["error"] is not None)
    assert (giant["reason"], giant["attempts"]) == ("out_of_memory", 3)


def test_nothing_fits_ends_with_three_and_the_remedies(brim: Brim, case: Case) -> None:
    result = brim("eval", "-m", case.model("hungry"), "-d", case.data, "-o", case.out, "--limit", "3", *SMALL)
    assert result.code == 3
    message = " ".join(result.err.split())
    for words in ("no sample fits, even alone", "What may help", "half precision", "another device"):
        assert words in message
    assert "Traceback" not in message
    assert len(case.lines()) == 3
    assert json.loads((Path(case.out) / "run.json").read_text())["summary"]["num_failed"] == 3


def test_fail_on_oom_ends_with_three(brim: Brim, case: Case) -> None:
    arguments = ("--knob", "fits=3", "-b", "12", "--no-auto-batch-size", "--fail-on-oom", *SMALL)
    result = brim("eval", "-m", case.model("hungry"), "-d", case.data, "-o", case.out, *arguments)
    assert result.code == 3
    assert "a batch of 12 does not fit" in " ".join(result.err.split())


@pytest.mark.parametrize(("model", "code", "words"), [("interrupted", 130, "interrupted"), ("lost", 4, "resume")])
def test_a_run_that_was_ended_can_be_resumed(brim: Brim, case: Case, model: str, code: int, words: str) -> None:
    arguments = ("-d", case.data, "-o", case.out, "-b", "3", *SMALL)
    result = brim("eval", "-m", case.model(model), *arguments)
    assert result.code == code
    assert words in result.err
    assert "Traceback" not in result.err
    assert 0 < len(case.lines()) < 12
    again = result
    while again.code == code:  # it ends at every third batch
        before = len(case.lines())
        again = brim("eval", "-m", case.model(model), *arguments, "--resume")
        assert len(case.lines()) > before
    assert again.code == 0
    assert [line["prediction"] for line in case.lines()] == [f"A{number}" for number in range(12)]
    assert "resumed:" in again.err


def test_other_work_in_the_folder_ends_with_two_and_is_named(brim: Brim, case: Case) -> None:
    assert brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, *SMALL).code == 0
    twice = brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, *SMALL)
    assert twice.code == 2
    assert "--resume" in twice.err
    other = brim("eval", "-m", case.model("slow"), "-d", case.data, "-o", case.out, "--resume", *SMALL)
    assert other.code == 2
    assert "model differ" in " ".join(other.err.split())


def test_an_answer_that_utf_8_cannot_hold_is_kept_and_shown(brim: Brim, case: Case) -> None:
    """As half of an emoji, or a byte that a tokenizer could not decode."""
    arguments = ("eval", "-m", case.model("halves"), "-d", case.data, "-o", case.out, "--verbose", *SMALL)
    result = brim(*arguments)
    assert result.code == 0, result.err
    assert {line["prediction"] for line in case.lines()} == {"\ud83d \udc80"}
    assert r"\ud83d" in result.out
    assert brim(*arguments, "--resume").code == 0
    assert (Path(case.out) / "report.html").exists()


def test_a_full_disk_ends_with_two_and_keeps_what_was_done(
    brim: Brim, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, [0]

    def full(file: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(28, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr("brim.storage.journal.os.write", full)
        result = brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, "-b", "3", *SMALL)
    assert result.code == 2
    assert "No space left on device" in result.err
    assert len(case.lines()) == 6
    assert brim("eval", "-m", case.model(), "-d", case.data, "-o", case.out, "--resume", *SMALL).code == 0
    assert len(case.lines()) == 12


def test_ctrl_c_ends_the_process_with_130_and_the_journal_whole(case: Case) -> None:
    data = str(case.questions("many.jsonl", [f"a{number}" for number in range(400)]))
    command = [
        sys.executable,
        "-m",
        "brim",
        "eval",
        "-m",
        case.model("slow"),
        "-d",
        data,
        "-o",
        case.out,
        "-b",
        "2",
        *SMALL,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    journal = Path(case.out) / "samples.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size > 0):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert journal.read_bytes().endswith(b"\n")
    assert 0 < len(case.lines()) < 400
