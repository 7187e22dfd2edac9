from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.errors import RequestError
from brim.monitor.live import LiveRun, read_runs
from brim.monitor.nvml import OpenCards
from brim.monitor.openmetrics import metrics_text
from brim.monitor.snapshot import Observer
from tests.monitor.fake_nvml import GIB, UUID, FakeNvml
from tests.monitor.sampling import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Any:
    folder = tmp_path / "run"
    folder.mkdir()
    with LiveRun(folder, "eval", interval_seconds=0.01) as live:
        live.update(
            state="running", done=3, total=10, unit="samples", device_uuid=f"GPU-{UUID}", oom_events=0, batch_size=8,
            metric={"name": "exact_match", "value": 0.5}, samples_per_second=4.0,
        )  # fmt: skip
        wait_until(lambda: [one["done"] for one in read_runs()] == [3])
        yield live


def read() -> dict[str, Any]:
    with Observer() as observer:
        return observer.read()


def test_a_card_is_shown_with_the_memory_of_runs_and_of_others(fake: FakeNvml, run: LiveRun) -> None:
    (gpu,) = read()["gpus"]
    assert gpu == {
        "index": 0, "uuid": f"GPU-{UUID}", "name": "NVIDIA H200", "slice_of": None, "utilisation": 0.37,
        "memory_total_bytes": 80 * GIB, "memory_used_bytes": 30 * GIB, "memory_runs_bytes": 10 * GIB,
        "memory_others_bytes": 20 * GIB, "power_watts": 412.5, "power_limit_watts": 700.0, "temperature_c": 61,
        "sm_clock_mhz": 1980, "memory_clock_mhz": 2619, "throttle_reasons": ["sw_power_cap"], "problem": None,
        "processes": [
            {"pid": os.getpid(), "used_bytes": 10 * GIB, "run": True},
            {"pid": os.getpid() + 1, "used_bytes": 20 * GIB, "run": False},
        ],
        "utilisation_history": [0.37],
    }  # fmt: skip
    assert fake.open_sessions == 0


def test_ranks_of_a_run_on_this_machine_are_not_others(fake: FakeNvml, run: LiveRun) -> None:
    del fake
    run.update(rank_pids=[os.getpid(), os.getpid() + 1])
    wait_until(lambda: read_runs()[0]["rank_pids"] != [])
    (gpu,) = read()["gpus"]
    assert (gpu["memory_runs_bytes"], gpu["memory_others_bytes"]) == (30 * GIB, 0)
    run.update(host="elsewhere")
    wait_until(lambda: read_runs() == [])  # the same numbers on another machine
    with Observer(Path(run.document["folder"])) as observer:
        assert [process["run"] for process in observer.read()["gpus"][0]["processes"]] == [False, False]


def test_without_runs_all_memory_is_of_others(fake: FakeNvml) -> None:
    (gpu,) = read()["gpus"]
    assert (gpu["memory_runs_bytes"], gpu["memory_others_bytes"]) == (0, 30 * GIB)


def test_in_a_container_the_share_of_a_run_is_not_known(fake: FakeNvml, run: LiveRun) -> None:
    fake.processes = [types.SimpleNamespace(pid=999_999_999, usedGpuMemory=30 * GIB)]
    (gpu,) = read()["gpus"]
    assert (gpu["memory_runs_bytes"], gpu["memory_others_bytes"]) == (None, None)


FIELDS = {
    "utilisation": ("utilisation",),
    "memory": ("memory_total_bytes", "memory_used_bytes", "memory_others_bytes"),
    "processes": ("processes", "memory_runs_bytes", "memory_others_bytes"),
    "power": ("power_watts",),
    "power limit": ("power_limit_watts",),
    "temperature": ("temperature_c",),
    "event reasons": ("throttle_reasons",),
    "name": ("name",),
}


@pytest.mark.parametrize("absent", FIELDS)
def test_a_field_that_a_card_does_not_have_leaves_the_others(fake: FakeNvml, absent: str) -> None:
    fake.errors = {absent: fake.NVMLError_NotSupported}
    (gpu,) = read()["gpus"]
    assert gpu["problem"] is None
    shown = {name for name, value in gpu.items() if value is None} - {"slice_of", "problem"}
    assert shown == set(FIELDS[absent])


def test_fields_that_may_not_be_read_say_so(fake: FakeNvml) -> None:
    fake.errors = {"processes": fake.NVMLError_NoPermission}
    (gpu,) = read()["gpus"]
    assert (gpu["processes"], gpu["problem"], gpu["utilisation"]) == (None, "Insufficient Permissions", 0.37)


