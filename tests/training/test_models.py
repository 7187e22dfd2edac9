"""Models of training: weights, heads, the smallest micro-batch, refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from brim.errors import RequestError
from brim.settings.train_settings import train_settings
from brim.training.models import build_model, smallest_micro_batch
from tests.training.training_runs import model_settings, run, settings_of, write_features


def test_random_weights_depend_on_the_seed() -> None:
    def first_weight(seed: int) -> torch.Tensor:
        settings = train_settings(model_settings(model__type="squeezenet1_1", hp__seed=seed, hp__size=32))
        return next(build_model(settings, outputs=3).model.parameters()).detach()

    assert torch.equal(first_weight(1), first_weight(1))
    assert not torch.equal(first_weight(1), first_weight(2))


def test_batch_norm_of_single_values_needs_two_samples() -> None:
    flat = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert smallest_micro_batch(flat, lambda: torch.zeros(1, 3)) == 2
    wide = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert smallest_micro_batch(wide, lambda: torch.zeros(1, 3, 8, 8)) == 1
    assert smallest_micro_batch(nn.Linear(3, 4), lambda: torch.zeros(1, 3)) == 1


def test_weights_are_loaded_from_a_file(tmp_path: Path) -> None:
    settings = train_settings(model_settings(model__type="squeezenet1_1", hp__size=32))
    state = build_model(settings, outputs=3).model.state_dict()
    save_file({name: torch.full_like(tensor, 0.5) for name, tensor in state.items()}, tmp_path / "w.safetensors")
    started = train_settings(
        model_settings(model__type="squeezenet1_1", hp__size=32, model__weights=str(tmp_path / "w.safetensors"))
    )
    model = build_model(started, outputs=3).model
    assert all((tensor == 0.5).all() for tensor in model.state_dict().values())
    other = build_model(started, outputs=5)
    assert any("the head had 3 outputs" in note for note in other.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__type": "squeezenet1_1", "model__params": {"depth": 3}}, "takes none"),
        ({"model__type": "mlp", "model__params": {"hiden": [3]}}, "did you mean hidden"),
        ({"model__type": "resnet5000"}, "no torchvision or timm model"),
        ({"model__type": "squeezenet1_1", "hp__frames": 4}, r"^model\.knobs: frames: .* no such knob"),
        ({"model__type": "squeezenet1_1", "model__knobs": {"size": 0}}, r"^model\.knobs: size=0: "),
    ],
)
def test_unknown_models_and_parameters_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_features(tmp_path / "features.npz")
    nested = settings_of(path, **{"model__params": {}, **changes})
    if changes["model__type"] != "mlp":
        del nested["data"]["root"]
    with pytest.raises(RequestError, match=words):
        run(nested, tmp_path / "run")
