"""What memory is on each kind of device: reading it, limiting it, and giving it back.

One class per kind behind one small interface, `DeviceMemory`. Nothing here knows of probes or plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from brim.errors import RequestError
from brim.memory.storage_meter import StorageMeter
from brim.monitor.host import available_host_bytes
from brim.monitor.nvml import device_memory as nvml_device_memory
from brim.settings.caller import written
from brim.settings.sizes import format_bytes

__all__ = [
    "DEFAULT_MARGIN",
    "CpuMemory",
    "CudaMemory",
    "DeviceMemory",
    "MemoryLimit",
    "MemoryReading",
    "ModelMemory",
    "MpsMemory",
    "as_current",
    "device_name",
    "device_uuid",
    "existing_device",
    "memory_of",
    "resolve_limit",
]


@dataclasses.dataclass(kw_only=True)
class MemoryReading:
    """Filled in while metered code runs; final once the `metered` block has ended."""

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    alloc_retries: int = 0


class DeviceMemory(ABC):
    """The memory of one device, as one process sees it."""

    exact: bool  # whether the same step always reads the same bytes
    meter_slows: bool  # whether timings must be taken outside `metered`
    counts_retries = False  # whether the allocator frees its cache and tries again, and counts that

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def total_bytes(self) -> int:
        """What the device has."""

    @abstractmethod
    def available_bytes(self) -> int:
        """What this process could use now: what is free, and what it holds already."""

    @abstractmethod
    def limited(self, limit_bytes: int) -> contextlib.AbstractContextManager[None]:
        """While inside, allocating past the limit raises `torch.OutOfMemoryError`."""

    @abstractmethod
    def metered(self, resident: Iterable[torch.Tensor] = ()) -> contextlib.AbstractContextManager[MemoryReading]:
        """Measure what runs inside; `resident` tensors exist already and count."""

    @abstractmethod
    def resident_bytes(self, resident: Iterable[torch.Tensor] = ()) -> int:
        """What is in use before a step."""

    def in_use_bytes(self) -> int:
        """What tensors take at this moment, inside `metered`; 0 where that cannot be read."""
        return 0

    def used_by_others_bytes(self) -> int:
        """What other processes hold on the same device, 0 where that cannot be seen."""
        return 0

    def left_by_others_bytes(self) -> int | None:
        """What other processes leave of the device now, whether this one uses it or not; None: not known."""
        return None

    def release(self, *, thorough: bool = True) -> None:
        """Give back everything that nothing refers to any more.

        Call it after the `except` block of an out-of-memory error has ended: inside, the traceback
        still pins the tensors of the failed step. `thorough` also finds old reference cycles, which a
        failed step leaves and a finished one does not; with a large library loaded that takes 0.2 s.
        """
        gc.collect(2 if thorough else 1)

    @abstractmethod
    def timed(self, function: Callable[[], Any], *, repeats: int) -> float:
        """Seconds for all repeats, the device's queue drained at both ends."""

    def timed_each(self, function: Callable[[], Any], *, repeats: int) -> list[float]:
        """Seconds of every repeat; a device with a queue gets them all before the first is waited for."""
        return [self.timed(function, repeats=1) for _ in range(repeats)]


