"""`brim doctor`: its screen, its document and its exit code, with a card, without one, and with something broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import brim as package
from brim.diagnosis import examine, machine
from tests.cli.conftest import Brim
from tests.monitor.fake_nvml import GIB, UUID, FakeNvml

DEVICE = {
    "name": "cuda:0", "model": "NVIDIA H200", "uuid": UUID, "capability": "9.0", "memory_total_bytes": 80 * GIB,
    "problem": None,
}  # fmt: skip
FIELDS = {
    "schema", "brim", "python", "torch", "driver", "host", "folders", "libraries", "extras", "variables",
    "ranks_problem", "problems",
}  # fmt: skip


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a driver, whatever this one has."""
    nvml = FakeNvml()
    nvml.errors["init"] = FakeNvml.NVMLError_LibraryNotFound
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    _torch(monkeypatch, devices=[])


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A machine with one card, which torch sees."""
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    _torch(monkeypatch, devices=[DEVICE])
    return nvml


def _torch(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    facts = {"version": "2.9.0+cu128", "cuda": "12.8", "hip": None, "problem": None, "devices": [], **changes}
    monkeypatch.setattr(examine, "read_torch", lambda: facts)


@pytest.mark.usefixtures("no_card")
def test_without_a_card_the_screen_is_short_and_all_is_well(brim: Brim) -> None:
    result = brim("doctor")
    lines = result.out.splitlines()
    assert (result.code, result.err) == (0, "")
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80
    assert "sees the CPU alone" in result.out
    assert lines[-1] == "no problems found"


def test_a_card_is_shown_with_its_driver_memory_and_torchs_name(brim: Brim, card: FakeNvml) -> None:
    result = brim("doctor")
    assert result.code == 0
    assert "570.86.15, runs CUDA 12.8 or older" in result.out
    shown = " ".join(result.out.split())
    assert "0: NVIDIA H200 (cuda:0), 30.0 GiB of 80.0 GiB used, compute 9.0, 61 °C, 412 W" in shown
    assert card.open_sessions == 0


def test_a_card_that_torch_does_not_see_ends_with_one(
    brim: Brim, card: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch(monkeypatch, version="2.9.0+cpu", cuda=None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = brim("doctor")
    assert result.code == 1
    assert "(not visible to torch)" in result.out
    assert "→ install a build of torch for CUDA" in result.out
    assert result.out.splitlines()[-1] == "1 error"


def test_a_driver_that_is_too_old_ends_with_one(brim: Brim, card: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    card.cuda_version = 11_040
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _torch(monkeypatch)
    assert "driver 570.86.15 runs CUDA 11.4 at most" in brim("doctor").out


@pytest.mark.usefixtures("no_card")
def test_a_cache_folder_that_cannot_be_written_ends_with_one(
    brim: Brim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = brim("doctor", "--json")
    document = json.loads(result.out)
    assert result.code == 1
    assert [problem["name"] for problem in document["problems"]] == ["folder_not_writable"]
    assert document["folders"]["cache"]["writable"] is False


@pytest.mark.usefixtures("no_card")
def test_the_document_has_its_fields_and_leaves_nothing_behind(
    brim: Brim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    document = json.loads(brim("doctor", "--json").out)
    assert set(document) == FIELDS
    assert document["schema"] == "brim.doctor/1"
    assert document["folders"]["cache"] == {
        "path": str(tmp_path / "cache" / "brim"),
        "writable": True,
        "free_bytes": document["folders"]["cache"]["free_bytes"],
        "problem": None,
    }
    assert document["variables"]["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    assert "secret" not in json.dumps(document)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_card")
def test_an_extra_that_is_missing_is_listed_with_what_it_lacks(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = {"name": "timm", "needs": ">=1", "version": "1.2"}
    sacrebleu = {"name": "sacrebleu", "needs": ">=2.4", "version": None}
    extras = {
        "vision": {"installed": True, "libraries": [timm]},
        "metrics": {"installed": False, "libraries": [timm, sacrebleu]},
    }
    monkeypatch.setattr(examine, "read_extras", lambda: extras)
    result = brim("doctor")
    assert result.code == 0
    assert "vision: timm 1.2" in result.out
    assert "without metrics (sacrebleu)" in result.out


@pytest.mark.usefixtures("no_card")
def test_the_python_call_returns_the_same() -> None:
    result = package.doctor()
    assert result.problems == ()
    assert result.document["brim"] == package.__version__


def test_the_real_torch_is_examined() -> None:
    found = machine.read_torch()
    assert found["version"] is not None
    assert found["problem"] is None
    assert all(device["problem"] is None for device in found["devices"])


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: {"version": "2.9.0", "cuda": "12.8", "hip": None})
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it is an ImportError
    found = machine.read_torch()
    assert found["problem"].startswith("ModuleNotFoundError: ")
    assert found["devices"] == []


def test_a_device_whose_kernels_fail_says_why() -> None:
    class Torch:
        class cuda:  # noqa: N801
            @staticmethod
            def get_device_properties(index: int) -> Any:
                raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    assert machine._device(Torch, 0)["problem"] == "CUDA error: out of memory"
    assert machine._trial(Torch, "cuda:0") is not None
