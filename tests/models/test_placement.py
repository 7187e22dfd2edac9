from __future__ import annotations

import pytest
import torch

from brim.errors import RequestError
from brim.models.placement import Precision, resolve_device, resolve_precision

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("two_cuda_devices")
def test_auto_and_cuda_follow_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(resolve_device("auto")) == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(resolve_device("auto")) == "cuda:1"
    assert str(resolve_device("cuda")) == "cuda:1"
    assert str(resolve_device("cuda:0")) == "cuda:0"
    assert str(resolve_device("cpu")) == "cpu"


@pytest.mark.usefixtures("two_cuda_devices")
def test_a_rank_that_sees_one_device_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert str(resolve_device("auto")) == "cuda:0"


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize("rank", ["2", "-1", "first"])
def test_a_rank_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(RequestError, match=f"LOCAL_RANK={rank}: there are 2 CUDA devices"):
        resolve_device("auto")


@pytest.mark.usefixtures("two_cuda_devices")
def test_an_unknown_device_index_is_refused_with_those_present() -> None:
    with pytest.raises(RequestError, match=r"--device cuda:2: .*here: cpu, cuda:0, cuda:1"):
        resolve_device("cuda:2")


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator_auto_is_the_cpu_and_the_others_are_refused() -> None:
    assert str(resolve_device("auto")) == "cpu"
    for text in ("cuda", "cuda:0", "mps"):
        with pytest.raises(RequestError, match=f"--device {text}: there is no such device; here: cpu"):
            resolve_device(text)


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "CPU"])
def test_text_that_names_no_device_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="it must be auto, cpu, cuda, cuda:N or mps"):
        resolve_device(text)


def test_half_precision_is_autocast_in_training_only() -> None:
    assert resolve_precision("float16", "forward") == Precision(weights=torch.float16)
    assert resolve_precision("bfloat16", "generate") == Precision(weights=torch.bfloat16)
    half = resolve_precision("float16", "train")
    assert half == Precision(weights=torch.float32, autocast=torch.float16, scaled=True)
    brain = resolve_precision("bfloat16", "train")
    assert brain == Precision(weights=torch.float32, autocast=torch.bfloat16, scaled=False)


def test_auto_is_the_models_own_dtype_and_float32_in_training() -> None:
    assert resolve_precision("auto", "forward") == Precision(weights=None)
    assert resolve_precision("auto", "train") == Precision(weights=torch.float32)


def test_an_unknown_dtype_gets_the_nearest_name() -> None:
    with pytest.raises(RequestError, match=r"--dtype float: .*did you mean float"):
        resolve_precision("float", "forward")
