"""Sweeps on a card: planned sizes run without an out-of-memory error, too large ones are lowered, small ones share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.settings.config_files import read_sweep
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.forecast_process import ForecastProcess
from brim.sweeps.forecasts import bytes_needed, forecast_experiments
from brim.sweeps.launch_local import LocalLauncher
from brim.sweeps.run import SweepPlan, SweepResult, run_sweep
from brim.sweeps.scheduler import local_devices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CLIPS = {"type": "moving_shapes", "val_split": "none", "num_workers": 0, "params": {"samples": 128}}


def sweep(source: dict[str, Any], folder: Path, *, jobs_per_gpu: int | None = None, **request: Any) -> SweepResult:
    file = read_sweep(source)
    expansion = file.expand()
    with ForecastProcess(card={"here": True}) as forecaster:
        devices = local_devices(forecaster.devices(), jobs_per_gpu=jobs_per_gpu, device_ids=[0])
        forecasts = forecast_experiments(expansion.experiments, forecaster.forecast)
    launcher = LocalLauncher(devices, shares=jobs_per_gpu is not None)
    plan = SweepPlan(expansion=expansion, forecasts=forecasts)
    return run_sweep(plan, SweepRequest(file="g.yaml", use_cache=False, **request), launcher, output=folder)


def test_planned_sizes_run_within_a_memory_limit_without_running_out(tmp_path: Path) -> None:
    result = sweep(
        {
            "data": CLIPS,
            "hp": {"max_steps": 4, "frames": 8, "size": 112},
            "training": {"dtype": "bfloat16", "memory_limit": "4GiB"},
            "grid_search": {"grid": {"model.type": ["r3d_18", "swin3d_t"], "hp.batch_size": ["auto"]}},
        },
        tmp_path / "out",
        jobs_per_gpu=1,
    )
    assert [one.state for one in result.results] == ["completed", "completed"]
    for one in result.results:
        assert one.figure("oom_events") == 0
        assert one.figure("peak_reserved_bytes") <= 4 * 2**30
        assert one.forecast is not None
        assert one.forecast.peak_reserved_bytes is not None, one.forecast.reason


def test_a_given_size_that_does_not_fit_is_lowered_or_fails_as_asked(tmp_path: Path) -> None:
    source: dict[str, Any] = {
        "data": CLIPS,
        "hp": {"max_steps": 2, "frames": 8, "size": 112},
        "training": {"memory_limit": "3GiB"},
        "grid_search": {"grid": {"model.type": ["r3d_18"], "hp.batch_size": [128]}},
    }
    lowered = sweep(source, tmp_path / "lowered").results[0]
    assert lowered.state == "completed"
    assert lowered.figure("batch_size_used") < 128
    assert lowered.figure("effective_batch_size") == 128
    failed = sweep(source, tmp_path / "failed", retry=False).results[0]
    assert failed.outcome is not None
    assert (failed.state, failed.outcome.failure) == ("failed", "out_of_memory")


def test_small_experiments_share_the_card_and_none_fails(tmp_path: Path) -> None:
    source: dict[str, Any] = {
        "data": {**CLIPS, "params": {"samples": 256}},
        "hp": {"epochs": 2, "size": 64, "batch_size": 32},
        "grid_search": {"grid": {"model.type": ["resnet18"], "hp.learning_rate": [0.01, 0.001, 0.0001, 0.003]}},
    }
    result = sweep(source, tmp_path / "out")
    assert {one.state for one in result.results} == {"completed"}
    need = bytes_needed(result.results[0].forecast)
    assert need is not None
    assert need * 4 < torch.cuda.get_device_properties(0).total_memory
    starts = [
        entry["event"] for entry in map(json.loads, (tmp_path / "out" / "journal.jsonl").read_text().splitlines()[1:])
    ]
    assert starts[:2] == ["started", "started"], "the second did not wait for the first"
    for one in result.results:
        record = json.loads((tmp_path / "out" / one.folder / "run.json").read_text())
        assert record["request"]["settings"]["training"]["memory_limit"] is not None


def test_the_sweep_itself_takes_no_memory_of_the_card() -> None:
    import subprocess
    import sys

    script = (
        "import sys\nfrom brim.sweeps.launch_local import LocalLauncher\nfrom brim.sweeps.run import run_sweep\n"
        "from brim.sweeps.forecast_process import ForecastProcess\nassert 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
