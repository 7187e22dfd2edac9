"""This machine at one moment: every card with its users, the host, and the runs under way; what `brim watch` shows.

Whatever cannot be read is None or says why, and never an error. It knows neither torch nor terminals.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from brim.errors import RequestError
from brim.monitor.host import CpuMeter, MemoryMeter
from brim.monitor.live import read_runs
from brim.monitor.nvml import CardRow, OpenCards
from brim.monitor.openmetrics import write_metrics
from brim.settings.caller import given
from brim.settings.watch_settings import WatchSettings

__all__ = ["WATCH_SCHEMA", "Observer", "Snapshot", "take_snapshot"]

WATCH_SCHEMA = "brim.watch/1"
HISTORY = 60  # readings of each card and of the host that are kept
MEASURED_SECONDS = 0.1  # over which a single snapshot measures how busy the cores are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The document of `brim watch --json`."""

    document: Mapping[str, Any]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """One for each card, and for each slice of a card."""
        gpus: list[dict[str, Any]] = self.document["gpus"]
        return gpus

    @property
    def runs(self) -> list[dict[str, Any]]:
        """One for each run under way, or killed in the last day."""
        runs: list[dict[str, Any]] = self.document["runs"]
        return runs


def take_snapshot(settings: WatchSettings) -> Snapshot:
    """Read everything once, and write the OpenMetrics file where one is asked for."""
    with Observer(settings.run) as observer:
        time.sleep(MEASURED_SECONDS)
        document = observer.read()
    if settings.metrics is not None:
        write_metrics(settings.metrics, document)
    return Snapshot(document=document)


class Observer:
    """Reads this machine again and again; with a folder, only the runs in it.

    with Observer() as observer:
        observer.read()["gpus"][0]["utilisation"]
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise RequestError(f"{given('run', str(folder))}: there is no such folder; give the folder of a run")
        if folder is not None and not read_runs(folder):
            ended = (folder / "run.json").is_file()
            instead = "it has ended: brim report shows it" if ended else "brim watch without a folder shows all runs"
            raise RequestError(f"{given('run', str(folder))}: no run is under way there; {instead}")
        self._folder = folder
        self._cards = OpenCards()
        self._cores, self._memory = CpuMeter(), MemoryMeter()
        self._cores.fraction()
        self._history: dict[object, collections.deque[float | None]] = collections.defaultdict(
            lambda: collections.deque(maxlen=HISTORY)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cards.close()

    def read(self) -> dict[str, Any]:
        """The document, as plain JSON values."""
        runs = read_runs(self._folder)
        users = {pid for run in runs if run["state"] != "killed" for pid in _processes_of(run)}
        rows = self._cards.read()
        return {
            "schema": WATCH_SCHEMA,
            "time": time.time(),
            "host": self._host(),
            "driver": self._cards.driver,
            "gpu_problem": self._cards.problem,  # why there are none
            "gpus": [self._gpu(row, runs, users) for row in rows],
            "runs": runs,
        }

    def _host(self) -> dict[str, Any]:
        fraction = self._cores.fraction()
        self._history["host"].append(fraction)
        memory = psutil.virtual_memory()
        return {
            "name": platform.node(),
            "cores": os.cpu_count(),
            "cpu": fraction,
            "memory_total_bytes": int(memory.total),
            "memory_available_bytes": self._memory.available_bytes(),
            "cpu_history": list(self._history["host"]),
        }

    def _gpu(self, row: CardRow, runs: Iterable[Mapping[str, Any]], users: set[int]) -> dict[str, Any]:
        figures, history = row.figures, self._history[row.index, row.uuid]
        history.append(figures.utilisation)
        ours = _memory_of_runs(row, runs, users)
        used = figures.memory_used_bytes
        return {
            "index": row.index,
            "uuid": row.uuid,
            "name": row.name,
            "slice_of": row.slice_of,
            "utilisation": figures.utilisation,
            "memory_total_bytes": row.memory_total_bytes,
            "memory_used_bytes": used,
            "memory_runs_bytes": ours,
            "memory_others_bytes": None if used is None or ours is None else max(0, used - ours),
            "power_watts": figures.power_watts,
            "power_limit_watts": row.power_limit_watts,
            "temperature_c": figures.temperature_c,
            "sm_clock_mhz": figures.sm_clock_mhz,
            "memory_clock_mhz": figures.memory_clock_mhz,
            "throttle_reasons": None if figures.throttle_reasons is None else list(figures.throttle_reasons),
            "processes": None
            if row.processes is None
            else [{"pid": one.pid, "used_bytes": one.used_bytes, "run": one.pid in users} for one in row.processes],
            "problem": row.problem,
            "utilisation_history": list(history),
        }


def _memory_of_runs(row: CardRow, runs: Iterable[Mapping[str, Any]], users: set[int]) -> int | None:
    """What brim's runs hold on a card; None where the driver does not say.

    In a container the driver lists processes by the host's numbers, which are not ours: a run that says that it is on
    this card is then not among them.
    """
    if row.processes is None:
        return None
    ours = [process.used_bytes for process in row.processes if process.pid in users]
    hidden = not ours and any(run.get("device_uuid") == row.uuid and run["state"] != "killed" for run in runs)
    if hidden or any(used is None for used in ours):
        return None
    return sum(used for used in ours if used is not None)


def _processes_of(run: Mapping[str, Any]) -> Iterator[int]:
    """The processes of a run's ranks on this machine, and those that they have started."""
    here = run.get("host") == platform.node()  # else the numbers are another machine's
    for pid in {run["pid"], *run.get("rank_pids", ())} if here else ():
        yield pid
        with contextlib.suppress(psutil.Error):
            yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
