from __future__ import annotations

import pytest


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens in the first segment, eight in the next: a dozen tokens take rows through three states."""
    monkeypatch.setattr("brim.generation.loop.FIRST_SEGMENT", 4)
