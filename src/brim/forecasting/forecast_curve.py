"""What a search may expect of a size that it has not tried.

Pure: no torch, no device, no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

__all__ = ["ForecastCurve"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastCurve:
    """A forecast as functions of the size."""

    reserved_at: Callable[[int], int]  # peak bytes where there is room for all that the allocator keeps
    allocated_at: Callable[[int], int]  # peak bytes in use
    runs_within: Callable[[int, int], bool]  # whether a size runs under a limit, which makes the allocator keep less
