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
        def __str__(self) -> str:
            return "GPU is lost"

    class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818
        def __str__(self) -> str:
            return "Insufficient Permissions"

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818
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
        self.cuda_version = 12_080
        self.utilisation_percent = 37
        self.throttle_mask = 0x4
        self.count = 1
        self.slices = 0  # MIG
        self.slice_errors: dict[str, type[Exception]] = {}

    def lose_the_card(self) -> None:
        for name in (
            "memory",
            "processes",
            "utilisation",
            "power",
            "clock 1",
            "clock 2",
            "temperature",
            "power limit",
            "name",
            "uuid",
        ):
            self.errors[name] = self.NVMLError_GpuIsLost
        self.errors["event reasons"] = self.NVMLError_GpuIsLost

    def _called(self, name: str, handle: str = "card") -> None:
        self.calls[name] += 1
        if handle != "card" and name in self.slice_errors:
            raise self.slice_errors[name](name)
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

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        self._called("cuda version")
        return self.cuda_version

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

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._called("count")
        return self.count

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        self._called("uuid")
        return f"GPU-{UUID}" if handle == "card" else handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:  # noqa: N802
        self._called("name")
        return b"NVIDIA H200"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:  # noqa: N802
        self._called("power limit")
        return 700_000

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        self._called("mig mode")
        if not self.slices:
            raise self.NVMLError_NotSupported("mig mode")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, place: int) -> str:  # noqa: N802
        if place >= self.slices:
            raise self.NVMLError("not found")
        return f"MIG-{place}"

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
        self._called("utilisation", handle)
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
