"""The defects of the systems that people come from, one test each: brim must not have them.

Samples scored twice under several ranks have a test of their own among those of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.generation.select import GenerateFallback
from brim.records import Probe
from brim.sizing.constants import FORGIVING_BATCHES
from brim.tasks.function import FunctionTask
from tests.evaluation.evaluation_runs import predictions, record_of, run, shout, write_lines, write_words


def watched(monkeypatch: pytest.MonkeyPatch, before: Callable[[list[int]], None]) -> list[int]:
    """Have every batch of a function looked at before it runs; the sizes that were tried, in order."""
    launch, sizes = FunctionTask.launch, list[int]()

    def looked_at(self: FunctionTask, items: list[int], prepared: Any) -> Any:
        sizes.append(len(items))
        before(list(items))
        return launch(self, items, prepared)

    monkeypatch.setattr(FunctionTask, "launch", looked_at)
    return sizes


@pytest.mark.parametrize("decoder", ["loop", "generate, padded on the left"])
def test_the_prompt_does_not_leak_into_the_answer(
    endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    """Cut at the number of tokens in the mask, a left-padded row shows the end of its own prompt."""
    if decoder != "loop":

        def fallback(model: Any, settings: Any, tokens: Any, **_: Any) -> GenerateFallback:
            return GenerateFallback(model, settings, tokens, why="a test")

        monkeypatch.setattr("brim.tasks.generate.make_decoder", fallback)
    records = [{"id": str(length), "question": "w1 " * length, "answer": "1"} for length in (30, 1, 7)]
    data = write_lines(tmp_path / "data.jsonl", records)
    alone = run(endless_model, data, tmp_path / "alone", batch_size=1, max_new_tokens=5)
    together = run(endless_model, data, tmp_path / "together", batch_size=3, max_new_tokens=5)
    assert together.summary["batch_size_used"] == 3
    assert predictions(together) == predictions(alone)
    assert all(len(answer.split()) == 5 for answer in predictions(together))
    assert not any(answer.startswith("w1 w1") for answer in predictions(together))


def test_a_sample_that_failed_stays_in_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(items: list[int]) -> None:
        if 3 in items:
            raise ValueError("this one cannot be read")

    watched(monkeypatch, before)
    data = write_lines(tmp_path / "data.jsonl", [{"question": "a", "answer": "A"} for _ in range(10)])
    result = run(shout(tmp_path), data, tmp_path / "run")
    assert result.summary["num_failed"] == 1
    assert result.metrics["exact_match"]["count"] == 10
    assert result.metrics["exact_match"]["value"] == 0.9
    assert (result.samples[3]["prediction"], result.samples[3]["score"]) == (None, 0.0)


def test_an_empty_answer_is_a_wrong_one(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text("def mute():\n    return lambda samples: ['' for _ in samples]\n")
    data = write_lines(tmp_path / "data.jsonl", [{"question": "a", "answer": "A"}])
    result = run(f"py:{tmp_path / 'mute.py'}:mute", data, tmp_path / "run")
    assert result.metrics["exact_match"] == {"value": 0.0, "mean": 0.0, "std": 0.0, "count": 1, "ci95": 0.0}


def test_an_ordinary_error_is_not_taken_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(items: list[int]) -> None:
        if 2 in items:
            raise ValueError("labels must be whole numbers, out of memory of yesterday")

    sizes = watched(monkeypatch, before)
    data = write_lines(tmp_path / "data.jsonl", [{"question": "a", "answer": "A"} for _ in range(64)])
    result = run(shout(tmp_path), data, tmp_path / "run", batch_size=8)
    assert [sample["id"] for sample in result.samples if sample["error"]] == ["3"]
    assert result.samples[2]["error"]["reason"] == "error"
    assert result.summary["oom_events"] == 0
    assert sorted(sizes) == [1, 1, 2, 2, 4, 4, *[8] * 8], "only the batch of the guilty one is halved"
    assert [sample["batch_size"] for sample in result.samples[8:]] == [8] * 56, "the other batches keep their size"


@pytest.mark.parametrize("size", [16, "auto"])
def test_a_size_that_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: Any) -> None:
    failed: list[int] = []
    again: list[int] = []

    def before(items: list[int]) -> None:
        if failed and len(items) >= min(failed):
            again.append(len(items))
        if len(items) > 7:
            failed.append(len(items))
            raise MemoryError

    sizes = watched(monkeypatch, before)
    count = 7 * FORGIVING_BATCHES
    data = write_lines(tmp_path / "data.jsonl", [{"question": "a", "answer": "A"} for _ in range(count)])
    result = run(shout(tmp_path), data, tmp_path / "run", batch_size=size)
    assert result.summary["num_failed"] == 0
    assert result.summary["oom_events"] == len(failed) >= 1
    assert again == []
    after = sizes[sizes.index(failed[-1]) + 1 :]
    assert min(after[:3]) < max(after) <= 7, "it does grow back, below what failed"


def test_a_size_limit_of_a_kernel_is_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(items: list[int]) -> None:
        if len(items) > 4:
            raise RuntimeError("CUDA error: invalid configuration argument")

    watched(monkeypatch, before)
    result = run(shout(tmp_path), write_words(tmp_path / "data.jsonl"), tmp_path / "run", batch_size=16)
    assert (result.summary["num_failed"], result.summary["oom_events"]) == (0, 0)
    assert result.summary["batch_sizes"]["largest"] == 4


@pytest.mark.parametrize("size", [1, 8, "auto"])
def test_exactly_as_many_new_tokens_as_asked_for(
    endless_model: Path, questions: Path, tmp_path: Path, size: Any
) -> None:
    result = run(endless_model, questions, tmp_path / "run", batch_size=size, max_new_tokens=37)
    assert {sample["tokens"] for sample in result.samples} == {37}
    assert {len(answer.split()) for answer in predictions(result)} == {37}
    assert result.summary["answer_tokens"]["truncated_fraction"] == 1.0


def test_without_a_number_a_task_has_its_own(
    endless_model: Path, endless_vision_language_model: Path, questions: Path, picture_questions: Path, tmp_path: Path
) -> None:
    written = run(endless_model, questions, tmp_path / "generate", limit=2)
    assert {sample["tokens"] for sample in written.samples} == {256}
    asked = run(endless_vision_language_model, picture_questions, tmp_path / "vqa", limit=2)
    assert {sample["tokens"] for sample in asked.samples} == {16}
    assert {sample["truncated"] for sample in asked.samples} == {True}
    assert record_of(asked.folder)["request"]["task"] == "vqa"


def test_a_probe_that_timed_out_never_counts_as_fitting() -> None:
    """That the searches keep to it is shown in tests/searching: test_isolate, test_largest and test_fastest."""
    assert not Probe(batch_size=8, verdict="timeout").fits


@pytest.mark.parametrize("size", [6, "auto"])
def test_the_batch_size_used_is_in_the_summary(tmp_path: Path, size: Any) -> None:
    result = run(shout(tmp_path), write_words(tmp_path / "data.jsonl"), tmp_path / "run", batch_size=size)
    used = result.summary["batch_size_used"]
    assert used == record_of(result.folder)["summary"]["batch_size_used"]
    assert used in {sample["batch_size"] for sample in result.samples}
    assert size in (used, "auto")
