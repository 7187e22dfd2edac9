from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.monitor import sampler as sampler_module
from brim.monitor.sampler import MonitorSummary, Sampler
from brim.monitor.trace_file import read_rows
from tests.monitor.fake_nvml import GIB, UUID, FakeNvml
from tests.monitor.sampling import HEADER, ONCE, sample_once, wait_for_more, wait_until

CARD = {
    "gpu_utilisation": 0.37,
    "gpu_memory_used_bytes": 30 * GIB,
    "gpu_memory_process_bytes": 10 * GIB,
    "gpu_memory_others_bytes": 20 * GIB,
    "gpu_power_watts": 412.5,
    "gpu_sm_clock_mhz": 1980,
    "gpu_memory_clock_mhz": 2619,
    "gpu_temperature_c": 61,
    "throttle_reasons": ("sw_power_cap",),
}
NO_CARD = dict.fromkeys(CARD)


def card_cells(row: dict[str, object]) -> dict[str, object]:
    return {column: row[column] for column in CARD}


def test_a_run_shorter_than_the_interval_has_two_rows(path: Path) -> None:
    assert sample_once(path).summary().samples == 2
    header, *rows = path.read_text().splitlines()
    assert header == HEADER
    assert len(rows) == 2
    first, last = (row["time_seconds"] for row in read_rows(path))
    assert 0 <= first <= last < 30


def test_a_long_run_is_sampled_at_the_interval(path: Path) -> None:
    with Sampler(path, interval_seconds=0.1):
        time.sleep(1.05)
    assert 5 <= len(read_rows(path)) <= 12


@pytest.mark.parametrize("card", [{"device_uuid": UUID}, {"index": 0}])
def test_a_row_holds_the_figures_of_card_and_host(fake: FakeNvml, path: Path, card: dict[str, str | int]) -> None:
    sample_once(path, **card)
    row = read_rows(path)[-1]
    assert card_cells(row) == CARD
    assert row["host_memory_available_bytes"] > 2**20
    assert row["process_rss_bytes"] > 2**20


def test_the_share_of_busy_cores_is_distinguished_from_the_second_row_on(path: Path) -> None:
    with Sampler(path, interval_seconds=0.05) as sampler:
        wait_for_more(sampler)
    first, *later = (row["host_cpu"] for row in read_rows(path))
    assert first is None
    assert any(0 <= fraction <= 1 for fraction in later if fraction is not None)
    assert sampler.summary().host_cpu_mean is not None


def test_without_a_card_named_only_the_host_is_read(fake: FakeNvml, path: Path) -> None:
    summary = sample_once(path).summary()
    assert [card_cells(row) for row in read_rows(path)] == [NO_CARD, NO_CARD]
    assert summary.gpu_utilisation_mean is None
    assert (summary.host_memory_peak_bytes or 0) > 2**20
    assert fake.calls.total() == 0


