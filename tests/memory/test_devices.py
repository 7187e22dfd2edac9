"""What memory is on each kind of device; CUDA and MPS through stand-ins for torch's own functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brim.errors import RequestError
from brim.memory import devices
from brim.memory.devices import (
    DEFAULT_MARGIN,
    CpuMemory,
    CudaMemory,
    DeviceMemory,
    MpsMemory,
    as_current,
    memory_of,
    resolve_limit,
)

GIB = 2**30
CUDA = torch.device("cuda", 0)


def test_the_kind_of_a_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(memory_of("cpu"), CpuMemory)
    assert isinstance(memory_of(torch.device("mps")), MpsMemory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert memory_of("cuda").device == torch.device("cuda", 3)
    assert memory_of("cuda:1").device == torch.device("cuda", 1)


def test_a_device_that_cannot_be_measured_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="device meta: brim measures memory on cpu, cuda, mps only"):
        memory_of("meta")


def test_only_a_cuda_device_is_made_cudas_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(device))
    second = torch.device("cuda", 1)
    with as_current(second) as chosen, as_current(torch.device("cpu")) as other:
        assert (chosen, other) == (second, None)


def test_the_cpu_reads_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_host_bytes", lambda: 5 * GIB)
    memory = memory_of("cpu")
    assert memory.total_bytes() == memory.available_bytes() == 5 * GIB
    assert memory.used_by_others_bytes() == 0


def test_the_cpu_meters_with_what_is_resident() -> None:
    memory, resident = memory_of("cpu"), torch.zeros(256)
    assert memory.resident_bytes([resident, resident[:2]]) == 1024
    with memory.metered([resident]) as reading:
        torch.zeros(512)
    assert reading.peak_allocated_bytes == reading.peak_reserved_bytes == 3 * 1024
    assert reading.alloc_retries == 0


def test_a_reading_is_final_even_if_the_block_raises() -> None:
    memory = memory_of("cpu")
    with contextlib.suppress(torch.OutOfMemoryError), memory.limited(3 * 1024), memory.metered() as reading:
        kept = torch.zeros(512)
        torch.cat([kept, kept])
        pytest.fail("the limit did not hold")
    assert reading.peak_allocated_bytes == 2 * 1024


def test_the_cpu_limit_holds_inside_only_and_nests() -> None:
    memory = memory_of("cpu")

    def fits() -> bool:
        try:
            with memory.metered():
                torch.zeros(512)
        except torch.OutOfMemoryError:
            return False
        return True

    with memory.limited(4096):
        assert fits()
        with contextlib.suppress(ValueError), memory.limited(1024):
            assert not fits()
            raise ValueError
        assert fits()
    assert fits()


def test_repeats_are_timed_together() -> None:
    calls: list[int] = []
    assert memory_of("cpu").timed(lambda: calls.append(1), repeats=4) >= 0
    assert len(calls) == 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A card of 80 GiB: 30 GiB free, 8 GiB reserved by this process."""
    card = SimpleNamespace(fraction=0.9, retries=2, reset=0, emptied=0)
    functions: dict[str, Callable[..., Any]] = {
        "mem_get_info": lambda device: (30 * GIB, 80 * GIB),
        "memory_reserved": lambda device: 8 * GIB,
        "memory_allocated": lambda device: 6 * GIB,
        "max_memory_allocated": lambda device: 7 * GIB,
        "max_memory_reserved": lambda device: 9 * GIB,
        "memory_stats": lambda device: {"num_alloc_retries": card.retries},
        "reset_peak_memory_stats": lambda device: setattr(card, "reset", card.reset + 1),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: setattr(card, "emptied", card.emptied + 1),
        "get_per_process_memory_fraction": lambda device: card.fraction,
        "set_per_process_memory_fraction": lambda fraction, device: setattr(card, "fraction", fraction),
        "get_device_properties": lambda device: SimpleNamespace(uuid="1234"),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function, raising=False)
    return card


def test_cuda_counts_what_is_free_and_what_it_holds_already(cuda: SimpleNamespace) -> None:
    memory = CudaMemory(CUDA)
    assert memory.total_bytes() == 80 * GIB
    assert memory.available_bytes() == 38 * GIB
    assert memory.resident_bytes([torch.zeros(4)]) == 6 * GIB


def test_cuda_keeps_the_part_of_the_card_that_the_program_has_set(cuda: SimpleNamespace) -> None:
    memory = CudaMemory(CUDA)
    cuda.fraction = 0.25
    assert memory.available_bytes() == 20 * GIB
    assert resolve_limit(memory, asked_bytes=40 * GIB, margin=None).usable_bytes == 20 * GIB
    assert memory.left_by_others_bytes() == 38 * GIB


def test_cuda_limits_by_a_fraction_and_puts_the_old_one_back(cuda: SimpleNamespace) -> None:
    memory = CudaMemory(CUDA)
    with contextlib.suppress(ValueError), memory.limited(20 * GIB):
        assert cuda.fraction == 0.25
        raise ValueError
    assert cuda.fraction == 0.9
    with memory.limited(100 * GIB):
        assert cuda.fraction == 1.0


