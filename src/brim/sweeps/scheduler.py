"""Which experiment starts next, and on which device: by reserved memory, never by memory that happens to be free.

An experiment reserves what it is forecast to need; as many share a device as fit and as slots allow. Empty devices come
first, so that all are used. One whose need is unknown gets a device for itself. Whether sharing pays is learnt from the
rates that experiments report: where more at once do not raise the total rate, no more are started.

A card that is assigned to a child is set in that child's environment alone; cards that `CUDA_VISIBLE_DEVICES` hides
stay hidden. Pure, except for reading MPS's control pipe.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.monitor.host import own_cores

__all__ = ["Device", "Need", "Packing", "ThroughputWatch", "local_devices", "mps_is_running"]

MOST_OVERTAKES = 6  # starts that may overtake an experiment which waits for more room
MIN_TOTAL_SPEEDUP = 1.05  # what one more experiment must bring to the rate of all together
MIN_KEPT_RATE = 0.98  # if all together run this fast with one less, that one brought nothing
SETTLE_SECONDS = 5.0  # after a change, before rates count again
FEWEST_RATES = 2  # reports of each experiment that count as knowing its rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A place to run: a GPU, or the machine itself."""

    name: str  # cpu, cuda:0, mps
    memory_bytes: int | None = None  # that may be reserved; None: not counted
    slots: int = 1  # experiments at once
    visible: str | None = None  # what CUDA_VISIBLE_DEVICES must be for it; None: leave it as it is
    card: str = ""  # its name for people
    context_bytes: int = 0  # what a process takes beside what training is limited to

    @property
    def kind(self) -> str:
        """cpu, cuda or mps."""
        return self.name.partition(":")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What an experiment asks of a device."""

    id: str
    bytes: int | None = None  # None: unknown
    alone: bool = False
    device: str | None = None  # the one it must run on


@dataclasses.dataclass
class _Reservation:
    need: Need
    bytes: int


class Packing:
    """What is reserved on every device.

    packing = Packing([Device(name="cuda:0", memory_bytes=80 << 30, slots=8)])
    chosen = packing.choose(waiting)  # a need and a device, or None: wait until something ends
    packing.start(*chosen)
    """

    def __init__(self, devices: Sequence[Device], *, shares: bool = False) -> None:
        """`shares`: unknown needs get an equal part of the device instead of all of it, as the user asked."""
        assert devices, "there is at least the machine itself"
        self.devices = tuple(devices)
        self._shares = shares
        self._held: dict[str, dict[str, _Reservation]] = {device.name: {} for device in devices}
        self._caps = {device.name: device.slots for device in devices}
        self._overtaken: dict[str, int] = {}

    def running(self, device: str) -> int:
        """How many experiments are on a device."""
        return len(self._held[device])

    def reserved_bytes(self, device: str) -> int:
        """What they hold of it."""
        return sum(held.bytes for held in self._held[device].values())

    def cap(self, device: str) -> int:
        """How many may be on a device at once."""
        return self._caps[device]

    def limit(self, device: str, count: int) -> None:
        """No more than so many at once there from now on; those that run are left alone."""
        self._caps[device] = max(min(count, self._caps[device]), 1)

    def choose(self, waiting: Sequence[Need]) -> tuple[Need, Device] | None:
        """The first that fits somewhere, unless that would overtake one that has waited long enough."""
        for need in waiting:
            device = self._place(need)
            if device is not None:
                return need, device
            if self._overtaken.get(need.id, 0) >= MOST_OVERTAKES:
                return None
        return None

    def start(self, need: Need, device: Device, *, before: Sequence[Need] = ()) -> int | None:
        """Reserve; `before` are those that stood in front of it. Gives the bytes it may use, None: no bound."""
        held = self._bytes(need, device)
        self._held[device.name][need.id] = _Reservation(need=need, bytes=held)
        self._overtaken.pop(need.id, None)
        for other in before:
            self._overtaken[other.id] = self._overtaken.get(other.id, 0) + 1
        shared = device.slots > 1 and not need.alone and device.memory_bytes is not None
        return held if shared and held < (device.memory_bytes or 0) else None

    def end(self, need_id: str) -> None:
        """Give back what it held."""
        for held in self._held.values():
            held.pop(need_id, None)

    def _place(self, need: Need) -> Device | None:
        fitting = [device for device in self.devices if self._fits(need, device)]
        if not fitting:
            return None
        return min(fitting, key=lambda device: (self.running(device.name), -self._free(device)))

    def _fits(self, need: Need, device: Device) -> bool:
        held = self._held[device.name]
        if not self._suits(need, device):
            return False
        if not held:
            return True  # what is forecast not to fit alone is tried alone: training lowers its batch size
        if need.alone or any(other.need.alone for other in held.values()) or len(held) >= self._caps[device.name]:
            return False
        return self._bytes(need, device) <= self._free(device)

    def _suits(self, need: Need, device: Device) -> bool:
        if need.device is not None:
            return need.device == device.name or (need.device == "cuda" and device.kind == "cuda")
        kinds = {one.kind for one in self.devices}
        return device.kind != "cpu" or kinds == {"cpu"}

    def _free(self, device: Device) -> float:
        if device.memory_bytes is None:
            return math.inf
        return device.memory_bytes - self.reserved_bytes(device.name)

    def _bytes(self, need: Need, device: Device) -> int:
        """What it reserves there."""
        if device.memory_bytes is None:
            return need.bytes or 0
        if need.alone:
            return device.memory_bytes
        if need.bytes is None:
            return device.memory_bytes // device.slots if self._shares else device.memory_bytes
        return min(need.bytes, device.memory_bytes)


@dataclasses.dataclass
class _Stretch:
    """The time between two changes of what runs on a device."""

    since: float
    rates: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    count: int = 0

    def means(self) -> dict[str, float]:
        return {name: math.fsum(rates) / len(rates) for name, rates in self.rates.items() if len(rates) >= FEWEST_RATES}


class ThroughputWatch:
    """Whether experiments that share a device get more done in all, from the rates that each reports.

    Rates of different experiments cannot be added. What can be compared is one experiment's rate before and after the
    number beside it changed: k that slow down to a part s when they become k + 1 do (k + 1)·s / k of the work.
    """

    def __init__(self) -> None:
        self._now: dict[str, _Stretch] = {}
        self._before: dict[str, _Stretch] = {}

    def changed(self, device: str, count: int, now: float) -> None:
        """So many experiments train on the device from now on."""
        current = self._now.get(device)
        if current is not None:
            if current.count == count:
                return
            if current.means():
                self._before[device] = current
        self._now[device] = _Stretch(since=now, count=count)

    def add_rate(self, device: str, experiment: str, rate: float, now: float) -> int | None:
        """An experiment's rate; gives the number to stay at, once it is known that more bring nothing."""
        current = self._now.get(device)
        if current is None or now - current.since < SETTLE_SECONDS or rate <= 0:
            return None
        current.rates.setdefault(experiment, []).append(rate)
        before = self._before.get(device)
        if before is None or not before.count or before.count == current.count:
            return None
        old, new = before.means(), current.means()
        both = [name for name in old if name in new]
        if not both:
            return None
        slowed = math.exp(math.fsum(math.log(new[name] / old[name]) for name in both) / len(both))
        gain = slowed * current.count / before.count
        if current.count > before.count and gain < MIN_TOTAL_SPEEDUP:
            return before.count
        if current.count < before.count and gain > MIN_KEPT_RATE:
            return current.count
        return None


MOST_SLOTS = 16  # experiments on one card, however small
MARGIN = 0.05  # of a card's memory that is not reserved
MPS_PIPES = "/tmp/nvidia-mps"  # where the control daemon listens by default


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
        return True  # another user's daemon works as well
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