@pytest.mark.parametrize("error", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded", "NVMLError_NoPermission"])
def test_without_driver_or_permission_the_host_and_the_reason_are_shown(fake: FakeNvml, error: str) -> None:
    fake.errors = {"init": getattr(fake, error)}
    document = read()
    assert document["gpus"] == []
    assert document["gpu_problem"]
    assert document["host"]["memory_total_bytes"] > document["host"]["memory_available_bytes"] > 0


def test_without_the_library_the_host_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    document = read()
    assert (document["gpus"], document["driver"]) == ([], None)
    assert "nvidia-ml-py" in document["gpu_problem"]


def test_a_card_that_is_lost_between_two_readings_says_so_and_comes_back(fake: FakeNvml) -> None:
    with Observer() as observer:
        before = observer.read()["gpus"][0]
        fake.lose_the_card()
        lost = observer.read()["gpus"][0]
        fake.errors.clear()
        after = observer.read()["gpus"][0]
    assert (lost["problem"], lost["utilisation"], lost["memory_used_bytes"]) == ("GPU is lost", None, None)
    assert after["utilisation_history"][0::2] == [before["utilisation"], 0.37]
    assert after["problem"] is None


def test_a_card_that_cannot_be_opened_has_a_row_beside_the_others(fake: FakeNvml) -> None:
    fake.count = 2
    rows = OpenCards().read()
    assert [(row.index, row.problem) for row in rows] == [(0, None), (1, "invalid argument")]


def test_slices_are_rows_of_their_own_after_their_card(fake: FakeNvml) -> None:
    fake.slices = 2
    fake.slice_errors = {"utilisation": fake.NVMLError_NotSupported}
    gpus = read()["gpus"]
    assert [(gpu["index"], gpu["slice_of"], gpu["utilisation"]) for gpu in gpus] == [
        (0, None, 0.37), (0, 0, None), (0, 0, None),
    ]  # fmt: skip
    assert [gpu["uuid"] for gpu in gpus] == [f"GPU-{UUID}", "MIG-0", "MIG-1"]


def test_the_python_function_gives_the_document_of_the_command(fake: FakeNvml, run: LiveRun, tmp_path: Path) -> None:
    snapshot = brim.watch(tmp_path / "run")
    assert snapshot.document["schema"] == "brim.watch/1"
    assert [one["done"] for one in snapshot.runs] == [3]
    assert [gpu["index"] for gpu in snapshot.gpus] == [0]
    assert json.loads(json.dumps(snapshot.document)) == snapshot.document


def test_a_folder_without_a_run_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no run is under way"):
        brim.watch(tmp_path)
    with pytest.raises(RequestError, match="no such folder"):
        brim.watch(tmp_path / "absent")


def samples_of(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_open_metrics_hold_cards_host_and_runs(fake: FakeNvml, run: LiveRun, tmp_path: Path) -> None:
    brim.watch(metrics=tmp_path / "brim.prom")
    text = (tmp_path / "brim.prom").read_text()
    assert text.endswith("# EOF\n")
    samples = samples_of(text)
    card = f'gpu="0",uuid="GPU-{UUID}",name="NVIDIA H200"'
    assert samples[f"brim_gpu_utilisation_ratio{{{card}}}"] == 0.37
    assert samples[f"brim_gpu_memory_runs_bytes{{{card}}}"] == 10 * GIB
    assert samples[f'brim_gpu_throttled{{{card},reason="sw_power_cap"}}'] == 1
    assert samples["brim_host_memory_available_bytes"] > 0
    folder = f'folder="{tmp_path / "run"}",kind="eval",unit="samples"'
    assert (samples[f"brim_run_done{{{folder}}}"], samples[f"brim_run_size{{{folder}}}"]) == (3, 10)
    assert samples[f'brim_run_metric{{{folder},metric="exact_match"}}'] == 0.5
    assert samples[f'brim_run_state{{{folder},state="running"}}'] == 1
    assert samples[f'brim_run_state{{{folder},state="killed"}}'] == 0
    assert "brim_run_loss" not in text  # not known


def test_open_metrics_families_are_typed_once_and_labels_escaped() -> None:
    runs = [
        {"folder": 'a"b\\c\nd', "state": "running", "done": 1},
        {"folder": "e", "state": "killed", "loss": float("nan")},
    ]
    host = {"cpu": None, "memory_total_bytes": 1, "memory_available_bytes": 1}
    text = metrics_text({"gpus": [], "runs": runs, "host": host})
    types_ = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types_) == len(set(types_))
    assert 'brim_run_done{folder="a\\"b\\\\c\\nd"} 1' in text.splitlines()
    assert "nan" not in text
    assert "brim_host_cpu_ratio" not in text
