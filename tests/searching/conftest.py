from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quick(short_probes: None) -> None:
    """Every search here makes short probes."""


@pytest.fixture(autouse=True, scope="package")
def quick_collections() -> Iterator[None]:
    """Every probe collects garbage; what the imports left behind need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