class CudaMemory(DeviceMemory):
    """CUDA through its caching allocator."""

    exact = False
    meter_slows = False
    counts_retries = True

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    def available_bytes(self) -> int:
        return min(self.left_by_others_bytes(), int(self._fraction() * self.total_bytes()))

    def used_by_others_bytes(self) -> int:
        own = torch.cuda.memory_reserved(self.device)
        reading = nvml_device_memory(device_uuid=device_uuid(self.device), own_bytes=own)
        return reading.used_by_others_bytes if reading is not None else 0

    def left_by_others_bytes(self) -> int:
        free = int(torch.cuda.mem_get_info(self.device)[0])
        return free + torch.cuda.memory_reserved(self.device)

    def _fraction(self) -> float:
        """The part of the card that this process may reserve, as its owner or a limit of ours has set it."""
        read: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch >= 2.7
        return 1.0 if read is None else float(read(self.device))

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        before = self._fraction()
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / self.total_bytes(), 1.0), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    @contextlib.contextmanager
    def metered(self, resident: Iterable[torch.Tensor] = ()) -> Iterator[MemoryReading]:
        del resident  # the allocator counts them, on the host: nothing has to be waited for
        reading = MemoryReading()
        torch.cuda.reset_peak_memory_stats(self.device)
        retries_before = self._retries()
        try:
            yield reading
        finally:
            with contextlib.suppress(RuntimeError):  # a lost device cannot answer; the step's own error says so
                reading.peak_allocated_bytes = torch.cuda.max_memory_allocated(self.device)
                reading.peak_reserved_bytes = torch.cuda.max_memory_reserved(self.device)
                reading.alloc_retries = self._retries() - retries_before

    def resident_bytes(self, resident: Iterable[torch.Tensor] = ()) -> int:
        del resident
        return self.in_use_bytes()

    def in_use_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def release(self, *, thorough: bool = True) -> None:
        super().release(thorough=thorough)
        torch.cuda.empty_cache()

    def timed(self, function: Callable[[], Any], *, repeats: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self.device):
            start.record()
            for _ in range(repeats):
                function()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0

    def timed_each(self, function: Callable[[], Any], *, repeats: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        with torch.cuda.device(self.device):
            events[0].record()
            for event in events[1:]:
                function()
                event.record()
        events[-1].synchronize()
        return [float(before.elapsed_time(after)) / 1000.0 for before, after in itertools.pairwise(events)]

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


class CpuMemory(DeviceMemory):
    """Host memory through the dispatch-level meter; see `StorageMeter` for what it bounds and what not."""

    exact = True
    meter_slows = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._limit_bytes: int | None = None
        self._meter: StorageMeter | None = None

    def total_bytes(self) -> int:
        return available_host_bytes()

    def available_bytes(self) -> int:
        return available_host_bytes()

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        before, self._limit_bytes = self._limit_bytes, limit_bytes
        try:
            yield
        finally:
            self._limit_bytes = before
            if self._meter is not None:  # Ctrl-C came between its start and the block that ends it
                self._meter.off()

    @contextlib.contextmanager
    def metered(self, resident: Iterable[torch.Tensor] = ()) -> Iterator[MemoryReading]:
        reading = MemoryReading()
        meter = StorageMeter(limit_bytes=self._limit_bytes)
        meter.track(resident)
        self._meter = meter
        try:
            with meter:
                yield reading
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if meter.refusal is None:
                raise
            # TorchScript passes a refusal on as an error of its own, without our type or words.
            raise torch.OutOfMemoryError(meter.refusal) from error
        finally:
            meter.off()
            self._meter = None
            reading.peak_allocated_bytes = reading.peak_reserved_bytes = meter.peak_bytes

    def resident_bytes(self, resident: Iterable[torch.Tensor] = ()) -> int:
        meter = StorageMeter()
        meter.track(resident)
        return meter.current_bytes

    def in_use_bytes(self) -> int:
        return 0 if self._meter is None else self._meter.current_bytes

    def timed(self, function: Callable[[], Any], *, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return time.perf_counter() - start


class MpsMemory(DeviceMemory):
    """Apple's Metal back end: it keeps no peak, so the memory held after a step is used instead."""

    exact = False
    meter_slows = False

    def total_bytes(self) -> int:
        return int(torch.mps.recommended_max_memory())

    def available_bytes(self) -> int:
        return min(self.total_bytes(), available_host_bytes() + int(torch.mps.driver_allocated_memory()))

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        torch.mps.set_per_process_memory_fraction(min(limit_bytes / self.total_bytes(), 1.0))
        try:
            yield
        finally:
            torch.mps.set_per_process_memory_fraction(1.0)

    @contextlib.contextmanager
    def metered(self, resident: Iterable[torch.Tensor] = ()) -> Iterator[MemoryReading]:
        del resident
        reading = MemoryReading()
        try:
            yield reading
        finally:
            torch.mps.synchronize()
            reading.peak_allocated_bytes = int(torch.mps.driver_allocated_memory())
            reading.peak_reserved_bytes = reading.peak_allocated_bytes

    def resident_bytes(self, resident: Iterable[torch.Tensor] = ()) -> int:
        del resident
        return self.in_use_bytes()

    def in_use_bytes(self) -> int:
        return int(torch.mps.current_allocated_memory())

    def release(self, *, thorough: bool = True) -> None:
        super().release(thorough=thorough)
        torch.mps.empty_cache()

    def timed(self, function: Callable[[], Any], *, repeats: int) -> float:
        torch.mps.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        torch.mps.synchronize()
        return time.perf_counter() - start


_KINDS: dict[str, type[DeviceMemory]] = {"cpu": CpuMemory, "cuda": CudaMemory, "mps": MpsMemory}


def as_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """While inside, the device is CUDA's current one, as torch's workers, generators and others' kernels expect."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def device_name(device: torch.device) -> str:
    """The device as people know it: `NVIDIA H200`, `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_uuid(device: torch.device) -> str | None:
    """The card's uuid as the driver knows it; None for anything but CUDA, and where torch does not say."""
    if device.type != "cuda":
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "")
    return f"GPU-{uuid}" if uuid else None


def existing_device(device: Any, *, argument: str) -> torch.device:
    """The device that a Python caller named by `argument`; one that is not here is a `RequestError`."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"{argument}{device!r}: give a device such as 'cpu', 'cuda' or 'cuda:0'") from error
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    absent = found.type == "mps" and not torch.backends.mps.is_available()
    if absent or (found.type == "cuda" and (found.index or 0) >= cards):
        here = ["cpu", *(f"cuda:{index}" for index in range(cards))]
        here += ["mps"] if torch.backends.mps.is_available() else []
        raise RequestError(f"{argument}{str(found)!r}: there is no such device; here: {', '.join(here)}")
    return found


def memory_of(device: torch.device | str) -> DeviceMemory:
    """The memory of a device; a kind that brim cannot measure is a `RequestError`."""
    device = torch.device(device)
    if device.type not in _KINDS:
        raise RequestError(f"device {device}: brim measures memory on {', '.join(_KINDS)} only")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _KINDS[device.type](device)


# Kept free when the user names no limit: others on the card, and the allocator, move a little.
DEFAULT_MARGIN = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The bytes a workload may use, margin already taken off."""

    usable_bytes: int
    margin: float
    explicit: bool  # the user named the limit


def resolve_limit(memory: DeviceMemory, *, asked_bytes: int | None, margin: float | None) -> MemoryLimit:
    """The limit asked for, or all that is available now; less the margin.

    A limit that the user names is taken at its word (margin 0 unless given); without one, 5 % of what
    is available stays free, because a card is rarely as empty later as it is now.
    """
    available = memory.available_bytes()
    total = memory.total_bytes()
    if asked_bytes is None:
        margin = DEFAULT_MARGIN if margin is None else margin
        return MemoryLimit(usable_bytes=int(available * (1 - margin)), margin=margin, explicit=False)
    if asked_bytes > total:
        raise RequestError(
            f"{written('memory_limit', format_bytes(asked_bytes))}: {memory.device} has {format_bytes(total)}; "
            "give a smaller limit, or leave it out to use what is free"
        )
    margin = 0.0 if margin is None else margin
    return MemoryLimit(usable_bytes=int(min(asked_bytes, available) * (1 - margin)), margin=margin, explicit=True)


class ModelMemory:
    """As the device's own memory, but the model's weights and buffers count in every reading and against the limit.

    On a GPU the allocator counts them anyway; on the CPU the meter must be given them.
    """

    def __init__(self, memory: DeviceMemory, module: Any) -> None:
        self._memory = memory
        self._module = module if isinstance(module, torch.nn.Module) else None

    def metered(self, held: Iterable[torch.Tensor] = ()) -> contextlib.AbstractContextManager[Any]:
        """Measure what runs inside; `held` is there already, beside the model."""
        if self._module is None:
            return self._memory.metered(held)
        return self._memory.metered([*self._module.parameters(), *self._module.buffers(), *held])

    def left_by_others_bytes(self) -> int | None:
        """What other processes leave of the device now; None: not known."""
        return self._memory.left_by_others_bytes()

    def release(self, *, thorough: bool = True) -> None:
        """Give back what nothing refers to any more."""
        self._memory.release(thorough=thorough)
