"""What sizers are told, in a line each."""

from __future__ import annotations

from brim.memory.devices import MemoryReading
from brim.records import Probe
from brim.sizing.live import LiveSizer
from brim.sizing.micro_batches import MicroBatchSizer
from brim.sizing.sizer import Trial
from brim.training.micro_batches import measured


def ran(
    sizer: LiveSizer, size: int, seconds: float, peak_bytes: int | None = None, costliest: int | None = None
) -> None:
    """A batch of this size is done."""
    sizer.record(Trial(size=size, seconds=seconds, peak_bytes=peak_bytes, costliest_item=costliest))


def ran_out(sizer: LiveSizer, size: int) -> None:
    """A batch of this size was out of memory."""
    sizer.record(Trial(size=size, verdict="oom"))


def ran_short(sizer: LiveSizer, size: int) -> None:
    """A batch of this size made the allocator give back its cache."""
    sizer.record(Trial(size=size, verdict="thrashes"))


def micro_ran(
    sizes: MicroBatchSizer,
    cost: int,
    length: int,
    seconds: float | None,
    reading: MemoryReading | None = None,
    left_bytes: int | None = None,
) -> None:
    """A micro-batch is done."""
    sizes.record(measured(length, cost, seconds, reading), left_bytes)


def micro_ran_out(sizes: MicroBatchSizer, cost: int, length: int, left_bytes: int | None = None) -> None:
    """A micro-batch was out of memory."""
    sizes.record(Probe(batch_size=length, cost=cost, verdict="oom", detail="out of memory"), left_bytes)
