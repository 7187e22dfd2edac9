"""Going on after any kind of end: the same lines and metrics as a run that was never stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.errors import LostError, RequestError
from brim.evaluation.run import EvalResult, evaluate
from brim.evaluation.worker import EvalListener
from brim.settings.eval_settings import EvalRequest
from brim.tasks.function import FunctionTask
from brim.tasks.generate import GenerateTask
from tests.evaluation.evaluation_runs import lines_of, predictions, run, shout, without_sizes, write_words

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

TOKENS = 6

# Fails at words of seven letters, until there is a file beside it.
MOODY = """
from pathlib import Path

def answer():
    def one(sample):
        if len(sample.prompt) == 7 and not (Path(__file__).parent / "calm").exists():
            raise ValueError("seven letters")
        return sample.prompt + "!"
    return lambda samples: [one(sample) for sample in samples]
"""


@pytest.fixture(scope="module")
def finished(language_model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run(language_model, questions, folder, batch_size=4, max_new_tokens=TOKENS)


class Killed(BaseException):
    """Stands for the process being killed: nothing in brim may catch it."""


def stop_at(monkeypatch: pytest.MonkeyPatch, task: Any, batch: int, error: BaseException) -> None:
    """Have the given batch of a task end the run."""
    launch, count = task.launch, [0]

    def stopping(self: Any, items: Any, prepared: Any) -> Any:
        count[0] += 1
        if count[0] == batch:
            raise error
        return launch(self, items, prepared)

    monkeypatch.setattr(task, "launch", stopping)


def assert_same(resumed: EvalResult, plain: EvalResult) -> None:
    assert without_sizes(lines_of(resumed.folder)) == without_sizes(lines_of(plain.folder))
    assert resumed.metrics == plain.metrics
    assert resumed.summary["num_samples"] == plain.summary["num_samples"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "error", [Killed(), KeyboardInterrupt(), RuntimeError("CUDA error: an illegal memory access was encountered")]
)
def test_a_run_stopped_at_any_batch_continues_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, error: BaseException
) -> None:
    data, model = write_words(tmp_path / "data.jsonl", 24), shout(tmp_path)
    plain = run(model, data, tmp_path / "plain")
    batch = random.Random(seed).randint(3, 6)  # the first may be under way when the second starts
    raised = LostError if isinstance(error, RuntimeError) else type(error)
    with monkeypatch.context() as patch:
        stop_at(patch, FunctionTask, batch, error)
        with pytest.raises(raised):
            run(model, data, tmp_path / "run", batch_size=4)
    done = len(lines_of(tmp_path / "run"))
    assert 0 < done < 24
    resumed = run(model, data, tmp_path / "run", resume=True)
    assert resumed.summary["num_resumed"] == done
    assert_same(resumed, plain)


def test_drawn_answers_continue_as_if_nothing_had_happened(
    language_model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 1.0, "seed": 5}
    plain = run(language_model, questions, tmp_path / "plain", **options)
    with monkeypatch.context() as patch:
        stop_at(patch, GenerateTask, 3, Killed())
        with pytest.raises(Killed):
            run(language_model, questions, tmp_path / "run", batch_size=3, **options)
    assert_same(run(language_model, questions, tmp_path / "run", resume=True, batch_size=5, **options), plain)


def test_a_journal_cut_anywhere_in_its_last_two_lines_is_completed(tmp_path: Path) -> None:
    data, model = write_words(tmp_path / "data.jsonl", 6), shout(tmp_path)
    plain = run(model, data, tmp_path / "plain")
    content = (plain.folder / "samples.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    start = len(content) - len(lines[-1]) - len(lines[-2])
    folder = tmp_path / "run"
    ends = [len(content), len(content) - len(lines[-1]), start]
    # At every byte: tests/storage/test_journal.py.
    near = {length for end in ends for length in range(end - 2, end + 3)}
    for length in sorted(near.union(range(start, len(content), 7)).intersection(range(start, len(content) + 1))):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(plain.folder / "journal.json", folder)
        (folder / "samples.jsonl").write_bytes(content[:length])
        resumed = run(model, data, folder, resume=True)
        assert resumed.summary["num_resumed"] == content[:length].count(b"\n")
        assert_same(resumed, plain)


def test_resuming_a_finished_run_does_no_work(tmp_path: Path) -> None:
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    plain = run(model, data, tmp_path / "run", batch_size=6)
    before = (tmp_path / "run" / "samples.jsonl").read_bytes()
    again = run(model, data, tmp_path / "run", resume=True)
    assert again.summary["num_resumed"] == 20
    assert again.summary["batch_size_used"] == plain.summary["batch_size_used"]
    assert again.metrics == plain.metrics
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == before


def test_retry_failed_retries_only_failed_samples(tmp_path: Path) -> None:
    data = write_words(tmp_path / "data.jsonl")
    (tmp_path / "moody.py").write_text(MOODY, encoding="utf-8")
    model = f"py:{tmp_path}/moody.py:answer"
    first = run(model, data, tmp_path / "run", batch_size=6)
    assert first.summary["num_failed"] == 2
    kept = run(model, data, tmp_path / "run", resume=True)
    assert (kept.summary["num_failed"], kept.summary["num_resumed"]) == (2, 20)
    (tmp_path / "calm").touch()
    again = run(model, data, tmp_path / "run", resume=True, retry_failed=True)
    assert (again.summary["num_failed"], again.summary["num_resumed"]) == (0, 18)
    assert predictions(again) == [f"{json.loads(line)['question']}!" for line in data.read_text().splitlines()]
    with pytest.raises(RequestError, match="--retry-failed goes with --resume"):
        run(model, data, tmp_path / "other", retry_failed=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "functions.py:other"}, "model differ"),
        ({"data": "other.jsonl"}, "data differ"),
        ({"knobs": {"suffix": "!"}}, "model differ"),
        ({"limit": 5}, "data differ"),
    ],
)
def test_other_work_is_not_mixed_in(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    file = tmp_path / "functions.py"
    file.write_text(f"{file.read_text()}\nother = shout\n")
    write_words(tmp_path / "other.jsonl", 21)
    run(model, data, tmp_path / "run")
    before = (tmp_path / "run" / "samples.jsonl").read_bytes()
    changed = dict(change)
    model = f"py:{tmp_path / changed.pop('model')}" if "model" in changed else model
    data = tmp_path / changed.pop("data") if "data" in changed else data
    with pytest.raises(RequestError, match=named):
        run(model, data, tmp_path / "run", resume=True, **changed)
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", [{"max_new_tokens": 3}, {"temperature": 0.5}, {"stop": ("w1",)}, {"system": "w2"}])
def test_other_settings_are_not_mixed_in(
    language_model: Path, questions: Path, finished: EvalResult, change: dict[str, Any]
) -> None:
    options = {"max_new_tokens": TOKENS, **change}
    with pytest.raises(RequestError, match="settings differ"):
        run(language_model, questions, finished.folder, resume=True, **options)


def test_an_earlier_run_is_never_overwritten(tmp_path: Path) -> None:
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    run(model, data, tmp_path / "run")
    with pytest.raises(RequestError, match="holds the results of an evaluation; continue it with --resume"):
        run(model, data, tmp_path / "run")


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    with pytest.raises(RequestError, match=r"--resume: .* holds no samples.jsonl"):
        run(model, data, tmp_path / "run", resume=True)


@pytest.mark.parametrize("damage", [b'{"id":"w3","prediction":"\xff"}', b"}{", b'{"id":"w3"}', b"\0" * 40])
def test_a_damaged_line_is_computed_again_and_the_old_file_kept(tmp_path: Path, damage: bytes) -> None:
    data, model = write_words(tmp_path / "data.jsonl", 6), shout(tmp_path)
    plain = run(model, data, tmp_path / "plain")
    folder = tmp_path / "run"
    run(model, data, folder)
    content = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    content[3] = damage + b"\n"
    (folder / "samples.jsonl").write_bytes(b"".join(content))
    told = Notes()
    resumed = evaluate(
        EvalRequest(model=model, data=str(data), device="cpu", use_cache=False, resume=True),
        output=folder,
        listener=told,
    )
    assert resumed.summary["num_resumed"] == 5
    assert_same(resumed, plain)
    assert any("samples.jsonl: damaged line 4" in line for line in told.lines)
    assert (folder / "samples.jsonl.damaged").read_bytes() == b"".join(content)


class Notes(EvalListener):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_other_metrics_may_be_asked_for_on_resuming(tmp_path: Path) -> None:
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    run(model, data, tmp_path / "run", metrics="exact_match")
    resumed = run(model, data, tmp_path / "run", resume=True, metrics="contains,anls")
    plain = run(model, data, tmp_path / "plain", metrics="contains,anls")
    assert set(resumed.metrics) == {"contains", "anls"}
    assert_same(resumed, plain)


@pytest.mark.parametrize("written", [0, 7])
def test_a_full_disk_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    """The disk takes the first two writes, then a few bytes of the third, then nothing."""
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    plain = run(model, data, tmp_path / "plain")
    with monkeypatch.context() as patch:
        patch.setattr("brim.storage.journal.os.write", full_disk(os.write, after=2, then=written))
        with pytest.raises(RequestError, match="No space left on device; what was finished before is kept"):
            run(model, data, tmp_path / "run", batch_size=4)
    assert (tmp_path / "run" / "samples.jsonl").read_bytes().count(b"\n") == 8
    resumed = run(model, data, tmp_path / "run", resume=True)
    assert resumed.summary["num_resumed"] == 8
    assert_same(resumed, plain)


def full_disk(write: Callable[[int, bytes], int], *, after: int, then: int) -> Callable[[int, bytes], int]:
    calls = [0]

    def limited(file: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] <= after:
            return write(file, data)
        if calls[0] == after + 1 and then:
            return write(file, data[:then])
        raise OSError(28, "No space left on device")

    return limited
