"""One page of every kind, and of every awkward case: a function that writes it into a folder and gives its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from brim.reporting.write import write_comparison, write_report
from tests.reported_runs import (
    failed_entry,
    profile_document,
    profile_entry,
    sample_line,
    two_knob_entries,
    write_compared_sizes,
    write_evaluation,
    write_explained_speed,
    write_find,
    write_forecast,
    write_profile,
    write_run,
)
from tests.reporting.trained_pages import TRAINED_PAGES

HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">&\'"</style></script>'


def full(folder: Path) -> Path:
    return write_report(write_profile(folder, profile_document()))


def one_value(folder: Path) -> Path:
    return write_report(write_profile(folder, profile_document([profile_entry(6)]), gpu=False))


def failures(folder: Path) -> Path:
    entries = [profile_entry(crops) for crops in range(2, 8)]
    entries[3] = failed_entry(max_crops=5)
    entries[1] |= dict.fromkeys(("latency_ms", "peak_allocated_bytes", "vision_tokens_mean", "accuracy_ci95"))
    return write_report(write_profile(folder, profile_document(entries)))


def nothing_worked(folder: Path) -> Path:
    return write_report(write_profile(folder, profile_document([failed_entry(max_crops=crops) for crops in (2, 3)])))


def two_knobs(folder: Path) -> Path:
    knobs = ("max_crops", "max_new_tokens")
    return write_report(write_profile(folder, profile_document(two_knob_entries(), knobs=knobs)))


def words(folder: Path) -> Path:
    entries = [{**profile_entry(crops), "dtype": name} for crops, name in ((4, "float32"), (5, "bfloat16"))]
    return write_report(write_profile(folder, profile_document(entries, knobs=("dtype",))))


def long_range(folder: Path) -> Path:
    """A knob from thousands to millions: an axis of multiples."""
    entries = [
        {**profile_entry(2 + step), "max_pixels": 65_536 * 2**step, "folder": f"values/{step}"} for step in range(7)
    ]
    return write_report(write_profile(folder, profile_document(entries, knobs=("max_pixels",))))


def many_points(folder: Path) -> Path:
    """Forty points of two knobs: more lines than hues, more values than ticks."""
    entries = [
        {**profile_entry(crops), "tokens": tokens, "folder": None}
        for tokens in (4, 8, 12, 16, 24, 32, 48, 64)
        for crops in range(2, 7)
    ]
    return write_report(write_profile(folder, profile_document(entries, knobs=("tokens", "max_crops"))))


def evaluation(folder: Path) -> Path:
    return write_report(write_evaluation(folder))


def bare_evaluation(folder: Path) -> Path:
    """No samples, no trace, no metric."""
    write_run(
        folder, kind="eval", request={"model": "m", "data": "d"}, plan=None, summary={"num_samples": 0, "metrics": {}}
    )
    return write_report(folder)


def find(folder: Path) -> Path:
    return write_report(write_find(folder))


def unknown_kind(folder: Path) -> Path:
    summary = {"final": {"loss": 0.25}, "epochs": 3}
    return write_report(write_run(folder, kind="calibrate", request={"model": "m"}, plan=None, summary=summary))


def hostile_profile(folder: Path) -> Path:
    entries = [{**profile_entry(crops), "prompt": f"{HOSTILE}{crops}"} for crops in (2, 3, 4)]
    entries.append({**failed_entry(prompt=HOSTILE), "error": HOSTILE})
    document = profile_document(entries, knobs=("prompt",), notes=[HOSTILE], metric=HOSTILE)
    document["request"] = {"model": HOSTILE, "data": HOSTILE, HOSTILE: HOSTILE}
    document["recommendation"]["text"] = [HOSTILE]
    return write_report(write_profile(folder, document))


def compared_evaluations(folder: Path) -> Path:
    before, after = [1.0, 0.0, 0.6, 1.0] * 20, [1.0, 1.0, 0.6, 0.0] * 20
    lines = [sample_line(n, score, prediction=HOSTILE) for n, score in enumerate(after)]
    runs = [write_evaluation(folder / "before", before), write_evaluation(folder / "after", after, lines=lines)]
    write_comparison(runs, folder / "compared.html")
    return folder / "compared.html"


def compared_profiles(folder: Path) -> Path:
    faster = [
        {**profile_entry(n), "samples_per_second": 1.2 * profile_entry(n)["samples_per_second"]} for n in range(2, 9)
    ]
    documents: list[Any] = [profile_document(), profile_document(faster)]
    runs = [write_profile(folder / f"run{place}", document) for place, document in enumerate(documents)]
    write_comparison(runs, folder / "compared.html")
    return folder / "compared.html"


def compared_sizes(folder: Path) -> Path:
    return write_report(write_compared_sizes(folder))


def explained_speed(folder: Path) -> Path:
    return write_report(write_explained_speed(folder))


def forecast(folder: Path) -> Path:
    return write_report(write_forecast(folder, "resnet18"))


def forecast_of_several(folder: Path) -> Path:
    return write_report(write_forecast(folder, "resnet18", HOSTILE, module=HOSTILE))


PAGES: dict[str, Callable[[Path], Path]] = {
    function.__name__: function
    for function in (
        full, one_value, failures, nothing_worked, two_knobs, words, long_range, many_points, evaluation,
        bare_evaluation, find, unknown_kind, hostile_profile, compared_evaluations, compared_profiles,
        compared_sizes, explained_speed, forecast, forecast_of_several,
    )
} | TRAINED_PAGES  # fmt: skip
