"""A trainer's forecast against what its steps take, as the CPU's meter counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from brim.errors import DoesNotFitError, RequestError
from brim.forecasting.forecast import Forecaster, TracedWorkload
from brim.forecasting.gpus import find_gpu
from brim.integrations.transformers import forecast
from brim.integrations.transformers_samples import CostliestSamples
from brim.integrations.transformers_workload import TrainingWorkload, prepared
from brim.memory.devices import memory_of
from tests.integrations.trainers import make_dpo, make_sft, make_trainer, weights


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL reports its use to its makers otherwise


def both_peaks(trainer: Any, size: int) -> tuple[int, int]:
    """Allocated bytes as forecast for the host, and as measured over three of the same steps."""
    steps = trainer.args.gradient_accumulation_steps
    for module in (trainer.model, getattr(trainer, "ref_model", None)):
        if module is not None:
            module.set_attn_implementation("eager")  # else a card's attention is not the CPU's
    with prepared(trainer, training=True) as ready:
        samples = CostliestSamples.of(trainer, trainer.train_dataset, "Training", None, "samples")
        workload = TrainingWorkload(ready, samples, micro_batches=lambda _: steps).traced_as()
        forecaster = Forecaster(TracedWorkload(workload), find_gpu("rtx 4090"), workspaces=False)
        expected = forecaster.at(size).peak_allocated_bytes
        held = [tensor for module in workload.modules() for tensor in (*module.parameters(), *module.buffers())]
        with memory_of("cpu").metered(held) as reading:
            batch = workload.make_batch(size)
            for _ in range(3):
                workload.step(batch)
    return expected, reading.peak_allocated_bytes


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("lora", [False, True])
def test_a_forecast_is_what_a_trainers_step_takes(lora: bool, accumulation: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lora=lora, gradient_accumulation_steps=accumulation, optim="adamw_torch")
    expected, measured = both_peaks(trainer, 32)
    assert expected == pytest.approx(measured, rel=0.05)


def test_a_forecast_is_what_a_trainers_step_takes_in_trl(tmp_path: Path) -> None:
    for trainer in (make_sft(tmp_path, lora=True), make_dpo(tmp_path)):
        expected, measured = both_peaks(trainer, 8)
        assert expected == pytest.approx(measured, rel=0.05)


def test_nothing_of_the_trainer_changes(tmp_path: Path) -> None:
    trainer = make_sft(tmp_path)
    before, attributes = weights(trainer), dict(vars(trainer))
    state = torch.get_rng_state()
    found = forecast(trainer, gpu=["rtx 4090", "h200"], batch_size=4)
    assert [card.gpu.key for card in found.cards] == ["rtx-4090-24gb", "h200-141gb"]
    assert found.forecasts[0].fits
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    assert vars(trainer) == attributes
    assert trainer._metrics["train"] == {}
    assert torch.equal(torch.get_rng_state(), state)
    trainer.train()


def test_sizes_up_to_the_largest_are_forecast(tmp_path: Path) -> None:
    found = forecast(make_trainer(tmp_path), memory="24GiB", max_batch_size=64)
    assert found.batch_size_max == 64
    assert [one.batch_size for one in found.forecasts] == [1, 2, 4, 8, 16, 32, 64]
    assert found.document["mode"] == "train"


def test_the_bytes_of_a_peak_are_divided_among_modules(tmp_path: Path) -> None:
    found = forecast(make_trainer(tmp_path, lora=True), gpu="rtx 4090", batch_size=4, by_module=6).forecasts[0]
    rows = {row.module: row for row in found.by_module}
    assert sum(row.bytes for row in rows.values()) == found.peak_allocated_bytes
    adapted = rows["base_model.model.model.layers.1.self_attn"].parts
    assert adapted["gradients"] > 0
    assert "gradients" not in rows["base_model.model.model.layers.1.mlp"].parts


def test_without_training_data_the_error_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train_dataset = None
    with pytest.raises(RequestError, match="the trainer has no training data; pass samples="):
        forecast(trainer, gpu="rtx 4090")


def test_a_card_is_a_text_or_several(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="gpu=3: it must be a text or a list of texts"):
        forecast(make_trainer(tmp_path), gpu=3)  # type: ignore[arg-type]
    assert len(forecast(make_trainer(tmp_path), gpu=["rtx 4090", "a100"], batch_size=2).cards) == 2


def test_a_card_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError):
        forecast(make_trainer(tmp_path), memory="641MiB")
