"""What is tried after a failure."""

from __future__ import annotations

import pytest

from brim.sweeps.job import Job, Outcome
from brim.sweeps.retry import next_attempt
from tests.sweeps.sweep_runs import failed


def job(size: int | str = 64, **more: object) -> Job:
    return Job(id="x", settings={"model": {"type": "m"}, "hp": {"batch_size": size}}, folder="f", **more)  # type: ignore[arg-type]


def test_half_is_tried_where_nothing_is_forecast_and_then_a_quarter_and_no_more() -> None:
    first = job()
    second = next_attempt(first, failed(first, "out_of_memory"), planned=None, effective_batch=64)
    assert second is not None
    third = next_attempt(second, failed(second, "out_of_memory"), planned=None, effective_batch=64)
    assert third is not None
    sizes = [one.run_settings["hp"]["batch_size"] for one in (second, third)]
    assert sizes == [32, 16]
    kept = third.run_settings["hp"]
    assert (kept["effective_batch"], kept["base_batch"]) == (64, 64), "what is learnt stays the same"
    assert next_attempt(third, failed(third, "out_of_memory"), planned=None, effective_batch=64) is None


def test_a_forecast_size_that_is_no_smaller_is_not_believed() -> None:
    again = next_attempt(job(), failed(job(), "out_of_memory"), planned=90, effective_batch=None)
    assert again is not None
    assert again.run_settings["hp"]["batch_size"] == 32


def test_auto_is_planned_again_with_more_memory_kept_free() -> None:
    first = job("auto")
    again = next_attempt(first, failed(first, "out_of_memory"), planned=9, effective_batch=48)
    assert again is not None
    assert again.run_settings["hp"] == {"batch_size": "auto"}
    assert again.run_settings["training"] == {"margin": 0.25}
    assert again.alone


@pytest.mark.parametrize("failure", ["error", "request", "timeout", "killed"])
def test_other_failures_stay_failures(failure: str) -> None:
    assert next_attempt(job(), failed(job(), failure), planned=8, effective_batch=64) is None


def test_a_lost_device_is_tried_again_as_it_was() -> None:
    again = next_attempt(job(), failed(job(), "lost"), planned=8, effective_batch=64)
    assert again is not None
    assert (again.attempt, again.run_settings) == (2, job().run_settings)


def test_one_sample_that_does_not_fit_and_what_is_done_are_not_tried_again() -> None:
    assert next_attempt(job(1), failed(job(1), "out_of_memory"), planned=0, effective_batch=1) is None
    completed = Outcome(id="x", attempt=1, state="completed")
    assert next_attempt(job(), completed, planned=8, effective_batch=64) is None
    assert next_attempt(job(), failed(job(), "out_of_memory"), planned=8, effective_batch=64, retry=False) is None
