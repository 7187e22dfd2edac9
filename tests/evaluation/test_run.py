"""A whole evaluation: its record, the plan it leaves behind, and the call that starts it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.evaluation.run import EvalResult
from brim.tasks.base import LaterAnswers
from brim.tasks.function import FunctionTask
from tests.evaluation.evaluation_runs import (
    lines_of,
    predictions,
    record_of,
    run,
    shout,
    without_sizes,
    write_lines,
    write_words,
)
from tests.fake_devices import fake_current_devices

TOKENS = 6
SUMMARY = {
    "num_samples", "num_failed", "metrics", "samples_per_second", "batch_size_used", "batch_sizes", "oom_events",
    "padding_fraction", "gpu_wait_fraction", "gpu_utilisation_mean", "peak_allocated_bytes", "peak_reserved_bytes",
    "answer_tokens", "num_bad_records", "alloc_retries", "throughput", "batch_times",
}  # fmt: skip
LINE = {"id", "input", "reference", "prediction", "score", "batch_size", "error"}


# ------------------------------------------------------------------------------------------------- the record


@pytest.fixture(scope="module")
def finished(language_model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run(language_model, questions, folder, batch_size=4, max_new_tokens=TOKENS)


def test_the_summary_has_every_promised_field(finished: EvalResult) -> None:
    summary = finished.summary
    assert set(summary) >= SUMMARY
    assert (summary["num_samples"], summary["num_failed"], summary["oom_events"]) == (14, 0, 0)
    assert summary["samples_per_second"] > 0
    assert summary["batch_size_used"] == 4
    assert summary["batch_sizes"] == {"smallest": 2, "median": 4, "largest": 4, "per_rank": None}
    assert 0 < summary["padding_fraction"] < 1
    assert 0 <= summary["gpu_wait_fraction"] <= 1
    assert summary["alloc_retries"] is None, "the CPU has no allocator that counts them"
    seconds, done = zip(*summary["throughput"], strict=True)
    assert (list(seconds), list(done)) == (sorted(seconds), [4, 8, 12, 14])
    assert seconds[-1] <= summary["seconds"]
    times = summary["batch_times"]
    assert [count for count, _, _ in times["batches"]] == [4, 4, 2], "without the first, which warms up"
    assert sum(cost for _, cost, _ in times["batches"]) < times["padded_cost"]
    assert sum(one for _, _, one in times["batches"]) < times["busy_seconds"] <= summary["seconds"]
    assert summary["answer_tokens"]["max"] == TOKENS
    assert set(summary["answer_tokens"]) == {"p50", "p95", "p99", "p999", "max", "truncated_fraction"}
    for figure in summary["metrics"].values():
        assert set(figure) >= {"value", "mean", "std", "count", "ci95"}


def test_samples_have_every_promised_field_in_the_datas_order(finished: EvalResult) -> None:
    lines = lines_of(finished.folder)
    assert [line["id"] for line in lines] == [f"q{number}" for number in range(14)]
    assert all(set(line) >= LINE for line in lines)
    assert lines == [dict(sample) for sample in finished.samples]
    assert {line["batch_size"] for line in lines} == {2, 4}
    assert all(line["score"] == line["scores"]["exact_match"] for line in lines)


def test_the_record_says_what_was_asked_and_when(finished: EvalResult, language_model: Path, questions: Path) -> None:
    record = record_of(finished.folder)
    assert (record["schema"], record["kind"]) == ("brim.run/1", "eval")
    assert record["request"]["model"] == str(language_model)
    assert record["request"]["data"] == str(questions)
    assert (record["request"]["batch_size"], record["request"]["task"]) == (4, "generate")
    assert {name: record["summary"][name] for name in finished.summary} == json.loads(json.dumps(finished.summary))
    assert record["started_at"] < record["ended_at"]
    assert record["duration_seconds"] > 0
    assert record["plan"]["unit"] == "samples"
    with (finished.folder / "monitor.csv").open() as file:
        assert next(csv.reader(file))


def test_a_sample_without_a_reference_is_answered_and_not_scored(language_model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"prompt": "w1"}, {"prompt": "w2"}])
    result = run(language_model, data, tmp_path / "run", max_new_tokens=3)
    assert result.metrics == {}
    assert [sample["score"] for sample in result.samples] == [None, None]
    assert all(predictions(result))


def test_the_device_is_cudas_current_one_while_batches_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which torch's pinned memory goes, and the kernels of others."""
    current = fake_current_devices(monkeypatch, "brim.evaluation.worker")
    seen: list[list[torch.device]] = []
    launch = FunctionTask.launch

    def launched(self: FunctionTask, items: Any, prepared: Any) -> LaterAnswers:
        seen.append(list(current))
        return launch(self, items, prepared)

    def pool_source(self: FunctionTask) -> None:
        seen.append(list(current))

    monkeypatch.setattr(FunctionTask, "launch", launched)
    monkeypatch.setattr(FunctionTask, "pool_source", pool_source)
    run(shout(tmp_path), write_words(tmp_path / "data.jsonl"), tmp_path / "run")
    assert len(seen) > 1, "a pool is tried, and batches run"
    assert all(one == [torch.device("cpu")] for one in seen)
    assert current == []


# ------------------------------------------------------------------------------------------------- the plan


