"""Whatever is typed, or written into a file: an exit code of the interface, what is wrong named, no traceback.

Every case follows from its seed. A failure names it, and prints the line as it could be typed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from brim.cli.main import run
from brim.cli.train import TrainProgress
from brim.errors import BrimError, RequestError
from brim.settings.train_settings import SETTING_KEYS
from brim.sweeps.forecast_process import ForecastProcess, answer
from tests.fuzzed_files import drawn_file
from tests.fuzzed_lines import BASES, commands, drawn_line, write_inputs

CODES = {0, 1, 2, 3, 4}
INTERRUPTED = 130
SECONDS = 60.0  # for one case; on an idle machine most take milliseconds
STEPS = 20  # of a training that an edit has made long; then it is stopped as Ctrl-C stops it
LINES, FILES = 150, 100
MORE = 10  # times as many in the slow tests


class TooSlowError(BaseException):
    """A case ran past its seconds; no `except Exception` on the way may keep it."""


class ForecastsHere(ForecastProcess):
    """Asks this process instead of starting one that would import torch for each line."""

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return answer(question)
        except BrimError:
            raise
        except Exception as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error


@pytest.fixture(autouse=True)
def nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Counter[int] = Counter()  # of each run, by the identity of what shows it
    real = TrainProgress.step

    def counted(self: TrainProgress, record: Any) -> None:
        real(self, record)
        steps[id(self)] += 1
        if steps[id(self)] > STEPS:
            steps.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainProgress, "step", counted)
    monkeypatch.setattr("brim.sweeps.forecast_process.ForecastProcess", ForecastsHere)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as HF_HUB_OFFLINE=1 before it was imported
    monkeypatch.setattr("brim.cli.demo.run_profile", lambda *arguments, **more: None)  # seven seconds of a real model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `TooSlowError` in the block after so long; a timer that ran before, as pytest-timeout's, runs on after."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise TooSlowError

    handler = signal.signal(signal.SIGALRM, stop)
    began = time.monotonic()
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        left = before - (time.monotonic() - began) if before else 0.0
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.001) if before else 0.0)


@contextlib.contextmanager
def fresh_copy(inputs: Path, place: Path) -> Iterator[None]:
    """The inputs as they were, in a working folder that goes afterwards: a line may write over any of them."""
    inner = place / "outer" / "work"
    shutil.copytree(inputs, inner, copy_function=shutil.copy)
    before = Path.cwd()
    os.chdir(inner)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(place / "outer")


def outcome(arguments: Sequence[str]) -> tuple[int | str | None, str]:
    """The exit code, and all that was written; a traceback where the command let one through."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors=errors) for errors in ("strict", "backslashreplace")]
    code: int | str | None = "nothing"
    printed = ""
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            with within(SECONDS):
                run(arguments)
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            code, printed = "traceback", traceback.format_exc()
    for stream in streams:
        stream.flush()
        printed += stream.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    return code, printed


def flattened(text: str) -> str:
    """Without blanks and frames: a message is wrapped to the terminal, inside of a box."""
    return re.sub(r"[\s│╭╮╰╯─]", "", text)