@pytest.mark.parametrize("missing", ["library", "driver", "card"])
def test_the_host_part_works_where_the_card_cannot_be_reached(
    fake: FakeNvml, path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    fake.failing = {"init"} if missing == "driver" else set()
    fake.known_uuids = set() if missing == "card" else fake.known_uuids
    summary = sample_once(path, device_uuid=UUID).summary()
    assert card_cells(read_rows(path)[-1]) == NO_CARD
    assert (summary.gpu_utilisation_mean, summary.samples) == (None, 2)
    assert fake.open_sessions == 0


@pytest.mark.parametrize(
    ("call", "columns"),
    [
        ("utilisation", ["gpu_utilisation"]),
        ("memory", ["gpu_memory_used_bytes", "gpu_memory_others_bytes"]),
        ("processes", ["gpu_memory_process_bytes", "gpu_memory_others_bytes"]),
        ("power", ["gpu_power_watts"]),
        ("clock 1", ["gpu_sm_clock_mhz"]),
        ("clock 2", ["gpu_memory_clock_mhz"]),
        ("temperature", ["gpu_temperature_c"]),
        ("event reasons", ["throttle_reasons"]),
    ],
)
def test_an_unsupported_field_is_empty_and_queried_once(
    fake: FakeNvml, path: Path, call: str, columns: list[str]
) -> None:
    fake.errors[call] = fake.NVMLError_NotSupported
    with Sampler(path, index=0, interval_seconds=0.01) as sampler:
        wait_for_more(sampler, 3)
    assert card_cells(read_rows(path)[-1]) == {**CARD, **dict.fromkeys(columns)}
    assert fake.calls[call] == (2 if call == "memory" else 1)  # memory is asked for in two forms
    assert min(fake.calls[other] for other in ("power", "temperature") if other != call) > 2


def test_a_field_that_failed_for_once_is_asked_for_again(fake: FakeNvml, path: Path) -> None:
    fake.errors["power"] = fake.NVMLError_Timeout
    with Sampler(path, index=0, interval_seconds=0.01) as sampler:
        wait_for_more(sampler)
        del fake.errors["power"]
        wait_for_more(sampler)
    powers = [row["gpu_power_watts"] for row in read_rows(path)]
    assert (powers[0], powers[-1]) == (None, 412.5)


def test_a_card_lost_in_the_middle_empties_its_cells_and_the_rows_continue(fake: FakeNvml, path: Path) -> None:
    with Sampler(path, index=0, interval_seconds=0.01) as sampler:
        wait_for_more(sampler)
        fake.lose_the_card()
        wait_for_more(sampler)
    rows = read_rows(path)
    assert card_cells(rows[0]) == CARD
    assert card_cells(rows[-1]) == NO_CARD
    assert rows[-1]["process_rss_bytes"] is not None
    assert sampler.summary().gpu_utilisation_mean == pytest.approx(0.37)  # of the time in which it was known


def test_a_driver_that_answers_nonsense_does_not_end_the_thread(fake: FakeNvml, path: Path) -> None:
    fake.errors["temperature"] = RuntimeError
    sample_once(path, index=0)
    assert [row["process_rss_bytes"] is None for row in read_rows(path)] == [False, False]


def test_a_host_figure_that_cannot_be_read_is_an_empty_cell(
    fake: FakeNvml, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sampler_module, "process_resident_bytes", refuse)
    summary = sample_once(path, index=0).summary()
    row = read_rows(path)[-1]
    assert row["process_rss_bytes"] is None
    assert row["host_memory_available_bytes"] is not None
    assert card_cells(row) == CARD
    assert summary.host_memory_peak_bytes is None


def test_nvml_is_started_once_the_card_found_once_and_all_shut_down(fake: FakeNvml, path: Path) -> None:
    with Sampler(path, device_uuid=UUID, interval_seconds=0.01) as sampler:
        wait_for_more(sampler, 3)
        assert fake.open_sessions == 1
    assert (fake.calls["init"], fake.calls["handle"], fake.calls["shutdown"]) == (1, 1, 1)
    assert fake.open_sessions == 0


def test_means_weigh_a_sample_by_the_time_since_the_one_before(
    fake: FakeNvml, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([(1.0, 90), (10.0, 20), (10.0, 80)])  # the first at 0 s; then the clock goes on to these
    clock = types.SimpleNamespace(now=0.0)

    def utilisation(handle: str) -> types.SimpleNamespace:
        clock.now, percent = next(moments, (10.0, 5))
        return types.SimpleNamespace(gpu=percent)

    monkeypatch.setattr(fake, "nvmlDeviceGetUtilizationRates", utilisation)
    monkeypatch.setattr(sampler_module, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    with Sampler(path, index=0, interval_seconds=0.001) as sampler:
        wait_until(lambda: sampler.summary().samples >= 4)
    assert sampler.summary().gpu_utilisation_mean == pytest.approx((1 * 0.2 + 9 * 0.8) / 10)


def test_the_summary_can_be_asked_while_the_run_continues(fake: FakeNvml) -> None:
    with Sampler(None, index=0, interval_seconds=ONCE) as sampler:
        wait_until(lambda: sampler.summary().samples == 1)
        assert sampler.summary().gpu_utilisation_mean == pytest.approx(0.37)
        assert sampler.summary().gpu_power_watts_mean == pytest.approx(412.5)


def test_peaks_are_the_highest_seen_of_this_process_and_of_others(fake: FakeNvml) -> None:
    def hold(own_gib: int) -> None:
        fake.processes = [types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=own_gib * GIB)]

    with Sampler(None, index=0, interval_seconds=0.01) as sampler:
        for own_gib in (25, 5, 15):
            hold(own_gib)
            wait_for_more(sampler)
    assert sampler.summary().gpu_memory_used_peak_bytes == 25 * GIB
    assert sampler.summary().others_memory_peak_bytes == 25 * GIB  # while this process held 5 of 30


def test_the_peak_is_the_cards_if_the_driver_has_no_process_bytes(fake: FakeNvml) -> None:
    fake.processes = []
    summary = sample_once(None, index=0).summary()
    assert (summary.gpu_memory_used_peak_bytes, summary.others_memory_peak_bytes) == (30 * GIB, None)


def test_every_throttle_reason_seen_is_summed_up_but_idleness(fake: FakeNvml, path: Path) -> None:
    with Sampler(path, index=0, interval_seconds=0.01) as sampler:
        for mask in (0x1, 0x44, 0x8, 0x0):
            fake.throttle_mask = mask
            wait_for_more(sampler)
    assert sampler.summary().throttle_reasons == ("hw_slowdown", "hw_thermal", "sw_power_cap")
    cells = {row["throttle_reasons"] for row in read_rows(path)}
    assert cells >= {("gpu_idle",), ("sw_power_cap", "hw_thermal"), ("hw_slowdown",), ()}
    assert ",sw_power_cap|hw_thermal," in path.read_text()


def test_no_throttling_is_distinguished_from_a_driver_that_does_not_say(fake: FakeNvml, tmp_path: Path) -> None:
    fake.throttle_mask = 0
    sample_once(tmp_path / "none.csv", index=0)
    fake.errors["event reasons"] = fake.NVMLError_NotSupported
    sample_once(tmp_path / "unknown.csv", index=0)
    answers = [read_rows(tmp_path / name)[-1]["throttle_reasons"] for name in ("none.csv", "unknown.csv")]
    assert answers == [(), None]


def test_a_summary_is_plain_json(fake: FakeNvml) -> None:
    summary = sample_once(None, index=0).summary().to_json()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["throttle_reasons"] == ["sw_power_cap"]
    assert summary["gpu_utilisation_mean"] == pytest.approx(0.37)


def test_the_error_of_the_run_passes_and_its_rows_are_kept(path: Path) -> None:
    failure = KeyError("the run's own")
    with pytest.raises(KeyError) as caught, Sampler(path, interval_seconds=ONCE):
        raise failure
    assert caught.value is failure
    assert caught.value.__context__ is None
    assert len(read_rows(path)) == 2


def test_no_thread_is_left_behind(path: Path) -> None:
    sample_once(path)
    assert not [thread for thread in threading.enumerate() if thread.name == "brim-monitor"]


def test_a_driver_that_hangs_does_not_hold_the_end_of_the_run(
    fake: FakeNvml, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, entered = threading.Event(), threading.Event()

    def hang(handle: str) -> int:
        entered.set()
        release.wait(60)
        return 0

    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", hang)
    monkeypatch.setattr(sampler_module, "JOIN_SECONDS", 0.05)
    try:
        started = time.monotonic()
        with Sampler(path, index=0, interval_seconds=ONCE):
            assert entered.wait(30)
        assert time.monotonic() - started < 30
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "brim-monitor":
                thread.join(30)


def test_entering_again_starts_no_second_thread(path: Path) -> None:
    with Sampler(path, interval_seconds=ONCE) as sampler, sampler:
        assert [thread.name for thread in threading.enumerate()].count("brim-monitor") == 1


def _refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def exit_code_of_child(action: Callable[[], bool]) -> int:
    """Fork, act, and end the child whatever happens: 0 where the action is true."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on warns of forks beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if action() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_neither_samples_nor_writes(path: Path) -> None:
    def leave_the_block() -> bool:
        threading.Event.set = _refuse  # type: ignore[assignment]  # its lock may have been held at the fork
        with sampler:
            return threading.active_count() == 1 and sampler.summary().samples == 1

    with Sampler(path, interval_seconds=ONCE) as sampler:
        wait_until(lambda: sampler.summary().samples == 1)
        assert exit_code_of_child(leave_the_block) == 0
        assert path.read_text().splitlines() == [HEADER]  # the child wrote nothing of the parent's buffer
    assert len(read_rows(path)) == 2


def test_a_sampler_made_before_a_fork_works_in_the_child_that_enters_it(path: Path) -> None:
    sampler = Sampler(path, interval_seconds=ONCE)

    def run() -> bool:
        with sampler:
            pass
        return sampler.summary().samples == 2

    assert exit_code_of_child(run) == 0
    assert len(read_rows(path)) == 2


def test_a_process_that_has_no_more_threads_runs_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    sampler = sample_once(path)
    assert sampler.summary() == MonitorSummary(samples=0)
    assert "can't start new thread" in str(sampler.write_error)


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_no_time_is_refused(path: Path, interval: float) -> None:
    with pytest.raises(RequestError, match="above 0"):
        Sampler(path, interval_seconds=interval)


def test_without_a_path_there_is_a_summary_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sample_once(None).summary().samples == 2
    assert list(tmp_path.iterdir()) == []
