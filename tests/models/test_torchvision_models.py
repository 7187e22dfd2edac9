from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torchvision

from brim.errors import RequestError
from brim.models.build import build_workload, model_knobs
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.base import Workload

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def build(model: str, mode: str = "forward", **options: Any) -> tuple[Workload, tuple[str, ...]]:
    knobs = {name: options.pop(name) for name in ("frames", "size") if name in options}
    return build_workload(WorkloadRequest(model=model, mode=mode, knobs=knobs, device="cpu", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(
    ("name", "knobs", "shape"),
    [
        ("resnet18", {"size": 33}, (2, 3, 33, 33)),
        ("googlenet", {"size": 64}, (2, 3, 64, 64)),
        ("swin_t", {"size": 32}, (2, 3, 32, 32)),
        ("r3d_18", {"frames": 2, "size": 32}, (2, 3, 2, 32, 32)),
        ("mvit_v2_s", {"frames": 2, "size": 32}, (2, 3, 2, 32, 32)),
        ("mvit_v1_b", {"frames": 4, "size": 32}, (2, 3, 4, 32, 32)),
    ],
)
def test_a_model_runs_at_the_size_of_its_knobs(
    name: str, knobs: dict[str, int], shape: tuple[int, ...], mode: str
) -> None:
    workload, _ = build(name, mode, **knobs)
    batch = workload.make_batch(2)
    inputs = batch[0] if mode == "train" else batch
    assert inputs.shape == shape
    assert workload.mode == mode
    assert workload.batch_length(batch) == 2
    workload.step(batch)


def test_a_forward_gives_the_scores_of_every_sample() -> None:
    workload, _ = build("squeezenet1_1", size=32)
    assert workload.step(workload.make_batch(3)).shape == (3, 1000)


def test_the_auxiliary_classifiers_of_googlenet_are_trained_too() -> None:
    workload, _ = build("googlenet", "train", size=64)
    workload.step(workload.make_batch(2))
    assert all(parameter.grad is not None for parameter in workload.modules()[0].parameters())


def test_defaults_are_the_sizes_of_the_published_weights() -> None:
    def defaults(name: str) -> dict[str, int]:
        return {knob.name: knob.default for knob in model_knobs(f"torchvision:{name}")}

    assert defaults("resnet50") == {"size": 224}
    assert defaults("inception_v3") == {"size": 299}
    assert defaults("r3d_18") == {"frames": 16, "size": 112}
    assert defaults("swin3d_b") == {"frames": 16, "size": 224}
    assert defaults("deeplabv3_resnet50") == {"size": 520}
    assert defaults("fasterrcnn_resnet50_fpn") == {"size": 800}
    assert defaults("ssd300_vgg16") == {"size": 300}


def test_every_model_that_is_built_has_knobs() -> None:
    models = torchvision.models
    video = models.list_models(module=models.video)
    assert len(video) >= 9
    others = [models.list_models(module=module) for module in (models, models.segmentation, models.detection)]
    for name in (*video, *itertools.chain(*others)):
        assert [knob.name for knob in model_knobs(name)] == (["frames", "size"] if name in video else ["size"])


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("vit_b_16", {"size": 100}, "--knob size=100: it must be a multiple of 16"),
        ("vit_h_14", {"size": 16}, "--knob size=16: it must be a multiple of 14"),
        ("maxvit_t", {"size": 100}, "--knob size=100: it must be a multiple of 224"),
        ("mvit_v2_s", {"frames": 3}, "--knob frames=3: it must be a multiple of 2"),
        ("resnet18", {"size": 0}, "--knob size=0: the smallest is 1"),
        ("alexnet", {"size": 32}, "--knob size=32: torchvision:alexnet cannot run at this: .*too small"),
        ("s3d", {"frames": 2, "size": 32}, "--knob frames=2 --knob size=32: torchvision:s3d cannot run"),
        ("resnet18", {"frames": 2}, "--knob frames: torchvision:resnet18 has no such knob .it has size"),
    ],
)
def test_a_knob_value_the_architecture_cannot_take_is_refused(name: str, knobs: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(name, **knobs)


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"])
def test_a_segmentation_model_learns_from_masks(name: str, mode: str) -> None:
    workload, _ = build(name, mode, size=64)
    batch = workload.make_batch(2)
    assert workload.batch_length(batch) == 2
    if mode == "forward":
        assert batch.shape == (2, 3, 64, 64)
        assert workload.step(batch)["out"].shape == (2, 21, 64, 64)
        return
    assert batch[1].shape == (2, 64, 64)
    assert workload.step(batch).isfinite()
    assert all(parameter.grad is not None for parameter in workload.modules()[0].parameters())  # the side branch, too
    assert workload.smallest_size() == (2 if name.startswith("deeplab") else 1)  # it pools to one value per channel


def test_a_detection_model_finds_boxes_and_learns_from_them() -> None:
    forward, _ = build("fasterrcnn_mobilenet_v3_large_320_fpn", size=64)
    batch = forward.make_batch(2)
    assert (batch.shape, forward.batch_length(batch)) == ((2, 3, 64, 64), 2)
    found = forward.step(batch)
    assert all(len(one["boxes"]) > 0 for one in found)  # a model that is sure of nothing would be too cheap
    train, _ = build("fasterrcnn_mobilenet_v3_large_320_fpn", "train", size=64)
    images, targets = train.make_batch(2)
    assert (len(images), len(targets), train.batch_length((images, targets))) == (2, 2, 2)
    assert (targets[0]["boxes"][:, 2:] > targets[0]["boxes"][:, :2]).all()
    assert train.step((images, targets)).isfinite()
    assert all(parameter.grad is not None for parameter in train.modules()[0].parameters())


def test_a_target_has_the_entries_that_the_model_needs() -> None:
    _, (masked, *_) = build("maskrcnn_resnet50_fpn", "train", size=64)[0].make_batch(1)
    assert masked["masks"].shape == (len(masked["boxes"]), 64, 64)
    assert masked["masks"].flatten(1).any(dim=1).all()
    _, (pointed, *_) = build("keypointrcnn_resnet50_fpn", "train", size=64)[0].make_batch(1)
    assert pointed["keypoints"].shape == (len(pointed["boxes"]), 17, 3)
    assert set(pointed["labels"].tolist()) == {1}


def test_an_ssd_has_a_fixed_size_and_needs_two_samples() -> None:
    with pytest.raises(RequestError, match="the smallest is 320"):
        build("ssdlite320_mobilenet_v3_large", size=64)
    workload, _ = build("ssdlite320_mobilenet_v3_large", "train")
    assert workload.smallest_size() == 2
    assert workload.step(workload.make_batch(2)).isfinite()


def test_a_detection_model_refuses_half_precision_weights() -> None:
    with pytest.raises(RequestError, match=r"--dtype bfloat16: .*leave --dtype out"):
        build("fcos_resnet50_fpn", size=64, dtype="bfloat16")


@pytest.mark.parametrize("name", ["raft_small", "quantized_resnet18", "resnet18_no"])
def test_models_without_batches_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"py:FILE:FACTORY|torchvision has no such model; did you mean"):
        build(f"torchvision:{name}")