def slow_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches take as long as their number of samples says, with an overhead: the knee lies at some dozens."""
    clock = [0.0]
    launch = FunctionTask.launch

    def timed(self: FunctionTask, items: Any, prepared: Any) -> LaterAnswers:
        pending = launch(self, items, prepared)

        def read() -> Any:
            clock[0] += 0.02 + 0.005 * len(items)
            return pending.result()

        return LaterAnswers(read)

    monkeypatch.setattr(FunctionTask, "launch", timed)
    monkeypatch.setattr("brim.running.executor.time", SimpleNamespace(perf_counter=lambda: clock[0]))


def test_a_second_run_starts_at_the_settled_size_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache_folder: Path
) -> None:
    slow_start(monkeypatch)
    records = [{"question": "a", "answer": "A"} for _ in range(2000)]
    data, model = write_lines(tmp_path / "data.jsonl", records), shout(tmp_path)
    first = run(model, data, tmp_path / "first", use_cache=True)
    second = run(model, data, tmp_path / "second", use_cache=True)
    without = run(model, data, tmp_path / "without", use_cache=False)
    assert first.plan is not None
    assert second.plan is not None
    assert without.plan is not None
    assert (first.plan.cached, second.plan.cached, without.plan.cached) == (False, True, False)
    assert second.plan.size == first.plan.size > 8
    assert first.summary["batch_sizes"]["smallest"] == 2
    assert second.summary["batch_sizes"]["largest"] == second.summary["batch_size_used"] == first.plan.size
    assert len({line["batch_size"] for line in second.samples}) <= 2, "no size is tried out again"
    assert record_of(second.folder)["plan"]["cached"] is True
    assert predictions(first) == predictions(second) == predictions(without)
    (file,) = (own_cache_folder / "brim" / "plans").glob("*.json")
    entry = json.loads(file.read_text(encoding="utf-8"))
    entry["plan"]["size"] = 10**12
    file.write_text(json.dumps(entry), encoding="utf-8")
    damaged = run(model, data, tmp_path / "damaged", use_cache=True)
    assert damaged.plan is not None
    assert not damaged.plan.cached
    assert damaged.plan.size <= 2000
    assert any(str(file) in note for note in damaged.notes)


def test_a_run_too_short_to_settle_leaves_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_start(monkeypatch)
    data, model = write_words(tmp_path / "data.jsonl", 8), shout(tmp_path)
    run(model, data, tmp_path / "first", use_cache=True)
    again = run(model, data, tmp_path / "again", use_cache=True)
    assert again.plan is not None
    assert not again.plan.cached


# ------------------------------------------------------------------------------------------------- the call


def test_the_package_and_the_function_have_one_name(tmp_path: Path) -> None:
    import brim.tasks.base  # as a plugin does: it must not hide the call

    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    result = brim.evaluate(model, data, batch_size=4, output=tmp_path / "run", device="cpu", use_cache=False)
    assert isinstance(result, brim.EvalResult)
    assert result.metrics["exact_match"]["value"] == 0.8
    assert result.folder == tmp_path / "run"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_token": 4}, "no setting 'max_token'; did you mean max_tokens"),
        ({"batch_size": "many"}, "batch_size='many'"),
        ({"batch_size": 0}, "batch_size=0: it must be auto or a whole number from 1"),
        ({"fixed": True}, "no_auto_batch_size= needs a size"),
        ({"fail_on_oom": True}, "fail_on_oom= goes with"),
        ({"margin": 1.5}, "margin=1.5"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"max_new_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 4, "knob": {"max_new_tokens": 5}}, "set the same limit"),
        ({"knobs": {"max_new_tokens": "few"}}, "knob={'max_new_tokens': 'few'}"),
        ({"offload": "disk"}, "offload='disk'"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"stop": ("",)}, "a stop string must not be empty"),
        ({"task": "generat"}, "task='generat': .* generate"),
        ({"metrics": "exact"}, "metric 'exact'"),
        ({"knobs": {"sufix": "!"}}, "knob='sufix': .*did you mean suffix"),
        ({"weights": "file.pt"}, "weights='file.pt'"),
        ({"memory_limit": "lots"}, "memory_limit='lots'"),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    with pytest.raises(RequestError, match=words):
        run(model, data, tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_knobs_reach_the_factory(tmp_path: Path) -> None:
    data, model = write_words(tmp_path / "data.jsonl"), shout(tmp_path)
    result = run(model, data, tmp_path / "run", knobs={"suffix": "!"})
    assert all(answer.endswith("!") for answer in predictions(result))


@pytest.mark.parametrize("given", ["[]", "[None] * (len(samples) + 1)"])
def test_a_function_that_drops_or_adds_answers_is_reported(tmp_path: Path, given: str) -> None:
    (tmp_path / "odd.py").write_text(f"def odd():\n    return lambda samples: {given}\n")
    data = write_words(tmp_path / "data.jsonl")
    with pytest.raises(RequestError, match=r"returned \d results for a batch of 2; return one for each item"):
        run(f"py:{tmp_path / 'odd.py'}:odd", data, tmp_path / "run", batch_size=2)


def test_worker_processes_give_the_same_answers(
    vision_language_model: Path, picture_questions: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, "batch_size": 4}
    here = run(vision_language_model, picture_questions, tmp_path / "here", num_workers=0, **options)
    there = run(vision_language_model, picture_questions, tmp_path / "there", num_workers=2, **options)
    assert without_sizes(here.samples) == without_sizes(there.samples)
    assert there.summary["loader"]["num_workers"] == 2


def test_fail_fast_stops_at_the_first_sample_that_fails(image_classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    data = write_lines(tmp_path / "data.jsonl", [{"id": "first", "image": "bad.png", "label": "cat"}])
    with pytest.raises(RequestError, match=r"fail_fast=: sample first: DataError: image .*bad.png cannot be read"):
        run(image_classifier, data, tmp_path / "run", fail_fast=True)