def complaint(arguments: Sequence[str], code: int | str | None, printed: str, names: Sequence[str]) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    if code not in CODES:
        return f"exit code {code}"
    if "Traceback (most recent call last)" in printed:
        return "a traceback"
    if code == 0:
        return None
    shown = flattened(printed)
    values = {
        part for text in arguments[1:] for part in (text, text.strip(), *re.split("[=,]", text), repr(text)[1:-1])
    }
    if any(word in shown for word in (*names, *(flattened(value) for value in values if len(value) > 2))):
        return None
    if any(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", printed) for value in values if len(value) <= 2):
        return None
    return "the message names neither a flag nor a value"


def check_lines(seeds: Sequence[str], inputs: Path, place: Path) -> None:
    known = commands()
    flags = {name for options in known.values() for one in options for name in one.names}
    names = ["MODEL", "CONFIG", "FILE", "RUN", *flags, *SETTING_KEYS]
    wrong = []
    for seed in seeds:
        arguments = drawn_line(seed, known)
        with fresh_copy(inputs, place):
            code, printed = outcome(arguments)
        problem = complaint(arguments, code, printed, names)
        if problem is not None:
            wrong.append(f"seed {seed}: {problem}\n  brim {shlex.join(arguments)}\n{printed[-3000:]}")
    assert not wrong, f"{len(wrong)} of {len(seeds)} lines\n" + "\n\n".join(wrong)


# Mistakes that random lines found, or that people make: each is refused, with what is wrong and before any work.
MISTAKES = [
    ("find questions.jsonl", "it is a file"),
    ("find py:nets.py:rows --fail-on-oom", "--no-auto-batch-size"),
    (f"knobs {'x' * 300}", "File name too long"),
    ("forecast py:nets.py:rows --memory -1e999", "more than zero"),
    ("forecast py:nets.py:rows --gpu h100 --max-batch-size 0", "--max-batch-size 0"),
    ("forecast py:nets.py:rows --gpu h100 --plot empty", "it is a folder"),
    ("eval -m py:nets.py:reader other -d questions.jsonl", "-m py:nets.py:reader and other"),
    ("eval -d questions.jsonl", "--model is missing"),
    ("eval -m py:nets.py:reader -d questions.jsonl --memory-limit lots", "--memory-limit lots"),
    ("profile -m py:nets.py:reader -d questions.jsonl --knob reach=2-4 --target-memory lots", "--target-memory lots"),
    ("profile -m py:nets.py:reader -d questions.jsonl --knob reach=2-4 --batch-size-for 9=2", "--batch-size-for 9=2"),
    ("sweep grid.yaml --dry-run --gpu nosuch", "--gpu nosuch"),
    ("sweep grid.yaml --dry-run --memory lots", "--memory lots"),
    (f"eval -m py:nets.py:reader -d questions.jsonl -b {'9' * 400}", "it must be auto or a whole number from 1"),
    (f"eval -m py:nets.py:reader -d questions.jsonl --workers {'9' * 400}", "--workers 999"),
    ("sweep", "FILE is missing"),
    ("encode -d smiles.csv -o f.safetensors --map smiles=x", "--map smiles=x"),
    ("demo --memory-limit lots", "--memory-limit lots"),
    ("train config.yaml --seeds 99999999999", "--seeds 99999999999"),
    (f"train config.yaml hp.learning_rate={'9' * 400}", "hp.learning_rate"),
    ("train config.yaml optimizer.params.betas='\"\"' -o out", "optimizer.params: adamw does not take"),
    ("train dpo --id in.safetensors --ood out.safetensors --seeds 99999999999", "--seeds 99999999999"),
    ("train dpo --id in.safetensors --ood out.safetensors --margin 1e999", "--margin 1e999"),
    ("train dpo --id nothere --ood out.safetensors", "--id nothere: there is no such file"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line[:80] for line, _ in MISTAKES])
def test_a_mistake_is_refused_before_any_work(line: str, words: str, inputs: Path, tmp_path: Path) -> None:
    with fresh_copy(inputs, tmp_path):
        before = sorted(str(path) for path in Path().rglob("*"))
        code, printed = outcome(shlex.split(line))
        assert (code, words in printed) == (2, True), printed
        added = [path for path in sorted(Path().rglob("*")) if str(path) not in before and path.name != "out"]
        assert [path for path in added if "__pycache__" not in path.parts] == []


@pytest.mark.parametrize(
    "line",
    [
        "eval -m py:nets.py:reader -d questions.jsonl --metrics exact_match --device cpu --json -o",
        "train config.yaml --json -o",
    ],
)
def test_a_folder_whose_name_is_no_text_is_written_and_named_in_the_record(
    line: str, inputs: Path, tmp_path: Path
) -> None:
    folder = "r\udcffn"  # as Python reads a name with a byte that is no UTF-8
    with fresh_copy(inputs, tmp_path):
        code, printed = outcome([*line.split(), folder])
        assert code == 0, printed
        assert json.loads((Path(folder) / "run.json").read_text())["request"]["argv"][-1] == folder


def test_every_command_has_a_line_to_start_from() -> None:
    assert set(BASES) == set(commands())


def test_every_line_to_start_from_is_valid(inputs: Path, tmp_path: Path) -> None:
    for name, bases in BASES.items():
        for parts in bases:
            with fresh_copy(inputs, tmp_path):
                code, printed = outcome([*name.split(), *" ".join(parts).split()])
            assert code == 0, (name, parts, printed)


def test_random_lines_end_with_a_code_and_a_reason(inputs: Path, tmp_path: Path) -> None:
    check_lines([f"{number}" for number in range(LINES)], inputs, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_random_lines(inputs: Path, tmp_path: Path) -> None:
    check_lines([f"more {number}" for number in range(MORE * LINES)], inputs, tmp_path)


# --------------------------------------------------------------------------------------------------------- files


def run_file(seed: str) -> tuple[list[str], str, int | str | None, str]:
    """An edited file in the working folder, and how the command that reads it ends."""
    command, name, content = drawn_file(seed)
    Path(name).write_bytes(content)
    arguments = ["train", name, "-o", "out", "--no-cache"]
    if command == "sweep":
        arguments = ["sweep", name, "--check" if len(content) % 2 else "--dry-run", "--no-cache"]
    code, printed = outcome(arguments)
    return arguments, content.decode("utf-8", "backslashreplace"), code, printed


def file_complaint(arguments: Sequence[str], code: int | str | None, printed: str) -> str | None:
    """What is wrong with how a file's command ended; None if nothing is."""
    if code == INTERRUPTED and "epoch" in printed:
        return None  # an edit made it long, and it was stopped
    keys = {part for key in SETTING_KEYS for part in (key, *key.split(".")) if len(part) > 3}
    return complaint(arguments, code, printed, [arguments[1], *keys])


def check_files(seeds: Sequence[str], inputs: Path, place: Path) -> None:
    wrong = []
    for seed in seeds:
        with fresh_copy(inputs, place):
            arguments, text, code, printed = run_file(seed)
        problem = file_complaint(arguments, code, printed)
        if problem is not None:
            wrong.append(f"seed {seed}: {problem}\n  brim {shlex.join(arguments)}\n{text[:2000]}\n{printed[-3000:]}")
    assert not wrong, f"{len(wrong)} of {len(seeds)} files\n" + "\n\n".join(wrong)


def test_random_edits_of_files_end_with_a_code_and_a_reason(inputs: Path, tmp_path: Path) -> None:
    check_files([f"{number}" for number in range(FILES)], inputs, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_random_edits_of_files(inputs: Path, tmp_path: Path) -> None:
    check_files([f"more {number}" for number in range(MORE * FILES)], inputs, tmp_path)
