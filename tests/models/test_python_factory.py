from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.models.build import build_workload, model_knobs
from brim.settings.find_settings import WorkloadRequest
from brim.workloads.base import Workload

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

SOURCE = """
import torch
from torch import nn
from brim.workloads.inference import ForwardWorkload

def workload(width=8, depth: int = 1, *, device, dtype=None, mode="forward"):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).to(device, dtype)
    return ForwardWorkload(
        model=model, make_batch=lambda n: torch.zeros(n, width, device=device, dtype=dtype), device=device
    )

def pair(width=4):
    return (lambda batch: batch * 2), (lambda n: torch.zeros(n, width))

def dictionary(device, scale=0.5, fast=False):
    model = nn.Linear(2, 2)
    return {
        "step": model, "make_batch": lambda n: torch.full((n, 2), scale), "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "largest_size": 64,
    }

def received(*, device, dtype, mode, optimizer, gradient_checkpointing):
    seen = (device, dtype, mode, optimizer, gradient_checkpointing)
    return {"step": lambda batch: seen, "make_batch": lambda n: torch.zeros(n), "mode": mode}

def raises(width=4):
    raise ValueError("width must be even")

def wrong():
    return 42

def unknown_key():
    return {"step": print, "make_batch": print, "colour": "red"}

def incomplete():
    return {"step": print}

def demands(folder):
    return folder

constant = 3
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    file = tmp_path / "nets.py"
    file.write_text(SOURCE)
    return f"py:{file}"


def build(model: str, **options: Any) -> Workload:
    return build_workload(WorkloadRequest(model=model, **{"device": "cpu", **options}))[0]


def test_parameters_with_a_default_are_the_knobs(nets: str) -> None:
    assert [(knob.name, knob.default) for knob in model_knobs(f"{nets}:workload")] == [("width", 8), ("depth", 1)]
    assert [(knob.name, knob.default) for knob in model_knobs(f"{nets}:dictionary")] == [
        ("scale", 0.5),
        ("fast", False),
    ]


def test_knobs_are_parsed_by_the_type_of_their_default(nets: str) -> None:
    workload = build(f"{nets}:workload", knobs={"width": "16"})
    assert workload.make_batch(3).shape == (3, 16)
    with pytest.raises(RequestError, match="--knob width=wide: it must be a whole number"):
        build(f"{nets}:workload", knobs={"width": "wide"})
    with pytest.raises(RequestError, match=r"--knob widht: .*did you mean width"):
        build(f"{nets}:workload", knobs={"widht": 3})


def test_a_workload_a_pair_and_a_dictionary_are_all_taken(nets: str) -> None:
    assert build(f"{nets}:workload").mode == "forward"
    pair = build(f"{nets}:pair")
    assert pair.batch_length(pair.make_batch(3)) == 3
    dictionary = build(f"{nets}:dictionary")
    assert dictionary.mode == "train"
    assert dictionary.largest_size() == 64
    assert len(dictionary.modules()) == len(dictionary.optimizers()) == 1


def test_the_values_of_the_request_are_passed_on(nets: str) -> None:
    workload = build(f"{nets}:received", mode="train", dtype="bfloat16", optimizer="sgd", gradient_checkpointing=True)
    assert workload.step(None) == (torch.device("cpu"), torch.bfloat16, "train", "sgd", True)
    defaults = build(f"{nets}:received")
    assert defaults.step(None) == (torch.device("cpu"), None, "forward", "adamw", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "--dtype float16: py:.* has no parameter 'dtype'"),
        ({"optimizer": "sgd"}, "--optimizer sgd: py:.* has no parameter 'optimizer'"),
        ({"gradient_checkpointing": True}, "--gradient-checkpointing: py:.* has no parameter"),
        ({"mode": "train"}, "--mode train: py:.* made a forward workload"),
    ],
)
def test_a_setting_the_factory_would_ignore_is_refused(nets: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(f"{nets}:pair", **options)


def test_a_factory_that_raises_is_named_with_file_and_line(nets: str) -> None:
    line = SOURCE.splitlines().index('    raise ValueError("width must be even")') + 1
    with pytest.raises(RequestError, match=f"factory raised ValueError: width must be even .*nets.py:{line}") as caught:
        build(f"{nets}:raises")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("wrong", "the factory returned int; it must return a brim Workload, a pair"),
        ("unknown_key", "a dictionary with unknown colour; it takes step, make_batch, model"),
        ("incomplete", "a dictionary with no make_batch"),
        ("demands", "the factory wants folder; give them defaults"),
        ("constant", "constant is not callable; .* has workload, pair"),
        ("dictionry", "dictionry does not exist; .*did you mean dictionary"),
    ],
)
def test_an_unknown_factory_is_refused_with_the_functions_present(nets: str, factory: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(f"{nets}:{factory}")


def test_a_missing_file_or_module_is_refused(nets: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"there is no file .*net\.py; did you mean nets\.py"):
        build(f"py:{tmp_path / 'net.py'}:pair")
    with pytest.raises(RequestError, match=r"No module named 'no_such_module'; for a file write py:no_such_module\.py"):
        build("py:no_such_module:net")
    with pytest.raises(RequestError, match="write it as py:FILE_OR_MODULE:FACTORY"):
        build("py:nets")


@pytest.mark.parametrize(
    ("source", "message"),
    [("def f(:\n", "SyntaxError: .*broken.py:1"), ("1 / 0\n", "ZeroDivisionError: .*broken.py:1")],
)
def test_a_file_that_does_not_import_is_refused_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(RequestError, match=f"importing .* raised {message}"):
        build(f"py:{tmp_path / 'broken.py'}:f")


def test_a_file_can_import_its_neighbours_and_an_edited_file_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_main.py").write_text("WIDTH = 5\n")
    file = tmp_path / "main.py"
    file.write_text(
        "import torch\nfrom neighbour_of_main import WIDTH\ndef net():\n"
        "    return print, lambda n: torch.zeros(n, WIDTH)\n"
    )
    first = build(f"py:{file}:net")
    assert first.make_batch(1).shape == (1, 5)
    file.write_text(file.read_text().replace("zeros(n, WIDTH)", "zeros(n, WIDTH + 1)"))
    second = build(f"py:{file}:net")
    assert second.make_batch(1).shape == (1, 6)
    assert first.identity() != second.identity()


def test_identity_follows_knobs_and_mode_and_is_stable(nets: str) -> None:
    one, again = build(f"{nets}:workload"), build(f"{nets}:workload")
    wide = build(f"{nets}:workload", knobs={"width": 16})
    assert one.identity() == again.identity() != wide.identity()


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(("factory", "knobs"), [("convnet", {"size": 16}), ("transformer", {"tokens": 8})])
def test_the_built_in_small_models_run_and_train(factory: str, knobs: dict[str, int], mode: str) -> None:
    workload = build(f"py:brim.models.small:{factory}", mode=mode, knobs=knobs)
    assert workload.mode == mode
    assert workload.batch_length(workload.make_batch(3)) == 3
    workload.step(workload.make_batch(3))
    identity = workload.identity()
    assert identity is not None
    assert 100_000 < identity["parameters"] < 1_000_000


@pytest.mark.parametrize("factory", ["convnet", "transformer"])
def test_small_models_support_checkpointing_and_half_precision(factory: str) -> None:
    model = f"py:brim.models.small:{factory}"
    workload = build(model, mode="train", dtype="bfloat16", gradient_checkpointing=True, optimizer="sgd")
    workload.step(workload.make_batch(2))
    half = build(model, dtype="bfloat16")
    assert half.step(half.make_batch(2)).dtype == torch.bfloat16
