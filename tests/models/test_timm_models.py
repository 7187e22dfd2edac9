from __future__ import annotations

import pytest
import torch

from brim.errors import RequestError
from brim.models.build import build_workload, model_knobs
from brim.settings.find_settings import WorkloadRequest

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(
    ("name", "size"), [("resnet10t", 64), ("vit_tiny_patch16_224", 48), ("deit_tiny_distilled_patch16_224", 32)]
)
def test_a_model_runs_at_the_requested_size(name: str, size: int, mode: str) -> None:
    request = WorkloadRequest(model=f"timm:{name}", mode=mode, knobs={"size": size}, device="cpu")  # type: ignore[arg-type]
    workload, _ = build_workload(request)
    batch = workload.make_batch(2)
    assert (batch[0] if mode == "train" else batch).shape == (2, 3, size, size)
    assert workload.batch_length(batch) == 2
    workload.step(batch)


def test_the_default_size_is_the_models_own() -> None:
    assert [(knob.name, knob.default) for knob in model_knobs("timm:resnet10t")] == [("size", 176)]


def test_gradient_checkpointing_is_timms_own() -> None:
    request = WorkloadRequest(
        model="timm:resnet10t", mode="train", knobs={"size": 64}, device="cpu", gradient_checkpointing=True
    )
    workload, notes = build_workload(request)
    assert "own (timm)" in notes[0]
    workload.step(workload.make_batch(2))


def _meta_tensors_check_convolutions() -> bool:
    """Older torch lets a kernel larger than its input pass on the meta device; there, the first probe tells."""
    try:
        image, kernel = torch.empty(1, 1, 2, 2, device="meta"), torch.empty(1, 1, 4, 4, device="meta")
        torch.nn.functional.conv2d(image, kernel, stride=4)
    except RuntimeError:
        return True
    return False


@pytest.mark.skipif(not _meta_tensors_check_convolutions(), reason="this torch checks no sizes on the meta device")
def test_a_size_the_architecture_cannot_take_is_refused() -> None:
    request = WorkloadRequest(model="timm:vit_tiny_patch16_224", knobs={"size": 8}, device="cpu")
    with pytest.raises(RequestError, match="--knob size=8: timm:vit_tiny_patch16_224 cannot run at this"):
        build_workload(request)


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(RequestError, match=r"timm:resnet10x: timm has no such model; did you mean .*resnet10t"):
        model_knobs("timm:resnet10x")