def test_a_batch_too_small_for_batch_norm_is_noted_and_skipped() -> None:
    workload, notes = build("resnet18", "train", size=32)
    assert workload.smallest_size() == 2
    assert "at least 2 samples" in notes[0]
    workload.step(workload.make_batch(2))
    assert build("resnet18", "train", size=33)[0].smallest_size() == 1


def test_building_uses_the_random_generator_like_the_plain_constructor() -> None:
    torch.manual_seed(3)
    plain = torchvision.models.resnet18()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    workload, _ = build("resnet18", "train", size=64)
    workload.make_batch(2)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(workload.modules()[0].state_dict()["conv1.weight"], plain.conv1.weight)


def test_half_precision_is_weight_dtype_in_forward_and_autocast_in_training() -> None:
    forward, _ = build("squeezenet1_1", size=32, dtype="bfloat16")
    assert forward.make_batch(1).dtype == torch.bfloat16
    assert forward.step(forward.make_batch(1)).dtype == torch.bfloat16
    train, _ = build("squeezenet1_1", "train", size=32, dtype="float16")
    assert train.make_batch(1)[0].dtype == torch.float32
    assert len(train.stateful()) == 1
    train.step(train.make_batch(1))
    assert all(train.optimizers()[0].state[parameter] for parameter in train.modules()[0].parameters())


def test_gradient_checkpointing_is_noted() -> None:
    workload, notes = build("squeezenet1_1", "train", size=32, gradient_checkpointing=True)
    assert "gradient checkpointing: 8 blocks" in notes[0]
    workload.step(workload.make_batch(1))
