"""What the NVIDIA driver says about a card: whose memory is in use, how busy, hot and fast it is, what slows it.

The only file that imports pynvml, and only inside a call: importing this starts nothing. It does not know torch,
so callers name a card by its uuid, which `CUDA_VISIBLE_DEVICES` does not renumber. A machine without a
card, a driver or the library is an ordinary answer here (None), never an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "CardFigures",
    "CardRow",
    "DeviceMemoryUse",
    "OpenCard",
    "OpenCards",
    "ProcessMemory",
    "device_memory",
    "driver_version",
    "open_card",
    "processes_on",
]

_Answer = TypeVar("_Answer")

# Bits of the driver's mask of what holds the clocks down.
_THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemoryUse:
    """The memory of one card at one moment, over all processes."""

    total_bytes: int
    used_bytes: int  # by processes; the driver's own reserve is left out where the driver reports it
    used_by_this_process_bytes: int | None  # with its CUDA context; None: the driver does not say (containers)
    used_by_others_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """A process that uses a card, by the number that the driver knows it by (in a container, the host's)."""

    pid: int
    used_bytes: int | None  # None: the driver does not say


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardFigures:
    """One card at one moment; None is what the driver did not say."""

    utilisation: float | None = None  # fraction of the driver's last sample period in which a kernel ran
    memory_used_bytes: int | None = None  # by all processes
    memory_process_bytes: int | None = None
    memory_others_bytes: int | None = None  # unlike `DeviceMemoryUse`: None where this process's own share is unknown
    power_watts: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle_reasons: tuple[str, ...] | None = None  # (): the clocks are held down by nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardRow:
    """One card, or one slice of a card (MIG), with everybody who computes on it; None is what the driver did not say.

    `problem` says in the driver's words why a card cannot be read: it is lost, or the user may not.
    """

    index: int  # the driver's
    uuid: str | None = None
    name: str | None = None
    slice_of: int | None = None  # of a MIG slice: the index of its card, which `index` repeats
    figures: CardFigures = CardFigures()
    memory_total_bytes: int | None = None
    power_limit_watts: float | None = None
    processes: tuple[ProcessMemory, ...] | None = None  # None: the driver does not list them
    problem: str | None = None


class OpenCard:
    """One card with NVML kept open, to be read again and again; `open_card` makes it, `close` ends it.

    Every field is asked for on its own: an error in one leaves the others. A field that the card or its driver does
    not have is not asked for again; one that failed otherwise (a lost card, a time-out) is.
    """

    def __init__(self, nvml: Any, device: Any) -> None:
        self._nvml = nvml
        self._device = device
        self._absent: set[Callable[[Any, Any], Any]] = set()
        self._uuid: str | None = None  # asked for once: a card that is lost later keeps its name
        self._name: str | None = None
        self.problem: str | None = None  # what the driver answered to the last question that failed
        # AttributeError: the binding is older than the field.
        self._means_absent = (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, AttributeError)

    def read(self) -> CardFigures:
        """Ask for everything once; never raises an NVML error."""
        memory = self._ask_for(_memory_info)
        used = None if memory is None else int(memory.used)
        own = _own_bytes(self._ask_for(_compute_processes) or [], None if memory is None else int(memory.total))
        return CardFigures(
            utilisation=self._ask_for(_utilisation),
            memory_used_bytes=used,
            memory_process_bytes=own,
            memory_others_bytes=None if used is None or own is None else max(0, used - own),
            power_watts=self._ask_for(_power_watts),
            sm_clock_mhz=self._ask_for(_sm_clock_mhz),
            memory_clock_mhz=self._ask_for(_memory_clock_mhz),
            temperature_c=self._ask_for(_temperature_c),
            throttle_reasons=self._ask_for(_throttle_reasons),
        )

    def close(self) -> None:
        """Shut this user's NVML down; other users in the process keep theirs."""
        _shut_down(self._nvml)

    def _ask_for(self, field: Callable[[Any, Any], _Answer]) -> _Answer | None:
        if field in self._absent:
            return None
        try:
            return field(self._nvml, self._device)
        except self._means_absent:
            self._absent.add(field)
        except self._nvml.NVMLError as error:
            self.problem = str(error)
        return None

    def slices(self) -> list[tuple[int, Any]]:
        """The handles of the slices (MIG) that the card is divided into, each with its place."""
        return self._ask_for(_slice_handles) or []

    def row(self, index: int, *, slice_of: int | None = None) -> CardRow:
        """Everything that `read` gives, and what is of interest where all users of a card are shown."""
        self.problem = None
        memory = self._ask_for(_memory_info)
        total = None if memory is None else int(memory.total)
        listed = self._ask_for(_compute_processes)
        self._uuid = self._uuid or self._ask_for(_uuid)
        self._name = self._name or self._ask_for(_name)
        return CardRow(
            index=index,
            uuid=self._uuid,
            name=self._name,
            slice_of=slice_of,
            figures=self.read(),
            memory_total_bytes=total,
            power_limit_watts=self._ask_for(_power_limit_watts),
            processes=None if listed is None else _memory_of_processes(listed, total),
            problem=self.problem,
        )


class OpenCards:
    """Every card of this machine, with NVML kept open; never raises an NVML error.

    `problem` says why there are no cards: no library, no driver, no permission.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.driver: str | None = None
        self.cuda_version: str | None = None  # the newest that the driver runs
        self._nvml: Any = None
        self._opened: dict[tuple[int, int | None], OpenCard] = {}  # by index, and place of the slice
        try:
            import pynvml
        except ImportError:
            self.problem = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.problem = str(error)
            return
        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):
            self.driver = _text(pynvml.nvmlSystemGetDriverVersion())
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            self.cuda_version = _cuda_version(int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))

    def read(self) -> list[CardRow]:
        """A row for every card, and one for every slice after its card; one that cannot be opened says why."""
        if self._nvml is None:
            return []
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            self.problem = str(error)
            return []
        rows: list[CardRow] = []
        for index in range(count):
            try:
                card = self._card(index)
                rows.append(card.row(index))
                rows += [slice_card.row(index, slice_of=index) for slice_card in self._slices(index, card)]
            except self._nvml.NVMLError as error:
                rows.append(CardRow(index=index, problem=str(error)))
        return rows

    def close(self) -> None:
        """Shut this user's NVML down."""
        if self._nvml is not None:
            _shut_down(self._nvml)
            self._nvml = None

    def _card(self, index: int) -> OpenCard:
        if (index, None) not in self._opened:
            self._opened[index, None] = OpenCard(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex(index))
        return self._opened[index, None]

    def _slices(self, index: int, card: OpenCard) -> list[OpenCard]:
        """The slices that a card is divided into; none where it is whole, or where nothing is known of slices."""
        found = []
        for place, handle in card.slices():
            if (index, place) not in self._opened:
                self._opened[index, place] = OpenCard(self._nvml, handle)
            found.append(self._opened[index, place])
        return found


def open_card(device_uuid: str | None = None, index: int = 0) -> OpenCard | None:
    """As `device_memory`, but keeps NVML and the card open for many readings; None where there is no such card."""
    nvml = _start()
    if nvml is None:
        return None
    try:
        return OpenCard(nvml, _find_device(nvml, device_uuid, index))
    except nvml.NVMLError:
        _shut_down(nvml)
        return None


def device_memory(
    device_uuid: str | None = None, index: int = 0, *, own_bytes: int | None = None
) -> DeviceMemoryUse | None:
    """The memory in use on a card, or None where it is not known.

    `device_uuid` is `str(torch.cuda.get_device_properties(i).uuid)`, with or without its "GPU-"; an unknown one
    gives None rather than another card. `index` counts the driver's cards and is used only without a uuid.
    Where the driver keeps per-process figures back, `own_bytes` (what this process has reserved) replaces
    them: its CUDA context then counts among the others, and without it everything does.
    """
    return _ask(lambda nvml: _read_memory(nvml, _find_device(nvml, device_uuid, index), own_bytes))


def processes_on(device_uuid: str | None = None, index: int = 0) -> tuple[ProcessMemory, ...]:
    """The processes that compute on a card, named as in `device_memory`; none where the driver does not list them."""

    def read(nvml: Any) -> tuple[ProcessMemory, ...]:
        device = _find_device(nvml, device_uuid, index)
        total = int(_memory_info(nvml, device).total)
        return _memory_of_processes(_compute_processes(nvml, device), total)

    return _ask(read) or ()


def driver_version() -> str | None:
    """The version of the NVIDIA driver, such as "570.86.15", or None without one."""
    return _ask(lambda nvml: _text(nvml.nvmlSystemGetDriverVersion()))


def _ask(question: Callable[[Any], _Answer]) -> _Answer | None:
    """Start NVML, ask, and shut it down again (NVML counts its users, so others in the process are not cut off)."""
    nvml = _start()
    if nvml is None:
        return None
    try:
        return question(nvml)
    except nvml.NVMLError:
        return None
    finally:
        _shut_down(nvml)


def _start() -> Any | None:
    """The library, started; None where it, the driver or a card is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _shut_down(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def _find_device(nvml: Any, device_uuid: str | None, index: int) -> Any:
    if device_uuid is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    bare = device_uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")  # torch gives a slice's uuid without saying that it is one


def _read_memory(nvml: Any, device: Any, own_bytes: int | None) -> DeviceMemoryUse:
    figures = _memory_info(nvml, device)
    total, used = int(figures.total), int(figures.used)
    own = _own_process_bytes(nvml, device, total)
    known_own = own if own is not None else own_bytes or 0
    return DeviceMemoryUse(
        total_bytes=total,
        used_bytes=used,
        used_by_this_process_bytes=own,
        used_by_others_bytes=max(0, used - known_own),  # the figures are not read at the same instant
    )


def _memory_info(nvml: Any, device: Any) -> Any:
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        # Drivers before 510 know only the first form, in which the driver's reserve counts as used.
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetMemoryInfo(device, version=version)
    return nvml.nvmlDeviceGetMemoryInfo(device)


def _own_process_bytes(nvml: Any, device: Any, total_bytes: int) -> int | None:
    try:
        processes = _compute_processes(nvml, device)
    except nvml.NVMLError:
        return None
    return _own_bytes(processes, total_bytes)


def _compute_processes(nvml: Any, device: Any) -> list[Any]:
    return list(nvml.nvmlDeviceGetComputeRunningProcesses(device))


def _memory_of_processes(listed: list[Any], total_bytes: int | None) -> tuple[ProcessMemory, ...]:
    pids = dict.fromkeys(int(process.pid) for process in listed)
    return tuple(ProcessMemory(pid=pid, used_bytes=_bytes_of(pid, listed, total_bytes)) for pid in pids)


def _own_bytes(processes: list[Any], total_bytes: int | None) -> int | None:
    """What this process holds on the card, or None where the driver lists it without a figure or not at all."""
    return _bytes_of(os.getpid(), processes, total_bytes)


def _bytes_of(pid: int, processes: list[Any], total_bytes: int | None) -> int | None:
    most = total_bytes if total_bytes is not None else 2**63 - 1
    figures = [process.usedGpuMemory for process in processes if process.pid == pid]
    # "Not available" is None, or all bits set where the binding does not translate it.
    usable = [int(figure) for figure in figures if figure is not None and 0 <= figure <= most]
    return sum(usable) if usable and len(usable) == len(figures) else None


def _utilisation(nvml: Any, device: Any) -> float:
    return int(nvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100  # from percent; a MIG slice has none


def _power_watts(nvml: Any, device: Any) -> float:
    return int(nvml.nvmlDeviceGetPowerUsage(device)) / 1000  # from milliwatts


def _power_limit_watts(nvml: Any, device: Any) -> float:
    return int(nvml.nvmlDeviceGetEnforcedPowerLimit(device)) / 1000  # from milliwatts


def _uuid(nvml: Any, device: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(device))


def _name(nvml: Any, device: Any) -> str:
    return _text(nvml.nvmlDeviceGetName(device))


def _slice_handles(nvml: Any, device: Any) -> list[tuple[int, Any]]:
    current, _ = nvml.nvmlDeviceGetMigMode(device)  # a card that cannot be divided does not support the question
    if not current:
        return []
    handles = []
    for place in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(device))):
        with contextlib.suppress(nvml.NVMLError):  # no slice at this place
            handles.append((place, nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, place)))
    return handles


def _sm_clock_mhz(nvml: Any, device: Any) -> int:
    return int(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))


def _memory_clock_mhz(nvml: Any, device: Any) -> int:
    return int(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM))


def _temperature_c(nvml: Any, device: Any) -> int:
    return int(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))


def _throttle_reasons(nvml: Any, device: Any) -> tuple[str, ...]:
    mask = _throttle_mask(nvml, device)
    bits = (1 << place for place in range(mask.bit_length()) if mask >> place & 1)
    return tuple(_THROTTLE_REASONS.get(bit, f"{bit:#x}") for bit in bits)  # a bit of a later driver is named by itself


def _throttle_mask(nvml: Any, device: Any) -> int:
    renamed = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    if renamed is not None:
        # A driver before 535 knows only the old name, whatever the binding knows.
        with contextlib.suppress(nvml.NVMLError_FunctionNotFound):
            return int(renamed(device))
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"  # 12040 is 12.4


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
