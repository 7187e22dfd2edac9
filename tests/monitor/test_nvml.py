from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from brim.monitor import nvml
from tests.monitor.fake_nvml import GIB, UUID, FakeNvml

NOT_AVAILABLE = 2**64 - 1


def test_memory_is_split_between_this_process_and_others(fake: FakeNvml) -> None:
    assert nvml.device_memory() == nvml.DeviceMemoryUse(
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


def read_once() -> nvml.CardFigures:
    card = nvml.open_card()
    assert card is not None
    figures = card.read()
    card.close()
    return figures


def test_an_open_card_gives_every_figure_in_its_unit(fake: FakeNvml) -> None:
    assert read_once() == nvml.CardFigures(
        utilisation=0.37,
        memory_used_bytes=30 * GIB,
        memory_process_bytes=10 * GIB,
        memory_others_bytes=20 * GIB,
        power_watts=412.5,
        sm_clock_mhz=1980,
        memory_clock_mhz=2619,
        temperature_c=61,
        throttle_reasons=("sw_power_cap",),
    )


def test_where_its_own_share_is_unknown_the_share_of_others_is_too(fake: FakeNvml) -> None:
    fake.processes = []
    figures = read_once()
    assert figures.memory_used_bytes == 30 * GIB
    assert (figures.memory_process_bytes, figures.memory_others_bytes) == (None, None)


def test_its_own_share_is_reported_also_where_the_cards_memory_is_not(fake: FakeNvml) -> None:
    fake.errors["memory"] = fake.NVMLError_NotSupported
    figures = read_once()
    assert figures.memory_process_bytes == 10 * GIB
    assert (figures.memory_used_bytes, figures.memory_others_bytes) == (None, None)


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (0x000, ()),
        (0x001, ("gpu_idle",)),
        (0x01E, ("applications_clocks", "sw_power_cap", "hw_slowdown", "sync_boost")),
        (0x1E0, ("sw_thermal", "hw_thermal", "hw_power_brake", "display_clocks")),
        (0x804, ("sw_power_cap", "0x800")),  # a bit that only a later driver sets
    ],
)
def test_throttle_reasons_are_named_by_the_bits_of_the_mask(
    fake: FakeNvml, mask: int, reasons: tuple[str, ...]
) -> None:
    fake.throttle_mask = mask
    assert read_once().throttle_reasons == reasons


def test_an_old_driver_is_asked_for_throttle_reasons_by_their_old_name(fake: FakeNvml) -> None:
    fake.errors["event reasons"] = fake.NVMLError_FunctionNotFound
    assert read_once().throttle_reasons == ("sw_power_cap",)


def test_an_old_binding_is_asked_for_throttle_reasons_by_their_old_name(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    assert read_once().throttle_reasons == ("sw_power_cap",)


def test_a_lost_card_is_not_mistaken_for_an_old_driver(fake: FakeNvml) -> None:
    fake.errors["event reasons"] = fake.NVMLError_GpuIsLost
    assert read_once().throttle_reasons is None
    assert fake.calls["throttle reasons"] == 0


@pytest.mark.parametrize("uuid", [UUID, f"MIG-{UUID}"])
def test_a_slice_of_a_card_can_be_opened(fake: FakeNvml, uuid: str) -> None:
    fake.known_uuids = {f"MIG-{UUID}"}
    assert nvml.open_card(uuid) is not None


def test_no_card_is_opened_for_an_unknown_uuid_and_nvml_is_shut_down(fake: FakeNvml) -> None:
    assert nvml.open_card("GPU-00000000-0000-0000-0000-000000000000") is None
    assert fake.open_sessions == 0


def test_an_open_card_keeps_one_nvml_session_until_it_is_closed(fake: FakeNvml) -> None:
    card = nvml.open_card(UUID)
    assert card is not None
    card.read()
    card.read()
    assert (fake.open_sessions, fake.calls["init"]) == (1, 1)
    fake.failing = {"shutdown"}
    card.close()
    assert fake.open_sessions == 0


def test_importing_the_file_needs_neither_torch_nor_pynvml() -> None:
    tree = ast.parse(Path(nvml.__file__).read_text())
    everywhere, at_the_top = _imported(list(ast.walk(tree))), _imported(tree.body)
    assert "torch" not in everywhere
    assert "pynvml" in everywhere - at_the_top


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_every_process_on_a_card_is_listed_once(fake: FakeNvml) -> None:
    own, other = os.getpid(), os.getpid() + 1
    assert fake.processes is not None
    fake.processes.append(types.SimpleNamespace(pid=other + 1, usedGpuMemory=NOT_AVAILABLE))
    fake.processes.append(types.SimpleNamespace(pid=other, usedGpuMemory=2 * GIB))
    listed = {process.pid: process.used_bytes for process in nvml.processes_on(UUID)}
    assert listed == {own: 10 * GIB, other: 22 * GIB, other + 1: None}
    fake.failing = {"processes"}
    assert nvml.processes_on(UUID) == ()
    assert fake.open_sessions == 0
