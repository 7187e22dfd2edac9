"""Which rank this process is, read from torch.distributed or from the environment that torchrun sets.

Imports no torch: where the default group is initialised, torch is loaded already.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from brim.errors import RequestError

__all__ = ["World", "current_world", "refuse_ranks"]


@dataclass(frozen=True)
class World:
    """This process among its peers: `rank` of `size`, and `local_rank` on its own machine."""

    rank: int
    size: int
    local_rank: int


def current_world() -> World:
    """As the initialised default group says, else as torchrun's variables say, else alone.

    Without `LOCAL_RANK` the ranks are taken to be on one machine.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = int(distributed.get_rank())
        return World(rank, int(distributed.get_world_size()), _read("LOCAL_RANK", default=rank))
    if "WORLD_SIZE" not in os.environ:
        return World(0, 1, 0)
    size = _read("WORLD_SIZE", smallest=1)
    if size > 1 and "RANK" not in os.environ:
        raise RequestError(f"WORLD_SIZE is {size} but RANK is not set; start with torchrun, or unset WORLD_SIZE")
    rank = _read("RANK", default=0)
    if rank >= size:
        raise RequestError(f"RANK is {rank} but WORLD_SIZE is {size}: ranks go from 0 to {size - 1}")
    return World(rank, size, _read("LOCAL_RANK", default=rank))


def refuse_ranks(what: str) -> None:
    """Raise a `RequestError` under torchrun; `what` names the request and why it runs in one process."""
    if current_world().size > 1:
        raise RequestError(f"{what}; start it without torchrun")


def _read(name: str, *, default: int | None = None, smallest: int = 0) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        value = smallest - 1
    if value < smallest:
        raise RequestError(
            f"environment variable {name} is {text!r}, expected a whole number from {smallest}; "
            "start with torchrun, or unset WORLD_SIZE to run alone"
        )
    return value
