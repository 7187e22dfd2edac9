from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reporting.chromium import Chromium, missing
from tests.reporting.reported_pages import PAGES


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """One headless Chromium for all tests; `BRIM_TEST_BROWSER=required` makes its absence a failure."""
    absent = missing()
    if absent is not None:
        if os.environ.get("BRIM_TEST_BROWSER") == "required":
            pytest.fail(absent)
        pytest.skip(absent)
    started = Chromium()
    yield started
    started.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind, each written once."""
    folder = tmp_path_factory.mktemp("pages")
    return {name: write(folder / name) for name, write in PAGES.items()}
