"""Runs that are slow for one known reason: it is named first, and following the advice brings half of what it promises.

What is compared is work that can be counted (tokens, batches, checkpoints), never time.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.advice.advise import advise_run
from brim.advice.base import Advice
from brim.advice.run_reader import Run
from brim.sizing.plans import PlanCache
from brim.training import run_files
from tests import saved_models
from tests.advice import advised_runs
from tests.advice.advised_runs import evaluated, first_advice, followed
from tests.training import training_runs


def half_of(piece: Advice) -> float:
    """The gain that following the advice must bring at least."""
    assert piece.expected_gain is not None
    return 1 + (piece.expected_gain - 1) / 2


def batches(run: Run) -> float:
    """How many batches the samples ran in: each line has the size of its own."""
    return sum(1 / line["batch_size"] for line in run.samples())


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save_language_model(tmp_path_factory.mktemp("model") / "lm")


@pytest.fixture(scope="module")
def short_answers(tmp_path_factory: pytest.TempPathFactory, language_model: Path) -> Path:
    """Questions that the model answers in at most eight tokens."""
    folder = tmp_path_factory.mktemp("short")
    many = advised_runs.write_questions(folder / "many.jsonl", [12] * 96)
    run = evaluated(language_model, many, folder / "run", max_tokens=9)
    short = [line for line in run.samples() if not line["truncated"] and line["tokens"] <= 8]
    assert len(short) >= 24
    lines = [{"id": line["id"], "question": line["input"], "answer": "1"} for line in short]
    return advised_runs.write_lines(folder / "short.jsonl", lines)


def test_a_slow_loader_is_named_and_more_processes_share_its_work(tmp_path: Path) -> None:
    run, log = advised_runs.slow_loader(tmp_path)
    piece = first_advice(run)
    assert piece.name == "loading"
    assert piece.measured
    before = max(Counter(log.read_text().split()).values())
    log.unlink()
    followed(run, piece, tmp_path / "after")
    after = max(Counter(log.read_text().split()).values())  # of the process that prepared most
    assert before / after >= half_of(piece)


def test_batches_far_below_the_knee_are_named(tmp_path: Path, language_model: Path, short_answers: Path) -> None:
    run = evaluated(language_model, short_answers, tmp_path / "one", max_tokens=16, batch_size=1)
    piece = first_advice(run)
    assert piece.name == "batch_size"
    assert not piece.measured
    assert "not measured" in piece.gain_text
    after = followed(run, piece, tmp_path / "after")
    assert batches(run) / batches(after) >= half_of(piece)
    again = first_advice(run)  # the run beside it is a measurement
    assert again.name == "batch_size"
    assert again.measured
    assert "after" in again.evidence


def test_a_cached_plan_is_a_measurement_of_larger_batches(
    tmp_path: Path, language_model: Path, short_answers: Path
) -> None:
    many = advised_runs.write_questions(tmp_path / "many.jsonl", [12] * 160)
    found = brim.evaluate(str(language_model), many, output=tmp_path / "auto", device="cpu", max_tokens=16)
    assert found.plan is not None
    identity = {"kind": "eval", "model": f"hf:{language_model}", "task": {"task": "generate"}}
    PlanCache().save(found.plan, identity, {})  # as a longer run files it
    run = evaluated(language_model, short_answers, tmp_path / "runs" / "one", max_tokens=16, batch_size=1)
    piece = next(piece for piece in advise_run(run) if piece.name == "batch_size")
    assert piece.measured
    assert "cached plan" in piece.evidence


def test_padding_is_named_and_batches_by_cost_avoid_it(tmp_path: Path) -> None:
    model = saved_models.save_text_classifier(tmp_path / "texts")
    lines: list[dict[str, Any]] = [
        {"text": " ".join(["w1"] * length), "label": ("calm", "angry", "sad")[n % 3]}
        for n, length in enumerate([60] * 3 + [2] * 93)
    ]
    data = advised_runs.write_lines(tmp_path / "texts.jsonl", lines)
    run = evaluated(model, data, tmp_path / "run", batch_size=96)
    assert run.summary["padding_fraction"] > 0.9
    piece = first_advice(run)
    assert piece.name == "padding"
    after = followed(run, piece, tmp_path / "after")
    padded = [
        1 / (1 - one.summary["padding_fraction"]) for one in (run, after)
    ]  # tokens of a batch for one of a sample
    assert padded[0] / padded[1] >= half_of(piece)


def test_room_for_tokens_that_no_answer_uses_is_named(
    tmp_path: Path, language_model: Path, short_answers: Path
) -> None:
    run = evaluated(language_model, short_answers, tmp_path / "run", max_tokens=256, cost_cap=1024)
    piece = first_advice(run)
    assert piece.name == "max_new_tokens"
    assert piece.settings == {"max_tokens": 16}
    after = followed(run, piece, tmp_path / "after")
    assert after.summary["answer_tokens"]["truncated_fraction"] == 0
    assert [line["prediction"] for line in after.samples()] == [line["prediction"] for line in run.samples()]
    assert batches(run) / batches(after) >= half_of(piece)


def test_truncated_answers_come_first_and_the_limit_is_raised(tmp_path: Path, language_model: Path) -> None:
    data = advised_runs.write_questions(tmp_path / "q.jsonl", [12] * 32)
    run = evaluated(language_model, data, tmp_path / "run", max_tokens=4, batch_size=1)
    pieces = advise_run(run)
    assert pieces[0].name == "truncated_answers"
    assert pieces[0].settings["max_tokens"] > 4
    assert "max_new_tokens" not in {piece.name for piece in pieces}
    after = followed(run, pieces[0], tmp_path / "after")
    truncated = [sum(line["truncated"] for line in one.samples()) for one in (run, after)]
    assert truncated[1] <= truncated[0] / 2


def test_checkpoints_that_slow_a_training_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = run_files.save_checkpoint

    def counted(folder: Path, *, step: int, **state: Any) -> None:
        written.append(step)
        save(folder, step=step, **state)

    monkeypatch.setattr(run_files, "save_checkpoint", counted)
    features = training_runs.write_features(tmp_path / "features.npz", count=160)
    run = advised_runs.trained(training_runs.settings_of(features, training__checkpoint_every=1), tmp_path / "run")
    piece = first_advice(run)
    assert piece.name == "checkpoints"
    assert piece.measured
    before = len(written)
    written.clear()
    followed(run, piece, tmp_path / "after")
    assert before / len(written) >= half_of(piece)
