"""One forecast for each distinct workload, what is foreseen of them, and the preview at 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from brim.settings.config_files import read_sweep
from brim.sweeps.forecasts import (
    CachedForecasts,
    SizeForecast,
    bytes_needed,
    forecast_experiments,
    foreseen,
    workload_key,
)
from brim.sweeps.preview import render_sweep
from brim.sweeps.results import preview_document
from tests.sweeps.sweep_runs import GIB, sweep_of

GRID = """grid_search:
  grid:
    model.type: [r3d_18, a_model_with_quite_a_long_name_that_must_be_cut_somewhere]
    hp.batch_size: [128,
                    16]
    hp.learning_rate: [0.1, 0.01]
"""


class Asked:
    """Answers as the forecasting process does: two GiB a sample, on a card of 100."""

    def __init__(self) -> None:
        self.questions: list[tuple[str, list[int | str]]] = []

    def __call__(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> dict[str, Any]:
        model = settings["model"]["type"]
        self.questions.append((model, list(sizes)))
        if model == "odd":
            return {"reason": "it cannot be traced"}
        return {str(size): self.answer(size) for size in sizes}

    def answer(self, size: int | str) -> dict[str, Any]:
        count = 40 if size == "auto" else int(size)
        return {
            "batch_size": count, "device_bytes": 2 * count * GIB, "peak_reserved_bytes": 2 * count * GIB,
            "limit_bytes": 100 * GIB, "fits": count <= 50, "batch_size_max": 50, "device": "a card",
        }  # fmt: skip


def test_experiments_that_take_the_same_memory_share_one_forecast() -> None:
    grid = {"model.type": ["r3d_18", "odd"], "hp.batch_size": [128, 16, "auto"], "hp.learning_rate": [0.1, 0.2]}
    ask = Asked()
    found = forecast_experiments(sweep_of(grid).expand().experiments, ask)
    assert ask.questions == [("r3d_18", [128, 16, "auto"]), ("odd", [128, 16, "auto"])]
    assert len(found) == 12
    by_size = {one.batch_size for name, one in found.items() if name.startswith("r3d_18")}
    assert by_size == {128, 16, 40}
    assert {one.reason for name, one in found.items() if name.startswith("odd")} == {"it cannot be traced"}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"hp": {"learning_rate": 0.5}}, True),
        ({"scheduler": {"name": "cosineannealinglr"}}, True),
        ({"hp": {"frames": 8}}, False),
        ({"optimizer": {"name": "sgd"}}, False),
        ({"training": {"dtype": "bfloat16"}}, False),
    ],
)
def test_only_what_takes_memory_makes_another_workload(change: dict[str, Any], same: bool) -> None:
    base = {"model": {"type": "r3d_18"}}
    assert (workload_key(base) == workload_key({**base, **change})) == same


def test_a_combination_that_does_not_fit_is_reported_once(
    tmp_path: Path,
) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(GRID)
    sweep = read_sweep(file)
    experiments = sweep.expand().experiments
    forecasts = forecast_experiments(experiments, Asked())
    (problem,) = foreseen(sweep, experiments, forecasts)
    assert (problem.severity, problem.line, problem.key) == ("warning", 4, "hp.batch_size")
    assert "r3d_18 at 128 samples is forecast to take 256.0 GiB of the 100.0 GiB" in problem.message
    assert problem.fix.startswith("50 would fit")
    (strict,) = foreseen(sweep, experiments, forecasts, retry=False)
    assert strict.fix == "write 50, or auto"


def test_the_preview_fits_eighty_columns_and_says_what_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(GRID)
    expansion = read_sweep(file).expand()
    text = render_sweep(expansion, forecast_experiments(expansion.experiments, Asked()))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "pairing: zip" in text
    (row,) = [line for line in text.splitlines() if line.endswith("does not fit")]
    assert row.split() == ["r3d_18", "128", "43", "256.0", "GiB", "50", "does", "not", "fit"]


def test_the_document_of_a_preview_has_a_forecast_in_every_experiment() -> None:
    expansion = sweep_of({"model.type": ["r3d_18", "odd"]}).expand()
    document = preview_document(expansion, forecast_experiments(expansion.experiments, Asked()), file="g.yaml")
    assert document["schema"] == "brim.sweep/1"
    first, second = document["experiments"]
    assert (first["forecast"]["batch_size"], first["forecast"]["fits"]) == (40, True)
    assert second["forecast"]["reason"] == "it cannot be traced"
    assert first["settings"]["model"] == {"type": "r3d_18"}


def test_forecasts_are_cached_by_settings_card_and_versions(tmp_path: Path) -> None:
    ask = Asked()
    settings = {"model": {"type": "r3d_18"}}
    first = CachedForecasts(ask, card={"gpu": "h100"}, folder=tmp_path)(settings, [8, "auto"])
    again = CachedForecasts(ask, card={"gpu": "h100"}, folder=tmp_path)
    assert again({**settings, "hp": {"learning_rate": 0.5}}, [8]) == first
    assert len(ask.questions) == 1
    assert again(settings, [8, 16])["16"]["batch_size"] == 16
    assert ask.questions[-1] == ("r3d_18", [16]), "only the size that is new"
    CachedForecasts(ask, card={"gpu": "a100"}, folder=tmp_path)(settings, [8])
    assert len(ask.questions) == 3


@pytest.mark.parametrize(
    ("settings", "card"),
    [
        ({"model": {"type": "py:nets.py:wide"}}, {"gpu": "h100"}),
        ({"model": {"type": "r3d_18"}}, {}),
        ({"model": {"type": "r3d_18"}, "training": {"device": "cpu"}}, {"gpu": "h100"}),
        ({"model": {"type": "odd"}}, {"gpu": "h100"}),
    ],
)
def test_forecasts_of_user_code_host_memory_and_failures_are_not_cached(
    settings: dict[str, Any], card: dict[str, Any], tmp_path: Path
) -> None:
    ask = Asked()
    for _ in range(2):
        CachedForecasts(ask, card=card, folder=tmp_path)(settings, [8])
    assert len(ask.questions) == 2


def test_what_is_reserved_is_the_forecast_and_a_little_more() -> None:
    assert bytes_needed(None) is None
    assert bytes_needed(SizeForecast(reason="no")) is None
    known = SizeForecast(device_bytes=11 * GIB, context_bytes=GIB, limit_bytes=80 * GIB, fits=True)
    assert bytes_needed(known) == 12 * GIB
    unsure = SizeForecast(device_bytes=5 * GIB, context_bytes=GIB, limit_bytes=80 * GIB, fits=True, approximate="odd")
    assert bytes_needed(unsure) == 6 * GIB
    too_large = SizeForecast(device_bytes=200 * GIB, context_bytes=0, limit_bytes=80 * GIB, fits=False)
    assert bytes_needed(too_large) == 88 * GIB
