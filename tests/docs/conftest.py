from __future__ import annotations

from tests.reporting.conftest import browser

__all__ = ["browser"]
