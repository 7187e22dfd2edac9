from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.monitor.fake_nvml import FakeNvml


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The card that `import pynvml` finds in this test."""
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "monitor.csv"
