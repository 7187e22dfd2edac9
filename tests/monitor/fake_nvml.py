"""A stand-in for the `pynvml` module: one card whose answers and failures a test sets."""

from __future__ import annotations

import collections
import os
import types
from typing import Any

GIB = 2**30
UUID = "5a1f0c9e-0000-1111-2222-333344445555"


class FakeNvml(types.ModuleType):
    """A card of 80 GiB, 30 of them in use: 10 by this process, 20 by another.

    `failing` names calls that fail with a plain NVML error, `errors` those that fail with a certain one.
    """

    nvmlMemory_v2 = 0x2000028  # noqa: N815
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
        pass

    class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801, N818
        pass

    class NVMLError_GpuIsLost(NVMLError):  # noqa: N801, N818
        pass

    class NVMLError_Timeout(NVMLError):  # noqa: N801, N818
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open_sessions = 0
        self.processes: list[types.SimpleNamespace] | None = [
            types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=10 * GIB),
            types.SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=20 * GIB),
        ]
        self.known_uuids = {f"GPU-{UUID}"}
        self.failing: set[str] = set()
        self.errors: dict[str, type[Exception]] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.version: str | bytes = "570.86.15"
        self.utilisation_percent = 37
        self.throttle_mask = 0x4

    def lose_the_card(self) -> None:
        for name in ("memory", "processes", "utilisation", "power", "clock 1", "clock 2", "temperature"):
            self.errors[name] = self.NVMLError_GpuIsLost
        self.errors["event reasons"] = self.NVMLError_GpuIsLost

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.errors:
            raise self.errors[name](name)
        if name in self.failing:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self._called("init")
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open_sessions -= 1
        self._called("shutdown")

    def nvmlSystemGetDriverVersion(self) -> str | bytes:  # noqa: N802
        self._called("version")
        return self.version

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self._called("handle")
        if index > 0:
            raise self.NVMLError("invalid argument")
        return "card"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._called("handle")
        if uuid not in self.known_uuids:
            raise self.NVMLError("not found")
        return "card"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:  # noqa: N802
        assert self.open_sessions == 1
        self._called("memory")
        if version is None:  # the driver's reserve of 1 GiB counts as used
            return types.SimpleNamespace(total=80 * GIB, used=31 * GIB, free=49 * GIB)
        self._called("memory v2")
        return types.SimpleNamespace(total=80 * GIB, used=30 * GIB, free=49 * GIB, reserved=GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:  # noqa: N802
        self._called("processes")
        return self.processes

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        self._called("utilisation")
        return types.SimpleNamespace(gpu=self.utilisation_percent, memory=99)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self._called("power")
        return 412_500

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        self._called(f"clock {clock}")
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 2619}[clock]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        self._called("temperature")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:  # noqa: N802
        self._called("event reasons")
        return self.throttle_mask

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        self._called("throttle reasons")
        return self.throttle_mask
