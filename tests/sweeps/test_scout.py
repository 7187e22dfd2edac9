"""The process that knows torch: devices, models, forecasts, and what becomes of one that dies or hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from brim.errors import LostError, RequestError
from brim.sweeps.scout import Scout

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
    with Scout(card={"memory": "24GiB"}) as scout:
        scout.check_model("r3d_18")
        scout.check_model("mlp")
        with pytest.raises(RequestError, match="did you mean"):
            scout.check_model("r3d_19")
        answer = scout.forecast(settings, [16, "auto"])
        broken = scout.forecast({"model": {"type": f"py:{nets}:missing"}, "data": settings["data"]}, [4])
    weights = 4 * (3072 * 512 + 512 + 512 * 4 + 4)
    assert "reason" not in answer, answer
    assert answer["16"]["batch_size"] == 16
    assert answer["auto"]["batch_size"] == 8, "an eighth of the data"
    # weights, gradients and two moments of AdamW; the batch is small beside them
    assert 4 * weights <= answer["16"]["peak_allocated_bytes"] <= 8 * weights + 200 * 2**20
    assert answer["16"]["fits"] is True
    assert answer["16"]["batch_size_max"] == 64, "there are no more samples"
    assert "missing" in broken["reason"]


def test_a_forecast_that_hangs_or_dies_has_a_reason_and_the_next_one_starts_again() -> None:
    script = "import sys, os, time\nline = sys.stdin.readline()\n{}\n"
    with Scout(command=[sys.executable, "-c", script.format("time.sleep(60)")], timeout_seconds=0.5) as scout:
        assert "gave no answer within 0.5 s" in scout.forecast({}, [1])["reason"]
    with Scout(command=[sys.executable, "-c", script.format("os._exit(7)")]) as scout:
        assert "died (exit code 7)" in scout.forecast({}, [1])["reason"]
        assert "died (exit code 7)" in scout.forecast({}, [1])["reason"]
        with pytest.raises(LostError):
            scout.devices()
