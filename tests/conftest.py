"""For every test: a cache folder of its own, no ranks left over from the shell, and no colours or odd widths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, so that a gate is red for a reason; `--hypothesis-profile=roam` looks further.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.register_profile("roam", deadline=None, database=None)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans go to a folder of this test, never to the user's own cache."""
    folder = tmp_path_factory.mktemp("xdg-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
