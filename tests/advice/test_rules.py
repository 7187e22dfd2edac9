"""Single rules on records as a card would leave them, and what is said before a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.advice.advise import RULES, advise_run
from brim.advice.base import Advice, ordered
from brim.advice.rules_batch import padding, small_batches
from brim.advice.rules_device import allocator, attention, precision, underfilled_card
from brim.advice.rules_time import loading, validation
from brim.advice.run_reader import Run
from brim.errors import RequestError
from brim.settings.eval_settings import EvalRequest
from brim.settings.train_settings import train_settings
from tests import saved_models
from tests.advice.advised_runs import write_questions

GIB = 2**30
CUDA = {"cudnn": {}, "attention": {"flash": True, "efficient": True, "math": True, "cudnn": True}, "variables": {}}


def evaluation(summary: dict[str, Any], *, environment: dict[str, Any] | None = None, **request: Any) -> Run:
    asked = EvalRequest(model="m", data="d", task="classify", **request).to_json()
    document = {"request": {**asked, "command": "eval"}, "summary": summary, "environment": environment or {},
                "plan": {"memory": {"limit_bytes": 80 * GIB}}}  # fmt: skip
    return Run(folder=Path("runs/none"), kind="eval", document=document)


def training(summary: dict[str, Any], *, environment: dict[str, Any] | None = None, **sections: Any) -> Run:
    settings = train_settings({"model": {"type": "mlp"}, **sections}).to_json()
    document = {"request": {"settings": settings, "command": "train"}, "summary": summary,
                "environment": environment or {}, "plan": {"memory": {"limit_bytes": 80 * GIB}}}  # fmt: skip
    return Run(folder=Path("runs/none"), kind="train", document=document)


def piece(name: str, gain: float | None, **more: Any) -> Advice:
    return Advice(name=name, cause="", evidence="", expected_gain=gain, **more)


def test_wrong_answers_come_first_then_the_largest_gain_and_no_figure_last() -> None:
    pieces = [piece("none", None), piece("small", 1.2), None, piece("wrong", None, repairs_answers=True),
              piece("large", 3.0), piece("nothing", 1.01)]  # fmt: skip
    assert [one.name for one in ordered(pieces)] == ["wrong", "large", "small", "none"]


def test_a_gain_that_nothing_measured_says_so() -> None:
    assert "not measured" in piece("a", 2.0).gain_text
    assert "not measured" in piece("a", None).gain_text
    assert "not measured" not in piece("a", 2.0, measured=True).gain_text


def test_an_older_record_without_the_figures_gives_no_advice_and_no_error() -> None:
    for run in (evaluation({}), training({})):
        assert [rule(run) for rule in RULES] == [None] * len(RULES)


def test_single_precision_on_a_card_may_be_halved_and_answers_may_change() -> None:
    found = precision(evaluation({}, environment=CUDA, dtype="float32"))
    assert found is not None
    assert found.settings == {"dtype": "bfloat16"}
    assert found.changes_answers
    assert not found.measured
    assert precision(evaluation({}, environment=CUDA, dtype="bfloat16")) is None
    assert precision(evaluation({}, dtype="float32")) is None  # on the CPU


def test_attention_without_fused_kernels_is_named() -> None:
    off = {**CUDA, "attention": {"flash": False, "efficient": False, "math": True, "cudnn": False}}
    assert attention(evaluation({}, environment=off)) is not None
    assert attention(evaluation({}, environment=CUDA)) is None


def test_memory_that_is_reserved_and_not_used_asks_for_growing_segments() -> None:
    summary = {"peak_reserved_bytes": 70 * GIB, "peak_allocated_bytes": 40 * GIB, "oom_events": 2}
    run = evaluation(summary, environment=CUDA)
    found = allocator(run)
    assert found is not None
    assert not found.can_be_tried
    assert advise_run(run)[0].command.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True brim eval ")
    grown = {**CUDA, "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    assert allocator(evaluation(summary, environment=grown)) is None


def test_a_card_that_a_small_model_leaves_idle_is_named() -> None:
    idle = {"gpu_utilisation_mean": 0.2, "peak_reserved_bytes": GIB, "fast_path": "off"}
    assert underfilled_card(training(idle, environment=CUDA)) is not None
    assert underfilled_card(training({**idle, "gpu_utilisation_mean": 0.9}, environment=CUDA)) is None
    assert underfilled_card(training({**idle, "fast_path": "stacked"}, environment=CUDA)) is None


def test_validation_is_made_rarer_until_it_takes_little() -> None:
    found = validation(training({"seconds": 100.0, "eval_seconds": 100.0, "epochs": 40}))
    assert found is not None
    assert found.settings["training.eval_every"] == 20
    assert found.expected_gain == pytest.approx(200 / 105)
    assert validation(training({"seconds": 100.0, "eval_seconds": 2.0, "epochs": 40})) is None


SIZE = 64
LENGTHS = (400, 300, 200, 100, 50, 50, 20, 10)  # the longest of each batch


def padded_run(each: float, by_token: float, *, wobble: float = 0.0, outside: float = 0.0, **changes: Any) -> Run:
    """An evaluation in batches of 64 that take so long for each sample and each padded token."""
    seconds = [
        (each * SIZE + by_token * SIZE * length) * (1 + wobble * (-1) ** place) for place, length in enumerate(LENGTHS)
    ]
    summary = {
        "num_samples": SIZE * len(LENGTHS), "batch_size_used": SIZE, "padding_fraction": 0.6, "ranks": 1,
        "seconds": sum(seconds) + outside,
        "batch_times": {
            "padded_cost": SIZE * sum(LENGTHS), "busy_seconds": sum(seconds),
            "batches": [[SIZE, SIZE * length, one] for length, one in zip(LENGTHS, seconds, strict=True)][1:],
        },
    }  # fmt: skip
    return evaluation({**summary, **changes}, batch_size=SIZE)


def test_padding_that_takes_all_the_time_promises_all_of_it() -> None:
    found = padding(padded_run(0.0, 1e-5, wobble=0.05))
    assert found is not None
    assert found.measured
    assert found.expected_gain == pytest.approx(0.8 / 0.4, rel=0.1)


def test_padding_promises_little_where_samples_take_most_of_the_time() -> None:
    found = padding(padded_run(0.02, 1e-5, wobble=0.02))
    assert found is not None
    assert found.measured
    tokens = 1e-5 * SIZE * sum(LENGTHS)
    whole = tokens + 0.02 * SIZE * len(LENGTHS)
    assert found.expected_gain == pytest.approx(whole / (whole - tokens / 2), rel=0.05)
    assert found.expected_gain < 1.1


def test_time_outside_of_batches_is_not_promised() -> None:
    inside, whole = padding(padded_run(0.0, 1e-5)), padding(padded_run(0.0, 1e-5, outside=1e-5 * SIZE * sum(LENGTHS)))
    assert inside is not None
    assert inside.expected_gain == pytest.approx(2.0)
    assert whole is not None
    assert whole.expected_gain == pytest.approx(1 / 0.75)


def test_a_first_batch_that_others_do_not_explain_leaves_the_gain_between_two_bounds() -> None:
    run = padded_run(0.001, 1e-5)
    times = run.summary["batch_times"]
    slow = {**times, "busy_seconds": 3 * times["busy_seconds"]}  # its warm-up, or its padding
    found = padding(padded_run(0.001, 1e-5, batch_times=slow, seconds=slow["busy_seconds"]))
    assert found is not None
    assert not found.measured
    least, most = (1 / (1 - share / 2) for share in (1130 / 1930 / 3, 1 - 800 / 1930 / 3))
    assert found.expected_gain == pytest.approx(math.sqrt(least * most))
    assert f"between {least:.2g}× and {most:.2g}×" in found.evidence


@pytest.mark.parametrize(
    "batches",
    [None, [], "damaged", [[64, 6400, 1.0]] * 8, [[64, 640, 0.1], [64, 6400, 1.0]], [[64, None, 1.0], [64]] * 4],
    ids=["older record", "one batch", "damaged", "all alike", "too few", "no figures"],
)
def test_batches_that_do_not_show_what_padding_costs_give_a_rule_of_thumb(batches: Any) -> None:
    times = {"padded_cost": 1000, "busy_seconds": 1.0, "batches": batches}
    found = padding(padded_run(0.0, 1e-5, batch_times=None if batches is None else times, seconds=1.0))
    assert found is not None
    assert not found.measured
    assert found.expected_gain == pytest.approx(2**0.5)
    assert "between 1× and 2×" in found.evidence
    assert "not measured" in found.gain_text


@pytest.mark.parametrize(("used", "at_least"), [(0.02, True), (0.45, False), (None, False)])
def test_a_small_size_with_room_for_many_samples_promises_a_lower_bound(used: float | None, at_least: bool) -> None:
    peak = None if used is None else round(used * 80 * GIB)
    summary = {"batch_size_used": 1, "samples_per_second": 9.0, "num_samples": 500, "peak_reserved_bytes": peak}
    found = small_batches(evaluation(summary, environment=CUDA, batch_size=1))
    assert found is not None
    assert found.at_least is at_least
    assert ("at least 4×" in found.gain_text) is at_least
    assert "not measured" in found.gain_text
    assert ("room for 50 samples" in found.evidence) is at_least


def test_a_loader_that_has_all_its_processes_is_told_apart() -> None:
    waited = {"seconds": 100.0, "loader": {"num_workers": 64, "wait_seconds": 60.0}, "monitor": {"host_cpu_mean": 1.0}}
    found = loading(evaluation(waited))
    assert found is not None
    assert not found.settings
    assert found.expected_gain is None
    assert loading(evaluation({"seconds": 100.0, "loader": {"num_workers": 0, "wait_seconds": 1.0}})) is None


def test_before_a_run_reference_answers_say_how_many_tokens_are_needed(tmp_path: Path) -> None:
    model = saved_models.save_language_model(tmp_path / "lm")
    data = write_questions(tmp_path / "q.jsonl", [200] * 2 + [3] * 62)
    found = brim.advise(model=str(model), data=str(data), task="generate", batch_size=64)
    by_name = {one.name: one for one in found.advice}
    assert by_name["max_new_tokens"].settings["max_tokens"] == 8
    assert "not measured" in by_name["max_new_tokens"].evidence
    assert by_name["padding"].settings == {"batch_size": "auto"}
    assert found.document["schema"] == "brim.advice/1"
    low = brim.advise(model=str(model), data=str(data), task="generate", max_tokens=1)
    assert low.advice[0].name == "truncated_answers"
    assert low.advice[0].settings["max_tokens"] > 1


@pytest.mark.parametrize("settings", [{}, {"model": "m"}, {"run": "r", "model": "m"}, {"run": "r", "data": "d"}])
def test_a_run_or_a_model_with_data_must_be_named(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        brim.advise(**settings)


def test_what_is_done_with_advice_needs_a_run() -> None:
    with pytest.raises(RequestError, match="run it first"):
        brim.advise(model="m", data="d", try_out=True)


FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "c7a9703"


def test_runs_of_an_earlier_version_are_advised() -> None:
    for name in ("eval-finished", "lm-finished", "train-finished", "seeds-finished", "stacked-finished"):
        found = brim.advise(FIXTURES / name)
        assert all(piece.command and piece.evidence for piece in found.advice)


def test_a_run_without_such_settings_is_refused_with_what_to_name() -> None:
    with pytest.raises(RequestError, match="brim eval and brim train"):
        brim.advise(FIXTURES / "dpo-finished")
