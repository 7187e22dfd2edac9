from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from brim.monitor import nvml

GIB = 2**30
UUID = "5a1f0c9e-0000-1111-2222-333344445555"
NOT_AVAILABLE = 2**64 - 1


class FakeNvml(types.ModuleType):
    """A card of 80 GiB, 30 of them in use: 10 by this process, 20 by another."""

    nvmlMemory_v2 = 0x2000028  # noqa: N815

    class NVMLError(Exception):
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
        self.version: str | bytes = "570.86.15"

    def _called(self, name: str) -> None:
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
        if index > 0:
            raise self.NVMLError("invalid argument")
        return "card"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
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


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_memory_is_split_between_this_process_and_others(fake: FakeNvml) -> None:
    assert nvml.device_memory() == nvml.DeviceMemory(
        total_bytes=80 * GIB,
        used_bytes=30 * GIB,
        used_by_this_process_bytes=10 * GIB,
        used_by_others_bytes=20 * GIB,
    )


def test_the_drivers_own_figure_is_preferred_to_the_callers(fake: FakeNvml) -> None:
    memory = nvml.device_memory(own_bytes=GIB)
    assert memory is not None
    assert memory.used_by_others_bytes == 20 * GIB


def test_an_old_driver_gives_the_first_form_of_the_figures(fake: FakeNvml) -> None:
    fake.failing = {"memory v2"}
    memory = nvml.device_memory()
    assert memory is not None
    assert memory.used_bytes == 31 * GIB


@pytest.mark.parametrize("figure", [None, NOT_AVAILABLE])
def test_a_figure_kept_back_is_replaced_by_the_callers_own(fake: FakeNvml, figure: int | None) -> None:
    fake.processes = [types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=figure)]
    memory = nvml.device_memory(own_bytes=4 * GIB)
    assert memory is not None
    assert memory.used_by_this_process_bytes is None
    assert memory.used_by_others_bytes == 26 * GIB


def test_a_container_that_lists_no_process_uses_the_callers_own(fake: FakeNvml) -> None:
    fake.processes = []
    memory = nvml.device_memory(own_bytes=4 * GIB)
    assert memory is not None
    assert memory.used_by_this_process_bytes is None
    assert memory.used_by_others_bytes == 26 * GIB


def test_a_refused_process_list_does_not_lose_the_totals(fake: FakeNvml) -> None:
    fake.failing = {"processes"}
    memory = nvml.device_memory()
    assert memory is not None
    assert memory.used_by_this_process_bytes is None
    assert memory.used_by_others_bytes == memory.used_bytes == 30 * GIB


def test_others_never_use_less_than_nothing(fake: FakeNvml) -> None:
    fake.processes = []
    memory = nvml.device_memory(own_bytes=40 * GIB)
    assert memory is not None
    assert memory.used_by_others_bytes == 0


@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}"])
def test_a_card_is_found_by_uuid_with_or_without_its_prefix(fake: FakeNvml, uuid: str) -> None:
    assert nvml.device_memory(uuid) is not None


@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}", f"MIG-{UUID}"])
def test_a_slice_of_a_card_is_found_by_uuid(fake: FakeNvml, uuid: str) -> None:
    fake.known_uuids = {f"MIG-{UUID}"}
    assert nvml.device_memory(uuid) is not None


def test_an_unknown_uuid_gives_no_answer_rather_than_another_card(fake: FakeNvml) -> None:
    assert nvml.device_memory("GPU-00000000-0000-0000-0000-000000000000", index=0) is None
    assert fake.open_sessions == 0


def test_an_index_past_the_last_card_gives_no_answer(fake: FakeNvml) -> None:
    assert nvml.device_memory(index=1) is None


def test_nvml_is_shut_down_after_each_answer(fake: FakeNvml) -> None:
    nvml.device_memory()
    nvml.driver_version()
    assert fake.open_sessions == 0


@pytest.mark.parametrize("failing", ["init", "memory"])
def test_an_nvml_error_gives_no_answer_and_leaves_nothing_open(fake: FakeNvml, failing: str) -> None:
    fake.failing = {failing}
    assert nvml.device_memory() is None
    assert fake.open_sessions == 0


def test_a_failing_shut_down_does_not_lose_the_answer(fake: FakeNvml) -> None:
    fake.failing = {"shutdown"}
    assert nvml.device_memory() is not None


def test_a_missing_library_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what makes `import pynvml` an ImportError
    assert nvml.device_memory() is None
    assert nvml.driver_version() is None


@pytest.mark.parametrize("version", ["570.86.15", b"570.86.15"])
def test_the_driver_version_is_text(fake: FakeNvml, version: str | bytes) -> None:
    fake.version = version
    assert nvml.driver_version() == "570.86.15"


@pytest.mark.parametrize("failing", ["init", "version"])
def test_no_driver_means_no_version(fake: FakeNvml, failing: str) -> None:
    fake.failing = {failing}
    assert nvml.driver_version() is None


def test_importing_the_file_needs_neither_torch_nor_pynvml() -> None:
    tree = ast.parse(Path(nvml.__file__).read_text())
    everywhere, at_the_top = _imported(list(ast.walk(tree))), _imported(tree.body)
    assert "torch" not in everywhere
    assert "pynvml" in everywhere - at_the_top


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
