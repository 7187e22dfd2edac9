"""A trace of the card and the host beside a run: a thread reads the figures, `trace_file` keeps them.

A run must never fail, wait or change because it is watched: whatever cannot be read is an empty cell, whatever cannot
be written stops the writing and is kept in `Sampler.write_error`. It knows neither torch nor what the run is.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from brim.errors import RequestError
from brim.monitor.host import CpuMeter, MemoryMeter, process_resident_bytes
from brim.monitor.nvml import CardFigures, OpenCard, open_card
from brim.monitor.trace_file import COLUMNS, MonitorSample, TraceFile, TraceText, read_rows

__all__ = ["MonitorSummary", "Sampler", "last_sample", "read_rows"]

JOIN_SECONDS = 10.0  # a driver that hangs may hold the thread for ever, but not the end of the run

_Figure = TypeVar("_Figure")
_last: list[MonitorSample] = []  # the newest of this process, while a sampler runs


def last_sample() -> MonitorSample | None:
    """The newest sample of the sampler that runs in this process: what bars show, without asking the driver again."""
    return _last[-1] if _last else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorSummary:
    """A summary of the samples of one process; None: not known.

    A figure covers the time since the sample before it, so the means are means over time, however unevenly
    the samples fell.
    """

    gpu_utilisation_mean: float | None = None  # fraction
    gpu_power_watts_mean: float | None = None
    gpu_memory_used_peak_bytes: int | None = None  # this process's where the driver reports it, else the card's
    others_memory_peak_bytes: int | None = None
    throttle_reasons: tuple[str, ...] = ()  # every one seen but "gpu_idle", sorted
    host_cpu_mean: float | None = None  # fraction of all cores
    host_memory_peak_bytes: int | None = None  # resident, of this process
    samples: int = 0

    def to_json(self) -> dict[str, Any]:
        """The summary as plain JSON values."""
        return {**dataclasses.asdict(self), "throttle_reasons": list(self.throttle_reasons)}


class Sampler:
    """Samples the card and the host in a thread of its own while a block runs.

        with Sampler(folder / "monitor.csv", device_uuid=uuid) as sampler:
            ...
        sampler.summary().gpu_utilisation_mean

    The card is named as in `brim.monitor.nvml.device_memory`; with neither uuid nor index only the host is read.
    Without a path nothing is written; a `TraceText` in its place keeps the rows in memory. A sampler serves one block:
    entering it again, or in a forked child, starts nothing. `summary()` can be asked at any time and covers this
    process's samples, not those of a run it resumes.
    """

    def __init__(
        self,
        path: Path | TraceText | None,
        *,
        device_uuid: str | None = None,
        index: int | None = None,
        interval_seconds: float = 0.5,
    ) -> None:
        if not 0 < interval_seconds < math.inf:
            raise RequestError(f"cannot sample every {interval_seconds} s; give an interval above 0")
        self.interval_seconds = interval_seconds
        self._device_uuid = device_uuid
        self._index = index
        self._file = path if isinstance(path, TraceText) else TraceFile(path)
        self._tally = _Tally()
        self._summary = MonitorSummary()  # replaced whole, so that it is read without a lock (a fork could hold it)
        self._started = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner: int | None = None  # the process that entered the block: threads do not survive a fork

    @property
    def write_error(self) -> str | None:
        """Why the trace ends early, or None while all is well."""
        return self._file.error

    def summary(self) -> MonitorSummary:
        """The summary of the samples so far."""
        return self._summary

    def __enter__(self) -> Self:
        if self._owner is None:
            self._owner = os.getpid()
            self._started = time.monotonic()
            thread = threading.Thread(target=lambda: _or_none(self._run), name="brim-monitor", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:  # the process may have no more threads
                self._file.error = f"nothing is sampled: {error}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None and os.getpid() == self._owner:
            self._stop.set()
            self._thread.join(JOIN_SECONDS)
            _last.clear()

    def _run(self) -> None:
        self._file.open()
        card = self._open_card()
        cores, memory = CpuMeter(), MemoryMeter()
        stopping = False
        while True:
            _or_none(lambda: self._take(card, cores, memory))
            if stopping:  # after one sample more, so that a short run has two
                break
            stopping = self._stop.wait(self.interval_seconds)
        self._file.flush()
        if card is not None:
            _or_none(card.close)

    def _open_card(self) -> OpenCard | None:
        if self._device_uuid is None and self._index is None:
            return None
        return _or_none(lambda: open_card(self._device_uuid, self._index or 0))

    def _take(self, card: OpenCard | None, cores: CpuMeter, memory: MemoryMeter) -> None:
        seconds = self._file.resumed_at_seconds + time.monotonic() - self._started
        gpu = (_or_none(card.read) if card is not None else None) or CardFigures()
        sample = MonitorSample(
            time_seconds=seconds,
            gpu_utilisation=gpu.utilisation,
            gpu_memory_used_bytes=gpu.memory_used_bytes,
            gpu_memory_process_bytes=gpu.memory_process_bytes,
            gpu_memory_others_bytes=gpu.memory_others_bytes,
            gpu_power_watts=gpu.power_watts,
            gpu_sm_clock_mhz=gpu.sm_clock_mhz,
            gpu_memory_clock_mhz=gpu.memory_clock_mhz,
            gpu_temperature_c=gpu.temperature_c,
            throttle_reasons=gpu.throttle_reasons,
            host_cpu=_or_none(cores.fraction),
            host_memory_available_bytes=_or_none(memory.available_bytes),
            process_rss_bytes=_or_none(process_resident_bytes),
        )
        _last[:] = [sample]
        self._tally.add(sample)
        self._summary = self._tally.summary()
        self._file.append(sample)


def _or_none(read: Callable[[], _Figure]) -> _Figure | None:
    """None for what cannot be read, whatever the reason: no file descriptor left, a driver that answers nonsense."""
    try:
        return read()
    except Exception:
        return None


class _Mean:
    """A mean over time; of the values alone as long as no time has passed."""

    def __init__(self) -> None:
        self._weighted = self._seconds = self._plain = 0.0
        self._count = 0

    def add(self, value: float | None, seconds: float) -> None:
        if value is not None:
            self._weighted += value * seconds
            self._seconds += seconds
            self._plain += value
            self._count += 1

    def value(self) -> float | None:
        if self._seconds > 0:
            return self._weighted / self._seconds
        return self._plain / self._count if self._count else None


class _Tally:
    """The running figures behind a summary."""

    def __init__(self) -> None:
        self._utilisation, self._power, self._host_cpu = _Mean(), _Mean(), _Mean()
        self._peaks: dict[str, int] = {}
        self._reasons: set[str] = set()
        self._samples = 0
        self._last_seconds: float | None = None

    def add(self, sample: MonitorSample) -> None:
        passed = 0.0 if self._last_seconds is None else sample.time_seconds - self._last_seconds
        self._last_seconds = sample.time_seconds
        self._samples += 1
        self._utilisation.add(sample.gpu_utilisation, passed)
        self._power.add(sample.gpu_power_watts, passed)
        self._host_cpu.add(sample.host_cpu, passed)
        for column in COLUMNS:
            value = getattr(sample, column)
            if column.endswith("_bytes") and value is not None:
                self._peaks[column] = max(value, self._peaks.get(column, 0))
        self._reasons.update(sample.throttle_reasons or ())

    def summary(self) -> MonitorSummary:
        own, card = self._peaks.get("gpu_memory_process_bytes"), self._peaks.get("gpu_memory_used_bytes")
        return MonitorSummary(
            gpu_utilisation_mean=self._utilisation.value(),
            gpu_power_watts_mean=self._power.value(),
            gpu_memory_used_peak_bytes=card if own is None else own,
            others_memory_peak_bytes=self._peaks.get("gpu_memory_others_bytes"),
            throttle_reasons=tuple(sorted(self._reasons - {"gpu_idle"})),
            host_cpu_mean=self._host_cpu.value(),
            host_memory_peak_bytes=self._peaks.get("process_rss_bytes"),
            samples=self._samples,
        )
