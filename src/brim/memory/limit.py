"""The memory limit of a search: how many bytes the workload may use, and where that number comes from."""

from __future__ import annotations

import dataclasses

from brim.errors import RequestError
from brim.memory.devices import DeviceMemory
from brim.settings.caller import written
from brim.settings.sizes import format_bytes

__all__ = ["DEFAULT_MARGIN", "MemoryLimit", "resolve_limit"]

# Kept free when the user names no limit: others on the card, and the allocator, move a little.
DEFAULT_MARGIN = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The bytes a workload may use, margin already taken off."""

    usable_bytes: int
    margin: float
    explicit: bool  # the user named the limit


def resolve_limit(memory: DeviceMemory, *, asked_bytes: int | None, margin: float | None) -> MemoryLimit:
    """The limit asked for, or all that is available now; less the margin.

    A limit that the user names is taken at its word (margin 0 unless given); without one, 5 % of what
    is available stays free, because a card is rarely as empty later as it is now.
    """
    available = memory.available_bytes()
    total = memory.total_bytes()
    if asked_bytes is None:
        margin = DEFAULT_MARGIN if margin is None else margin
        return MemoryLimit(usable_bytes=int(available * (1 - margin)), margin=margin, explicit=False)
    if asked_bytes > total:
        raise RequestError(
            f"{written('memory_limit', format_bytes(asked_bytes))}: {memory.device} has {format_bytes(total)}; "
            "give a smaller limit, or leave it out to use what is free"
        )
    margin = 0.0 if margin is None else margin
    return MemoryLimit(usable_bytes=int(min(asked_bytes, available) * (1 - margin)), margin=margin, explicit=True)
