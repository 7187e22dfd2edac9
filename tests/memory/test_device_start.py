"""What is started on a device in a thread; no GPU: the thread's calls are watched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.memory.device_start import load_libraries

# Before torch 2.8, a tensor without data on a GPU that is not here asks the driver.
FAKE_CUDA = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that are used, where the second is the caller's current one."""
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        devices.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", device)
    return devices


def test_libraries_load_on_the_callers_device(used: list[torch.device]) -> None:
    """A thread begins with the first device, on which another rank may have no room for this one's context."""
    load_libraries(torch.device("cuda"), torch.float32, [nn.Linear(2, 2)])()
    load_libraries(torch.device("cuda", 2), torch.float32, [nn.Conv2d(1, 1, 1)])()
    assert used == [torch.device("cuda", 1), torch.device("cuda", 2)]


def test_nothing_is_loaded_for_the_cpu(used: list[torch.device]) -> None:
    load_libraries(torch.device("cpu"), torch.float32, [nn.Linear(2, 2)])()
    assert used == []


@pytest.mark.skipif(not FAKE_CUDA, reason="needs torch 2.8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_run_to_load_them_is_valid(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the thread is not seen: nothing would be loaded."""
    cleared: list[bool] = []
    monkeypatch.setattr("brim.memory.device_start._in_thread", lambda start: start)
    monkeypatch.setattr(torch.cuda, "device", lambda chosen: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(True), raising=False)
    layers = nn.ModuleList([nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1)])
    with FakeTensorMode():
        load_libraries(torch.device("cuda", 0), dtype, [layers])()
    assert cleared == [True]