def test_cuda_reads_peaks_and_the_retries_of_the_block_alone(cuda: SimpleNamespace) -> None:
    with CudaMemory(CUDA).metered() as reading:
        assert cuda.reset == 1
        cuda.retries = 5
    assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes) == (7 * GIB, 9 * GIB)
    assert reading.alloc_retries == 3


def test_a_lost_card_does_not_hide_the_error_that_lost_it(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: torch.device) -> int:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"), CudaMemory(CUDA).metered():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_cuda_asks_nvml_for_its_own_card_by_uuid(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def reading(**arguments: Any) -> SimpleNamespace:
        asked.update(arguments)
        return SimpleNamespace(used_by_others_bytes=3 * GIB)

    monkeypatch.setattr(devices, "nvml_device_memory", reading)
    assert CudaMemory(CUDA).used_by_others_bytes() == 3 * GIB
    assert asked["device_uuid"] == "GPU-1234"
    monkeypatch.setattr(devices, "nvml_device_memory", lambda **arguments: None)
    assert CudaMemory(CUDA).used_by_others_bytes() == 0


def test_releasing_empties_the_cache(cuda: SimpleNamespace) -> None:
    CudaMemory(CUDA).release()
    assert cuda.emptied == 1


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Mac that recommends 16 GiB to Metal, with 4 GiB allocated and 10 GiB of host memory free."""
    mac = SimpleNamespace(fraction=1.0, synchronized=0, emptied=0)
    functions: dict[str, Callable[..., Any]] = {
        "recommended_max_memory": lambda: 16 * GIB,
        "driver_allocated_memory": lambda: 4 * GIB,
        "current_allocated_memory": lambda: 3 * GIB,
        "set_per_process_memory_fraction": lambda fraction: setattr(mac, "fraction", fraction),
        "synchronize": lambda: setattr(mac, "synchronized", mac.synchronized + 1),
        "empty_cache": lambda: setattr(mac, "emptied", mac.emptied + 1),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.mps, name, function)
    monkeypatch.setattr(devices, "available_host_bytes", lambda: 10 * GIB)
    return mac


def test_mps_shares_the_host_memory(mps: SimpleNamespace) -> None:
    memory = memory_of("mps")
    assert (memory.total_bytes(), memory.available_bytes()) == (16 * GIB, 14 * GIB)
    assert memory.resident_bytes() == 3 * GIB


def test_mps_limits_meters_and_releases(mps: SimpleNamespace) -> None:
    memory = memory_of("mps")
    with memory.limited(4 * GIB):
        assert mps.fraction == 0.25
    assert mps.fraction == 1.0
    with memory.metered() as reading:
        pass
    assert reading.peak_allocated_bytes == reading.peak_reserved_bytes == 4 * GIB
    assert mps.synchronized == 1
    memory.release()
    assert mps.emptied == 1
    assert memory.timed(lambda: None, repeats=2) >= 0
    assert mps.synchronized == 3


pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

GIB = 2**30


class Card(DeviceMemory):
    """A card of 24 GiB of which some is free."""

    def __init__(self, available: int = 20 * GIB) -> None:
        super().__init__(torch.device("cuda", 0))
        self.available = available

    def total_bytes(self) -> int:
        return 24 * GIB

    def available_bytes(self) -> int:
        return self.available

    def limited(self, limit_bytes: int) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def metered(self, resident: Iterable[torch.Tensor] = ()) -> contextlib.AbstractContextManager[Any]:
        raise NotImplementedError

    def resident_bytes(self, resident: Iterable[torch.Tensor] = ()) -> int:
        raise NotImplementedError

    def timed(self, function: Callable[[], Any], *, repeats: int) -> float:
        raise NotImplementedError


def test_without_a_limit_what_is_free_is_used_less_a_margin() -> None:
    limit = resolve_limit(Card(), asked_bytes=None, margin=None)
    assert limit.usable_bytes == int(20 * GIB * (1 - DEFAULT_MARGIN))
    assert (limit.margin, limit.explicit) == (0.05, False)


def test_a_limit_asked_for_is_taken_as_given() -> None:
    limit = resolve_limit(Card(), asked_bytes=10 * GIB, margin=None)
    assert (limit.usable_bytes, limit.margin, limit.explicit) == (10 * GIB, 0.0, True)


@pytest.mark.parametrize(("asked", "usable"), [(None, 15 * GIB), (8 * GIB, 6 * GIB)])
def test_a_margin_asked_for_is_taken_off(asked: int | None, usable: int) -> None:
    assert resolve_limit(Card(), asked_bytes=asked, margin=0.25).usable_bytes == usable


def test_a_limit_above_what_is_free_shrinks_to_it() -> None:
    assert resolve_limit(Card(available=4 * GIB), asked_bytes=10 * GIB, margin=None).usable_bytes == 4 * GIB


def test_a_limit_above_the_card_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"--memory-limit 25.0 GiB: cuda:0 has 24.0 GiB; give a smaller limit"):
        resolve_limit(Card(), asked_bytes=25 * GIB, margin=None)
    assert resolve_limit(Card(available=24 * GIB), asked_bytes=24 * GIB, margin=None).usable_bytes == 24 * GIB
