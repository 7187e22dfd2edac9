"""The training steps of the benchmarks, in their small sizes."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("transformers")

from benchmarks import training_steps
from benchmarks.workloads import WORKLOADS, build, find_flags, tiny

CPU = torch.device("cpu")


def cpu_has_lstm_in(dtype: torch.dtype | None) -> bool:
    """Whether this CPU has a kernel for it: of bfloat16, those without AVX-512 have none."""
    if dtype is None:
        return True
    try:
        with torch.autocast("cpu", dtype=dtype):
            torch.nn.LSTM(8, 8)(torch.zeros(1, 1, 8))
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", training_steps.STEPS)
def test_a_step_trains_what_it_should_and_nothing_else(name: str, dtype: torch.dtype | None) -> None:
    if name == "lstm" and not cpu_has_lstm_in(dtype):
        pytest.skip(f"this CPU has no LSTM kernel for {dtype}")
    torch.manual_seed(0)
    parts = getattr(training_steps, name)(tiny=True, device=CPU, dtype=dtype)
    batch = parts["make_batch"](3)
    assert all(len(tensor) == 3 for tensor in batch)
    before = {name: weights.clone() for name, weights in parts["model"].named_parameters()}
    losses = [parts["step"](batch).item() for _ in range(2)]
    assert all(0 < loss < 20 for loss in losses)
    assert losses[0] != losses[1]
    moved = {key for key, weights in parts["model"].named_parameters() if not torch.equal(weights, before[key])}
    trained = {key for key, weights in parts["model"].named_parameters() if weights.requires_grad}
    assert moved
    assert moved <= trained
    assert (trained == set(before)) == (name != "lora")


def test_adapters_alone_are_trained() -> None:
    model = training_steps.lora(tiny=True, device=CPU)["model"]
    trained = [key for key, weights in model.named_parameters() if weights.requires_grad]
    assert len(trained) == 2 * 2 * 2  # down and up, of queries and values, in two layers
    assert all(".down." in key or ".up." in key for key in trained)


def test_every_step_is_a_workload_that_brim_find_can_be_asked_for(tmp_path) -> None:
    named = {spec.model.rpartition(":")[2] for spec in WORKLOADS.values() if spec.model.startswith("py:")}
    assert named == set(training_steps.STEPS)
    spec = tiny(WORKLOADS["unet train 256"])
    assert find_flags(spec, tmp_path)[1:] == ["--mode", "train", "--dtype", "float32", "--knob", "tiny=true"]
    workload = build(spec, "cpu")
    assert workload.mode == "train"
    assert workload.step(workload.make_batch(2)).isfinite()


def test_a_model_without_a_folder_gets_one(tmp_path) -> None:
    flags = find_flags(WORKLOADS["qwen2 0.3B generate 512+32"], tmp_path / "qwen2")
    assert flags[0] == f"hf:{tmp_path / 'qwen2'}"
    assert (tmp_path / "qwen2" / "config.json").exists()


def test_factories_know_nothing_of_brim() -> None:
    assert "import brim" not in inspect.getsource(training_steps)
    assert "from brim" not in inspect.getsource(training_steps)
