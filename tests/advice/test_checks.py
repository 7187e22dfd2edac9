"""The checklist of a run: every line on records that pass, fail, and lack the figure; every kind of run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from brim.advice.check_lines import TITLES, CheckLine, counts_text
from brim.advice.checks import check_as, check_run
from brim.advice.run_reader import open_run
from brim.errors import RequestError
from brim.monitor.trace_file import COLUMNS
from brim.settings.check_settings import CheckLimits, CheckSettings
from tests.reported_runs import (
    GIB,
    failed_entry,
    profile_document,
    profile_entry,
    write_evaluation,
    write_find,
    write_json,
    write_profile,
    write_run,
)

CURVE = [[0.5 * step, 8 * step] for step in range(1, 21)]
GOOD = {
    "num_samples": 160, "num_failed": 0, "num_resumed": 0, "oom_events": 0, "alloc_retries": 0,
    "gpu_utilisation_mean": 0.8, "gpu_wait_fraction": 0.03, "peak_reserved_bytes": 30 * GIB, "ranks": 1,
    "samples_per_second": 16.0, "throughput": CURVE, "fingerprint": "model:1 data:2 settings:3", "seconds": 10.0,
    "metrics": {},
}  # fmt: skip
CUDA = {"device": "NVIDIA H200", "memory": {"limit_bytes": 100 * GIB}}
ALWAYS = ("failed", "out_of_memory", "alloc_retries", "gpu_utilisation", "waiting_for_data", "throttling")


def trace(folder: Path, reasons: Sequence[str], name: str = "monitor.csv") -> None:
    """monitor.csv with these cells of throttle reasons, one for each sample."""
    rows = [",".join(COLUMNS)]
    for step, reason in enumerate(reasons):
        cells = {"time_seconds": step / 2, "throttle_reasons": reason}
        rows.append(",".join(str(cells.get(column, "")) for column in COLUMNS))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


def evaluation(
    folder: Path, *, without: Sequence[str] = (), plan: Any = CUDA, request: Mapping[str, Any] | None = None,
    throttled: Sequence[str] = ("none",) * 20, **changes: Any,
) -> Path:  # fmt: skip
    """An evaluation in which everything is in order but for the changes."""
    summary = {name: value for name, value in {**GOOD, **changes}.items() if name not in without}
    asked = {"data": "d.jsonl", "command": "eval", **(request or {})}
    write_run(folder, kind="eval", request=asked, plan=plan, summary=summary)
    trace(folder, throttled)
    return folder


def training(folder: Path, *, epochs: Sequence[float] = (3.0, 4.0), request: Any = None, **changes: Any) -> Path:
    summary = {**GOOD, "loader": {"num_workers": 2, "wait_seconds": 0.5}, **changes}
    for name in ("gpu_wait_fraction", "num_samples", "num_failed", "num_resumed"):
        if name not in changes:
            summary.pop(name)
    write_run(folder, kind="train", request={"command": "train", **(request or {})}, plan=CUDA, summary=summary)
    trace(folder, ["none"] * 4)
    rows = [f"{place},{seconds}" for place, seconds in enumerate(epochs)]
    (folder / "epochs.csv").write_text("\n".join(["epoch,seconds", *rows]) + "\n", encoding="utf-8")
    return folder


def lines_of(folder: Path, baseline: Path | None = None, **limits: Any) -> dict[str, CheckLine]:
    before = None if baseline is None else open_run(baseline)
    return {line.name: line for line in check_run(open_run(folder), CheckLimits(**limits), baseline=before)}


def verdict(folder: Path, name: str, baseline: Path | None = None, **limits: Any) -> str | None:
    return lines_of(folder, baseline, **limits)[name].verdict


def test_a_run_in_order_passes_every_line(tmp_path: Path) -> None:
    lines = lines_of(evaluation(tmp_path), memory_range=(25 * GIB, 40 * GIB), max_total_seconds=7000.0)
    assert {line.verdict for line in lines.values()} == {"pass"}
    assert set(lines) == {*ALWAYS, "peak_memory", "total_seconds"}


# ------------------------------------------------------------------------------------- each line by itself

FAILING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "failed samples": ("failed", {"num_failed": 2}, {}),
    "out of memory": ("out_of_memory", {"oom_events": 1}, {}),
    "out of memory in a resumed run": ("out_of_memory", {"oom_events": 1, "num_resumed": 9}, {}),
    "retries": ("alloc_retries", {"alloc_retries": 3}, {}),
    "idle card": ("gpu_utilisation", {"gpu_utilisation_mean": 0.12}, {}),
    "a higher threshold": ("gpu_utilisation", {}, {"min_utilisation": 0.9}),
    "waiting": ("waiting_for_data", {"gpu_wait_fraction": 0.4}, {}),
    "throttled": ("throttling", {"throttled": ["none", "hw_thermal|gpu_idle"] * 9}, {}),
    "throttled, by the summary": (
        "throttling",
        {"throttled": [], "monitor": {"throttle_reasons": ["sw_power_cap"]}},
        {},
    ),
    "too little memory": ("peak_memory", {}, {"memory_range": (31 * GIB, 40 * GIB)}),
    "too much memory": ("peak_memory", {}, {"memory_range": (25 * GIB, 29 * GIB)}),
    "too long": ("total_seconds", {}, {"max_total_seconds": 60.0}),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_figure_beyond_its_limit_fails(tmp_path: Path, case: str) -> None:
    name, changes, limits = FAILING[case]
    lines = lines_of(evaluation(tmp_path, **changes), **limits)
    assert lines[name].verdict == "fail"
    others = [line for line in lines.values() if line.name != name]
    assert {line.verdict for line in others} <= {"pass", "unknown", None}


MISSING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "failures not counted": ("failed", {"without": ["num_failed"]}, {}),
    "no samples at all": ("failed", {"num_samples": 0}, {}),
    "errors not counted": ("out_of_memory", {"without": ["oom_events"]}, {}),
    "errors of this start alone": ("out_of_memory", {"num_resumed": 100}, {}),
    "an older record": ("alloc_retries", {"without": ["alloc_retries"]}, {}),
    "retries are null": ("alloc_retries", {"alloc_retries": None}, {}),
    "retries of this start alone": ("alloc_retries", {"num_resumed": 100}, {}),
    "a CPU counts no retries": ("alloc_retries", {"plan": {"device": "cpu"}}, {}),
    "no device on record": ("alloc_retries", {"plan": None}, {}),
    "no utilisation": ("gpu_utilisation", {"gpu_utilisation_mean": None}, {}),
    "utilisation that is no number": ("gpu_utilisation", {"gpu_utilisation_mean": "much"}, {}),
    "a single batch": ("waiting_for_data", {"gpu_wait_fraction": None}, {}),
    "the loader of an evaluation is not its waiting": (
        "waiting_for_data",
        {"gpu_wait_fraction": None, "loader": {"wait_seconds": 0.0}},
        {},
    ),
    "no trace": ("throttling", {"throttled": []}, {}),
    "a trace without reasons": ("throttling", {"throttled": ["", ""], "monitor": {"throttle_reasons": []}}, {}),
    "a rank without a trace": ("throttling", {"ranks": 2}, {}),
    "no peak": ("peak_memory", {"peak_reserved_bytes": None}, {"memory_range": (1, GIB)}),
    "time of this start alone": ("total_seconds", {"num_resumed": 5}, {"max_total_seconds": 7000.0}),
    "epochs of an evaluation": ("epoch_seconds", {}, {"max_epoch_seconds": 5.0}),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_figure_that_is_missing_never_passes(tmp_path: Path, case: str) -> None:
    name, changes, limits = MISSING[case]
    assert verdict(evaluation(tmp_path, **changes), name, **limits) == "unknown"


def test_a_record_without_any_figure_passes_nothing(tmp_path: Path) -> None:
    for kind in ("eval", "train", "sweep"):
        folder = write_run(tmp_path / kind, kind=kind, request={}, plan=None, summary={})
        limits = {"memory_range": (1, 2), "max_epoch_seconds": 1.0}
        assert {line.verdict for line in lines_of(folder, **limits).values()} <= {"unknown", None}
    profile = write_profile(tmp_path / "profile", profile_document([]))
    assert {line.verdict for line in lines_of(profile).values()} <= {"unknown", None}


def test_what_nobody_set_a_limit_to_is_shown_and_not_judged(tmp_path: Path) -> None:
    lines = lines_of(training(tmp_path / "shown"))
    assert (lines["peak_memory"].verdict, lines["peak_memory"].value) == (None, 30 * GIB)
    assert "100.0 GiB" in lines["peak_memory"].text
    assert [lines[name].verdict for name in ("epoch_seconds", "total_seconds")] == [None, None]
    bare = lines_of(evaluation(tmp_path / "bare", peak_reserved_bytes=None))
    assert "peak_memory" not in bare


def test_on_a_cpu_waiting_is_shown_and_neither_passes_nor_fails(tmp_path: Path) -> None:
    for place, fraction in enumerate((0.31, 0.01)):
        folder = evaluation(tmp_path / str(place), plan={"device": "cpu"}, gpu_wait_fraction=fraction)
        line = lines_of(folder)["waiting_for_data"]
        assert (line.verdict, line.value) == ("unknown", fraction)
        assert f"{100 * fraction:.1f} %, not judged" in line.text
        assert check_as(CheckSettings(run=folder)).document["ok"]
    other = evaluation(tmp_path / "mps", plan={"device": "mps"}, gpu_wait_fraction=0.31)
    assert verdict(other, "waiting_for_data") == "fail", "another processor computes"


def test_a_run_without_a_plan_is_on_the_device_of_its_environment(tmp_path: Path) -> None:
    folder = training(tmp_path, loader={"wait_seconds": 4.0})
    assert verdict(folder, "waiting_for_data") == "fail"
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "plan": None, "environment": {"device": "cpu"}}))
    assert verdict(folder, "waiting_for_data") == "unknown"


def test_idleness_and_set_clocks_are_no_throttling(tmp_path: Path) -> None:
    assert verdict(evaluation(tmp_path, throttled=["gpu_idle", "applications_clocks"] * 5), "throttling") == "pass"


def test_every_rank_is_looked_at_for_throttling(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, ranks=2)
    trace(folder, ["none"] * 4, "monitor.rank-1.csv")
    assert verdict(folder, "throttling") == "pass"
    trace(folder, ["hw_slowdown"] * 4, "monitor.rank-1.csv")
    assert verdict(folder, "throttling") == "fail"


# -------------------------------------------------------------------------------------------- kinds of runs


def test_a_training_waits_for_its_loader_and_has_epochs(tmp_path: Path) -> None:
    lines = lines_of(training(tmp_path), max_epoch_seconds=5.0)
    assert (lines["waiting_for_data"].verdict, lines["waiting_for_data"].value) == ("pass", 0.05)
    assert (lines["epoch_seconds"].verdict, lines["epoch_seconds"].value) == ("pass", 4.0)
    assert "failed" not in lines
    assert verdict(tmp_path, "epoch_seconds", max_epoch_seconds=3.5) == "fail"
    resumed = training(tmp_path / "resumed", request={"resume": True})
    assert verdict(resumed, "waiting_for_data") == "unknown", "the seconds are of all starts, the waiting of this one"
    starved = training(tmp_path / "starved", request={"resume": True}, loader={"wait_seconds": 4.0})
    assert verdict(starved, "waiting_for_data") == "fail"


def test_seeds_wait_together_and_any_may_fail(tmp_path: Path) -> None:
    rows = [{"name": f"seed-{seed}", "folder": f"seed-{seed}", "error": None} for seed in (0, 1)]
    runs = {"runs": rows, "num_runs": 2, "num_failed": 0, "loader": {"wait_seconds": 0.0}}
    folder = training(tmp_path / "seeds", **runs)
    assert verdict(folder, "waiting_for_data") == "unknown", "the seeds' own records are missing"
    for seed in (0, 1):
        training(folder / f"seed-{seed}", loader={"wait_seconds": 0.4 + seed}, epochs=[6.0 + seed])
    lines = lines_of(folder, max_epoch_seconds=6.5)
    assert (lines["waiting_for_data"].verdict, lines["waiting_for_data"].value) == ("fail", pytest.approx(0.18))
    assert (lines["epoch_seconds"].verdict, lines["epoch_seconds"].value) == ("fail", 7.0)
    assert lines["failed"].verdict == "pass"
    failed = training(tmp_path / "failed", **{**runs, "num_failed": 1})
    assert (lines_of(failed)["failed"].verdict, lines_of(failed)["failed"].value) == ("fail", 1)


def test_detectors_of_molecules_count_cells(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, kind="train", request={"command": "train dpo"}, plan=None,
        summary={"num_cells": 6, "num_failed": 1, "oom_events": 0, "gpu_utilisation_mean": None, "table": []},
    )  # fmt: skip
    lines = lines_of(folder)
    assert (lines["failed"].verdict, lines["failed"].text) == ("fail", "1 of 6 cells")
    assert lines["out_of_memory"].verdict == "pass"
    assert lines["alloc_retries"].verdict == "unknown"


def profile_of(folder: Path, *points: Mapping[str, Any], failing: int = 0) -> Path:
    entries = [
        {**profile_entry(2 + place), "num_failed": 0, "folder": f"values/{place}"} for place in range(len(points))
    ]
    entries += [{**failed_entry(max_crops=20 + place), "exit_code": 3} for place in range(failing)]
    write_profile(folder, profile_document(entries))
    for place, changes in enumerate(points):
        evaluation(folder / "values" / str(place), **changes)
    return folder


def test_a_profile_is_as_good_as_its_worst_point(tmp_path: Path) -> None:
    good = lines_of(profile_of(tmp_path / "good", {}, {"gpu_utilisation_mean": 0.5}))
    assert (good["gpu_utilisation"].verdict, good["gpu_utilisation"].value) == ("pass", 0.5)
    assert "max_crops=3" in good["gpu_utilisation"].text
    assert good["out_of_memory"].text == "none in each of 2 points", "alike at all: none of them is the worst"
    bad = lines_of(profile_of(tmp_path / "bad", {"gpu_utilisation_mean": 0.2}, {"gpu_utilisation_mean": 0.1}, {}))
    assert (bad["gpu_utilisation"].verdict, bad["gpu_utilisation"].value) == ("fail", 0.1)
    assert "2 of 3 points, max_crops=3 the worst" in bad["gpu_utilisation"].text
    part = lines_of(profile_of(tmp_path / "part", {}, {"gpu_utilisation_mean": None}))
    assert part["gpu_utilisation"].verdict == "unknown"


def test_a_point_that_did_not_fit_fails_the_memory_line_too(tmp_path: Path) -> None:
    lines = lines_of(profile_of(tmp_path, {}, failing=1))
    assert [lines[name].verdict for name in ("failed", "out_of_memory")] == ["fail", "fail"]
    assert lines["alloc_retries"].verdict == "unknown", "nothing was counted at the point that failed"
    assert lines["gpu_utilisation"].verdict == "pass", "over the points that ran"


def test_a_point_whose_folder_is_gone_is_known_by_its_entry(tmp_path: Path) -> None:
    entry = {**profile_entry(2), "folder": "gone", "gpu_utilisation_mean": 0.7, "gpu_wait_fraction": 0.01}
    lines = lines_of(write_profile(tmp_path, profile_document([entry])))
    assert lines["gpu_utilisation"].verdict == "pass"
    assert lines["alloc_retries"].verdict == "unknown"


def sweep_of(folder: Path, **states: str) -> Path:
    experiments = []
    for name, state in states.items():
        place = f"experiments/{name}"
        result = {"state": state, "folder": place, "failure": "error" if state == "failed" else None}
        experiments.append({"id": name, "result": result})
        if state == "completed":
            training(folder / place)
    counts = {state: [*states.values()].count(state) for state in ("completed", "failed", "interrupted", "waiting")}
    write_json(folder / "sweep.json", {"schema": "brim.sweep/1", "experiments": experiments})
    return write_run(folder, kind="sweep", request={"command": "sweep"}, plan=None, summary={"counts": counts})


def test_a_sweep_is_checked_over_its_experiments(tmp_path: Path) -> None:
    lines = lines_of(sweep_of(tmp_path / "good", a="completed", b="completed"))
    assert {lines[name].verdict for name in ALWAYS} == {"pass"}
    lines = lines_of(sweep_of(tmp_path / "bad", a="completed", b="failed", c="waiting"))
    assert (lines["failed"].verdict, lines["failed"].text) == ("fail", "2 of 3 experiments")
    assert lines["out_of_memory"].verdict == "unknown"
    assert lines["gpu_utilisation"].verdict == "pass"


# ------------------------------------------------------------------------------------------- against a run


def faster(factor: float, wobble: Sequence[float] = (1.02, 0.98, 1.0)) -> list[list[float]]:
    seconds, curve = 0.0, []
    for step in range(1, 21):
        seconds += 0.5 / factor * wobble[step % len(wobble)]
        curve.append([seconds, 8 * step])
    return curve


@pytest.mark.parametrize(
    ("factor", "wanted", "expected"),
    [(2.0, None, "pass"), (0.5, None, "fail"), (1.0, None, "unknown"), (2.0, 1.5, "pass"), (1.2, 1.5, "fail")],
)
def test_speed_is_judged_by_the_interval_of_paired_parts(
    tmp_path: Path, factor: float, wanted: float | None, expected: str
) -> None:
    before = evaluation(tmp_path / "before")
    after = evaluation(
        tmp_path / "after", throughput=faster(factor, (1.2, 0.9, 0.95) if factor == 1 else (1.02, 0.98, 1.0))
    )
    line = lines_of(after, before, min_speed_up=wanted)["speed_up"]
    assert line.verdict == expected
    assert line.value == pytest.approx(factor, rel=0.02)
    assert line.interval is not None
    assert line.interval[0] < line.value < line.interval[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "model:1 data:other settings:3"},
        {"throughput": faster(9)[:8]},
        {"throughput": "damaged"},
        {"without": ["throughput"]},
        {"throughput": [[*point, 1] for point in faster(9)]},
        {"num_resumed": 3},
    ],
    ids=["other data", "too few points", "damaged", "older record", "no pairs", "resumed"],
)
def test_rates_alone_are_shown_and_never_clear(tmp_path: Path, changes: dict[str, Any]) -> None:
    before = evaluation(tmp_path / "before")
    after = evaluation(tmp_path / "after", **{"samples_per_second": 160.0, "throughput": faster(10), **changes})
    line = lines_of(after, before)["speed_up"]
    assert (line.verdict, line.interval) == ("unknown", None)
    assert line.value == pytest.approx(10)
    assert "not clear" in line.text


WILD = (4.0, 0.1, 0.2, 2.0, 0.3)  # factors of the time of a part


@pytest.mark.parametrize(
    ("seconds", "wanted", "wobble", "expected"),
    [
        (10 / 16, None, None, "pass"),
        (160.0, None, None, "fail"),
        (10 / 1.5, None, None, "unknown"),
        (15.0, None, None, "unknown"),
        (10 / 16, 6.0, None, "pass"),
        (10 / 16, 12.0, None, "unknown"),
        (10 / 16, 40.0, None, "fail"),
        (10 / 4, None, WILD, "unknown"),
    ],
)
def test_a_run_of_few_batches_is_clear_if_the_difference_is_far_above_the_spread(
    tmp_path: Path, seconds: float, wanted: float | None, wobble: Sequence[float] | None, expected: str
) -> None:
    before = evaluation(tmp_path / "before", **({"throughput": faster(1, wobble)} if wobble else {}))
    whole = 0.5 * 20 if wobble is None else faster(1, wobble)[-1][0]
    after = evaluation(tmp_path / "after", throughput=[[seconds * whole / 20, 80], [seconds * whole / 10, 160]])
    line = lines_of(after, before, min_speed_up=wanted)["speed_up"]
    assert line.verdict == expected
    assert line.value == pytest.approx(10 / seconds)
    assert line.interval is not None
    assert line.interval[0] < 0.51 * line.value
    assert line.interval[1] > 1.99 * line.value
    assert "2 points" in line.text, "how it was judged"


def test_two_runs_of_few_batches_are_never_clear(tmp_path: Path) -> None:
    before = evaluation(tmp_path / "before", throughput=[[10.0, 160]])
    after = evaluation(tmp_path / "after", throughput=[[0.1, 160]], samples_per_second=1600.0)
    line = lines_of(after, before)["speed_up"]
    assert (line.verdict, line.interval, line.value) == ("unknown", None, pytest.approx(100))


def test_a_run_without_a_rate_is_not_compared(tmp_path: Path) -> None:
    before = evaluation(tmp_path / "before", samples_per_second=None, throughput=[])
    assert verdict(evaluation(tmp_path / "after"), "speed_up", before) == "unknown"


def test_a_profile_is_compared_point_by_point(tmp_path: Path) -> None:
    before = profile_of(tmp_path / "before", {}, {})
    after = profile_of(tmp_path / "after", {"throughput": faster(2)}, {"throughput": faster(0.5)})
    line = lines_of(after, before)["speed_up"]
    assert line.verdict == "fail"
    assert line.value == pytest.approx(0.5, rel=0.02)
    assert "max_crops=3" in line.text


# ------------------------------------------------------------------------------------------------ the call


def test_the_document_has_every_line_and_whether_all_is_well(tmp_path: Path) -> None:
    result = check_as(CheckSettings(run=evaluation(tmp_path, oom_events=2)))
    document = json.loads(json.dumps(result.document))
    assert (document["schema"], document["kind"], document["ok"]) == ("brim.check_run/1", "eval", False)
    assert document["counts"] == {"pass": 5, "fail": 1, "unknown": 0}
    assert [line["name"] for line in document["lines"] if line["verdict"] == "fail"] == ["out_of_memory"]
    assert {"name", "verdict", "value", "limit", "text", "interval"} == set(document["lines"][0])
    assert [line.name for line in result.failed] == ["out_of_memory"]


def test_every_line_has_a_title(tmp_path: Path) -> None:
    lines = lines_of(training(tmp_path / "run", num_runs=1, num_failed=0), evaluation(tmp_path / "before"))
    assert set(lines) == set(TITLES)
    assert all(line.title and line.text for line in lines.values())


def test_the_summary_counts_verdicts_and_names_failures(tmp_path: Path) -> None:
    lines = [*lines_of(evaluation(tmp_path, gpu_utilisation_mean=0.12, alloc_retries=None)).values()]
    assert counts_text(lines) == ("4 passed, 1 failed (GPU utilisation 12.0 %, below 30 %), 1 could not be judged")


@pytest.mark.parametrize("other", ["itself", "another kind", "nothing there"])
def test_a_run_is_compared_with_another_one_of_its_kind(tmp_path: Path, other: str) -> None:
    run = evaluation(tmp_path / "run")
    places = {"itself": run, "another kind": training(tmp_path / "t"), "nothing there": tmp_path / "none"}
    with pytest.raises(RequestError):
        check_as(CheckSettings(run=run, against=places[other]))


def test_a_search_has_nothing_to_check(tmp_path: Path) -> None:
    assert check_run(open_run(write_find(tmp_path))) == []
    with pytest.raises(RequestError, match="nothing to check"):
        check_as(CheckSettings(run=tmp_path))


@pytest.mark.parametrize("left", ["samples.jsonl", "steps.jsonl", "checkpoint.json", "cells.jsonl", "journal.jsonl"])
def test_a_run_that_has_not_finished_is_to_be_resumed(tmp_path: Path, left: str) -> None:
    (tmp_path / left).write_text("{}\n")
    with pytest.raises(RequestError, match="--resume"):
        check_as(CheckSettings(run=tmp_path))


def test_a_run_as_an_older_release_left_it_is_checked(tmp_path: Path) -> None:
    lines = lines_of(write_evaluation(tmp_path))
    assert lines["alloc_retries"].verdict == "unknown"
    assert lines["gpu_utilisation"].verdict == "pass"
