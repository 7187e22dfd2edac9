"""Which experiment starts next, and where: by memory that is reserved, never by memory that happens to be free. Pure.

An experiment reserves what it is forecast to need; as many share a device as fit and as slots allow. Devices with
nothing on them come first, so that all are used. One whose need is unknown has a device for itself. Whether sharing
pays is learnt from the rates that experiments report: where more at once bring no more in all, there are no more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

__all__ = ["Device", "Need", "Packing", "ThroughputWatch"]

PATIENCE = 6  # starts that may overtake an experiment which waits for more room
WORTHWHILE = 1.05  # what one more experiment must bring to the rate of all together
NOTHING_LOST = 0.98  # if all together run this fast with one less, that one brought nothing
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
class _Held:
    need: Need
    bytes: int


class Packing:
    """What is reserved on every device.

    packing = Packing([Device(name="cuda:0", memory_bytes=80 << 30, slots=8)])
    chosen = packing.choose(waiting)  # a need and a device, or None: wait until something ends
    packing.start(*chosen)
    """

    def __init__(self, devices: Sequence[Device], *, shares: bool = False) -> None:
        """`shares`: unknown needs get an equal part of the device instead of all of it, as the user has said."""
        assert devices, "there is at least the machine itself"
        self.devices = tuple(devices)
        self._shares = shares
        self._held: dict[str, dict[str, _Held]] = {device.name: {} for device in devices}
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
            if self._overtaken.get(need.id, 0) >= PATIENCE:
                return None
        return None

    def start(self, need: Need, device: Device, *, before: Sequence[Need] = ()) -> int | None:
        """Reserve; `before` are those that stood in front of it. Gives the bytes it may use, None: no bound."""
        held = self._bytes(need, device)
        self._held[device.name][need.id] = _Held(need=need, bytes=held)
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

    def heard(self, device: str, experiment: str, rate: float, now: float) -> int | None:
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
        if current.count > before.count and gain < WORTHWHILE:
            return before.count
        if current.count < before.count and gain > NOTHING_LOST:
            return current.count
        return None
