"""What tests of sweep files share: a file written on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a text into sweep.yaml and gives its path."""

    def _write(text: str) -> Path:
        path = tmp_path / "sweep.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write
