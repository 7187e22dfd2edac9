from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.page_run import Server, server
from tests.reporting.conftest import browser

__all__ = ["browser"]


@pytest.fixture(scope="session")
def commands() -> Iterator[Server]:
    """The process that runs the commands of pages, started once."""
    with server() as running:
        yield running
