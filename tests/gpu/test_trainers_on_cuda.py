"""transformers' and TRL's trainers on a GPU: sizes under a limit, a window redone, a forecast near what is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from brim.integrations.transformers import fit_to_memory, forecast
from tests.integrations.trainers import Neighbour, losses, make_sft, make_trainer

pytestmark = pytest.mark.gpu

LIMIT = 2 * 2**30
MAKERS: dict[str, Callable[..., Any]] = {"Trainer": make_trainer, "SFTTrainer": make_sft}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("CI", "1")  # TRL reports its use to its makers otherwise
    if request.param == "SFTTrainer":
        pytest.importorskip("trl")
    return MAKERS[request.param]


def test_a_window_that_runs_out_of_memory_is_redone(make: Callable[..., Any], tmp_path: Path) -> None:
    undisturbed = make(tmp_path / "a", use_cpu=False)
    undisturbed.train()
    trainer = make(tmp_path / "b", use_cpu=False)
    fit = fit_to_memory(trainer, batch_size=4, memory_limit=LIMIT)
    with Neighbour(trainer, at_calls=(3,), take_bytes=LIMIT, backward=True):
        trainer.train()
    assert fit.oom_events == 1
    assert losses(trainer) == pytest.approx(losses(undisturbed), rel=1e-3)


def test_sizes_are_found_and_everything_is_put_back(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, use_cpu=False)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    state = torch.cuda.get_rng_state()
    fit = fit_to_memory(trainer, memory_limit=LIMIT)
    assert fit.per_device_train_batch_size * fit.gradient_accumulation_steps == 8  # type: ignore[operator]
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert trainer.optimizer is None


def test_a_forecast_can_be_made_on_the_card_itself(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, use_cpu=False)
    in_use = torch.cuda.memory_allocated()
    found = forecast(trainer, batch_size=8).forecasts[0]
    assert found.peak_allocated_bytes > 0
    assert torch.cuda.memory_allocated() == in_use
