from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(short_probes: None) -> None:
    """Every search here makes short probes."""
