from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from brim.errors import RequestError
from brim.models.build import build_from_json, build_workload, model_knobs
from brim.settings.find_settings import WorkloadRequest

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

CONVNET = "py:brim.models.small:convnet"


def request(**options: Any) -> WorkloadRequest:
    return WorkloadRequest(**{"model": "squeezenet1_1", "knobs": {"size": 32}, "device": "cpu", **options})


def test_a_request_survives_json() -> None:
    first = request(mode="train", dtype="bfloat16", optimizer="sgd", gradient_checkpointing=True)
    assert WorkloadRequest.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_the_workload_rebuilt_from_json_has_the_same_identity() -> None:
    first, _ = build_workload(request(mode="train"))
    again = build_from_json(json.loads(json.dumps(request(mode="train").to_json())))
    assert first.identity() == again.identity()


@pytest.mark.parametrize("data", [{"model": "resnet18", "mod": "train"}, {"mode": "train"}])
def test_invalid_json_is_refused(data: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=r"unknown field 'mod'; did you mean mode|field model is missing"):
        WorkloadRequest.from_json(data)


def test_identity_is_json_and_differs_between_workloads() -> None:
    asked = [
        request(),
        request(mode="train"),
        request(mode="train", optimizer="sgd"),
        request(mode="train", gradient_checkpointing=True),
        request(dtype="bfloat16"),
        request(knobs={"size": 40}),
    ]
    identities = [json.dumps(build_workload(each)[0].identity(), sort_keys=True) for each in asked]
    assert len(set(identities)) == len(identities)
    assert '"model": "torchvision:squeezenet1_1"' in identities[0]


def test_the_optimizers_case_does_not_change_the_identity() -> None:
    lower, _ = build_workload(request(mode="train", optimizer="sgd"))
    upper, _ = build_workload(request(mode="train", optimizer="SGD"))
    assert lower.identity() == upper.identity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eval"}, "--mode eval: it must be one of forward, generate, train"),
        ({"mode": "generate"}, "--mode generate: torchvision:squeezenet1_1 is an image or video model"),
        ({"dtype": "int8"}, "--dtype int8: it must be one of auto, float32"),
        ({"device": "tpu"}, "--device tpu: it must be auto, cpu"),
        ({"optimizer": "adamx"}, "--optimizer adamx: .*did you mean"),
        ({"gradient_checkpointing": True}, "--gradient-checkpointing has no effect in mode forward; add --mode train"),
        ({"knobs": {"sise": 3}}, "--knob sise: .*did you mean size"),
        ({"model": "squeezenet"}, "MODEL 'squeezenet': .*did you mean .*squeezenet1_1"),
    ],
)
def test_a_wrong_request_is_refused_with_argument_value_and_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_workload(request(**options))


def test_knobs_are_listed_without_building() -> None:
    assert [knob.name for knob in model_knobs("vit_base")] == ["size"]
    assert [knob.name for knob in model_knobs(CONVNET)] == ["size"]


def test_importing_the_layer_imports_no_vendor_library() -> None:
    code = (
        "import sys, brim.models.build, brim.models.small\n"
        "print([name for name in ('torchvision', 'timm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
