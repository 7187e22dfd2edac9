"""Runs that are slow for one known reason: it is named first, and following the advice brings half of what it promises.

What is compared is work that can be counted (tokens, batches, checkpoints), never time.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import brim
from benchmarks.slow_runs import TINY, SlowRuns
from brim.advice.advise import advise_run
from brim.advice.base import Advice
from brim.advice.run_reader import Run
from brim.sizing.plans import PlanCache
from brim.training import run_files
from tests.advice.advised_runs import first_advice, followed


def half_of(piece: Advice) -> float:
    """The gain that following the advice must bring at least."""
    assert piece.expected_gain is not None
    return 1 + (piece.expected_gain - 1) / 2


def batches(run: Run) -> float:
    """How many batches the samples ran in: each line has the size of its own."""
    return sum(1 / line["batch_size"] for line in run.samples())


def state_rate(run: Run, samples_per_second: float) -> None:
    """Write a rate into the record of a run, in place of the time that this machine took."""
    file = run.folder / "run.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["summary"]["samples_per_second"] = samples_per_second
    file.write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and the questions with short answers are made once."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def slow(tmp_path: Path, shared: Path) -> SlowRuns:
    return SlowRuns(tmp_path, TINY, shared=shared)


def test_a_slow_loader_is_named_and_more_processes_share_its_work(slow: SlowRuns) -> None:
    run, log = slow.slow_loader(), slow.folder / "prepared.log"
    piece = first_advice(run)
    assert piece.name == "loading"
    assert piece.measured
    before = max(Counter(log.read_text().split()).values())
    log.unlink()
    followed(run, piece, slow.folder / "after")
    after = max(Counter(log.read_text().split()).values())  # of the process that prepared most
    assert before / after >= half_of(piece)


def test_batches_far_below_the_knee_are_named(slow: SlowRuns) -> None:
    run = slow.small_batch()
    piece = first_advice(run)
    assert piece.name == "batch_size"
    assert not piece.measured
    assert "not measured" in piece.gain_text
    after = followed(run, piece, slow.folder / "after")
    assert batches(run) / batches(after) >= half_of(piece)
    state_rate(after, 10 * run.summary["samples_per_second"])
    again = first_advice(run)  # the run beside it is a measurement
    assert again.name == "batch_size"
    assert again.measured
    assert again.expected_gain == pytest.approx(10)
    assert "after" in again.evidence


def test_a_cached_plan_is_a_measurement_of_larger_batches(slow: SlowRuns) -> None:
    many = slow.write(slow.folder / "questions.jsonl", slow.questions(160))
    model = slow.language_model()
    found = brim.evaluate(str(model), many, output=slow.folder / "auto", device="cpu", max_tokens=16)
    assert found.plan is not None
    identity = {"kind": "eval", "model": f"hf:{model}", "task": {"task": "generate"}}
    # As a longer run files it, and as if no batch had taken any time to speak of.
    probes = tuple(dataclasses.replace(probe, step_seconds=probe.step_seconds and 1e-9) for probe in found.plan.probes)
    PlanCache().save(dataclasses.replace(found.plan, probes=probes), identity, {})
    piece = next(piece for piece in advise_run(slow.small_batch()) if piece.name == "batch_size")
    assert piece.measured
    assert "cached plan" in piece.evidence


def test_padding_is_named_and_batches_by_cost_avoid_it(slow: SlowRuns) -> None:
    run = slow.padded()
    assert run.summary["padding_fraction"] > 0.9
    piece = first_advice(run)
    assert piece.name == "padding"
    assert not piece.measured, "one batch does not show what padding costs"
    after = followed(run, piece, slow.folder / "after")
    padded = [one.summary["batch_times"]["padded_cost"] for one in (run, after)]
    assert padded[0] / padded[1] >= half_of(piece)


def test_batches_of_different_lengths_show_what_padding_costs(slow: SlowRuns) -> None:
    run = slow.padded_and_timed()
    times = run.summary["batch_times"]
    assert len(times["batches"]) == 8, "all but the first"
    assert run.summary["padding_fraction"] > 0.8
    longest = times["padded_cost"] - sum(cost for _, cost, _ in times["batches"])  # of the first batch
    # As if time were that of padded tokens, and the first batch the warm-up that it is.
    seconds = [[count, cost, cost / 1e5] for count, cost, _ in times["batches"]]
    whole = times["padded_cost"] / 1e5
    timed = {**times, "batches": seconds, "busy_seconds": whole}
    document = {**run.document, "summary": {**run.summary, "batch_times": timed, "seconds": whole}}
    piece = first_advice(dataclasses.replace(run, document=document))
    assert (piece.name, piece.measured) == ("padding", True)
    after = followed(run, piece, slow.folder / "after")
    assert longest > times["padded_cost"] / 2
    assert times["padded_cost"] / after.summary["batch_times"]["padded_cost"] >= half_of(piece)


def test_room_for_tokens_that_no_answer_uses_is_named(slow: SlowRuns) -> None:
    run = slow.long_limit()
    piece = first_advice(run)
    assert piece.name == "max_new_tokens"
    assert max(line["tokens"] for line in run.samples()) < piece.settings["max_tokens"] <= 16
    after = followed(run, piece, slow.folder / "after")
    assert after.summary["answer_tokens"]["truncated_fraction"] == 0
    assert [line["prediction"] for line in after.samples()] == [line["prediction"] for line in run.samples()]
    assert batches(run) / batches(after) >= half_of(piece)


def test_truncated_answers_come_first_and_the_limit_is_raised(slow: SlowRuns) -> None:
    run = slow.truncated()
    pieces = advise_run(run)
    assert pieces[0].name == "truncated_answers"
    assert pieces[0].settings["max_tokens"] > 1
    assert "max_new_tokens" not in {piece.name for piece in pieces}
    after = followed(run, pieces[0], slow.folder / "after")
    truncated = [sum(line["truncated"] for line in one.samples()) for one in (run, after)]
    assert truncated[1] <= truncated[0] / 2


def test_checkpoints_that_slow_a_training_are_named(slow: SlowRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = run_files.save_checkpoint

    def counted(folder: Path, *, step: int, **state: Any) -> None:
        written.append(step)
        save(folder, step=step, **state)

    monkeypatch.setattr(run_files, "save_checkpoint", counted)
    run = slow.checkpoints()
    piece = first_advice(run)
    assert piece.name == "checkpoints"
    assert piece.measured
    before = len(written)
    written.clear()
    followed(run, piece, slow.folder / "after")
    assert before / len(written) >= half_of(piece)
