"""Where experiments of this machine run: its cards, or the machine itself. Pure, but for a look at MPS's control pipe.

A card that is assigned to a child is set in that child's environment alone; cards that `CUDA_VISIBLE_DEVICES` hides
stay hidden.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.monitor.host import own_cores
from brim.sweeps.scheduler import Device

__all__ = ["local_devices", "mps_is_running"]

MOST_SLOTS = 16  # experiments on one card, however small
MARGIN = 0.05  # of a card's memory that is not reserved
MPS_PIPES = "/tmp/nvidia-mps"  # where the control daemon listens unless it is told otherwise


def local_devices(
    found: Sequence[Mapping[str, Any]],
    *,
    jobs_per_gpu: int | None = None,
    device_ids: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Device, ...]:
    """The devices of what torch found, and the machine itself for experiments that ask for the CPU."""
    surroundings = os.environ if environment is None else environment
    machine = Device(name="cpu", slots=jobs_per_gpu or 1)
    cards = [one for one in found if str(one["name"]).startswith("cuda")]
    if not cards:
        others = [Device(name=str(one["name"]), slots=jobs_per_gpu or 1) for one in found]
        return (*others, machine)
    if device_ids is not None:
        _check_ids(device_ids, len(cards))
        cards = [cards[index] for index in device_ids]
    hidden = surroundings.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in hidden.split(",")] if hidden else None
    slots = jobs_per_gpu or max(min(MOST_SLOTS, own_cores() // len(cards)), 1)
    devices = []
    for card in cards:
        index = int(str(card["name"]).partition(":")[2])
        name = str(index) if entries is None else entries[index]
        usable = int(card["memory_bytes"] * (1 - MARGIN)) - int(card.get("used_bytes") or 0)
        devices.append(
            Device(
                name=f"cuda:{index}",
                memory_bytes=max(usable, 0),
                slots=slots,
                visible=name if len(found) > 1 else None,
                card=str(card.get("card") or ""),
                context_bytes=int(card.get("context_bytes") or 0),
            )
        )
    return (*devices, machine)


def mps_is_running(environment: Mapping[str, str] | None = None) -> bool:
    """Whether CUDA's multi-process service takes clients here; it is used then, and never started by brim."""
    surroundings = os.environ if environment is None else environment
    pipes = Path(surroundings.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPES)
    if not (pipes / "control").exists():
        return False
    try:
        daemon = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        os.kill(daemon, 0)
    except PermissionError:
        return True  # somebody else's daemon is one as well
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True  # an older daemon leaves no such file
    return True


def _check_ids(ids: Sequence[int], count: int) -> None:
    for index in ids:
        if not 0 <= index < count:
            raise RequestError(f"gpu.device_ids {index}: here are {count} GPUs, numbered from 0")
    if len(set(ids)) < len(ids) or not ids:
        raise RequestError(f"gpu.device_ids {list(ids)}: name each GPU once")
