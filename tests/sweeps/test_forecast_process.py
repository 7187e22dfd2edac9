"""The process that knows torch: devices, models, forecasts, and what becomes of one that dies or hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from brim.errors import LostError, RequestError
from brim.sweeps.forecast_process import ForecastProcess

NETS = """
import torch

def wide(outputs: int = 4):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))

def samples(count: int = 64):
    return lambda split: [(torch.zeros(3, 32, 32), place % 4) for place in range(count if split == "train" else 8)]
"""


def test_a_real_one_knows_models_and_what_a_step_of_them_takes(tmp_path: Path) -> None:
    nets = tmp_path / "nets.py"
    nets.write_text(NETS, encoding="utf-8")
    settings = {
        "model": {"type": f"py:{nets}:wide"},
        "data": {"type": f"py:{nets}:samples"},
        "training": {},
        "hp": {"batch_size": 16},
    }
    with ForecastProcess(card={"memory": "24GiB"}) as forecaster:
        forecaster.check_model("r3d_18")
        forecaster.check_model("mlp")
        with pytest.raises(RequestError, match="did you mean"):
            forecaster.check_model("r3d_19")
        answer = forecaster.forecast(settings, [16, "auto"])
        broken = forecaster.forecast({"model": {"type": f"py:{nets}:missing"}, "data": settings["data"]}, [4])
    weights = 4 * (3072 * 512 + 512 + 512 * 4 + 4)
    assert "reason" not in answer, answer
    assert answer["16"]["batch_size"] == 16
    assert answer["auto"]["batch_size"] == 8, "an eighth of the data"
    # weights, gradients and two moments of AdamW; the batch is small beside them
    assert 4 * weights <= answer["16"]["peak_allocated_bytes"] <= 8 * weights + 200 * 2**20
    assert answer["16"]["fits"] is True
    assert answer["16"]["batch_size_max"] == 64, "there are no more samples"
    assert "missing" in broken["reason"]


def test_a_failed_forecast_has_a_reason_and_the_next_one_restarts() -> None:
    script = "import sys, os, time\nline = sys.stdin.readline()\n{}\n"
    hangs, dies = ([sys.executable, "-c", script.format(end)] for end in ("time.sleep(60)", "os._exit(7)"))
    with ForecastProcess(command=hangs, timeout_seconds=0.5) as forecaster:
        assert "no answer within 0.5 s" in forecaster.forecast({}, [1])["reason"]
    with ForecastProcess(command=dies) as forecaster:
        assert "was lost: the process ended with exit code 7" in forecaster.forecast({}, [1])["reason"]
        assert "was lost: the process ended with exit code 7" in forecaster.forecast({}, [1])["reason"]
        with pytest.raises(LostError):
            forecaster.devices()
