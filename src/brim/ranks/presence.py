"""Which ranks are still there: each leaves its process id and, every few seconds, a sign of life in the shared store.

So a rank can wait for slower ones as long as they live, and no longer. A process that has ended on this machine is
noticed at once, one on another machine when its signs of life stay away. Before the ranks have met, `await_arrival`
waits until each has left its process id there. Knows nothing of what the ranks do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from brim.errors import RankError, first_line
from brim.ranks.world import World

__all__ = [
    "Facts", "Presence", "Trouble", "WaitWatcher", "await_arrival", "ended_ranks", "process_names", "processes_here",
    "rank_names",
]  # fmt: skip

NOTICE_SECONDS = 30.0  # a shorter wait is not reported
WAIT_CHECK_SECONDS = 0.5  # between two checks whether this rank is waiting

Describe = Callable[[float], str | None]  # the seconds waited to the line; None: another rank warns

_log = logging.getLogger("brim.ranks")


class WaitWatcher:
    """A thread that warns once about every wait that lasts."""

    def __init__(self) -> None:
        self._wait: tuple[float, Describe] | None = None  # since when this rank has been waiting
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, describe: Describe) -> Iterator[None]:
        """While inside, this rank waits for what `describe` says; it is called from another thread, and may block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="brim-waiting", daemon=True)
            self._thread.start()
        self._wait = (time.monotonic(), describe)
        try:
            yield
        finally:
            self._wait = None

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def _watch(self) -> None:
        warned: tuple[float, Describe] | None = None
        while not self._closed.wait(WAIT_CHECK_SECONDS):
            wait = self._wait
            if wait is None or wait is warned or time.monotonic() - wait[0] < NOTICE_SECONDS:
                continue
            warned = wait
            try:
                line = wait[1](time.monotonic() - wait[0])
            except RuntimeError:  # the store is gone: the rank that waits learns it from its own call
                continue
            if line is not None and self._wait is wait:  # it may have ended meanwhile
                _log.warning("brim: %s", line)


def rank_names(ranks: list[int], where: dict[int, str]) -> str:
    """`rank 1 (process 7 on node-a)`, `ranks 1, 2 (process 9 on node-b)`; where a rank runs is left out if unknown."""
    names = ", ".join(f"{rank} ({where[rank]})" if rank in where else str(rank) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


Facts = dict[str, Any]  # where a rank runs: machine, host, process, and its log if torchrun keeps one

ARRIVAL_SECONDS = 0.05  # between two checks which ranks have arrived
BEAT_SECONDS = 5.0
SILENT_SECONDS = 120.0  # without a sign of life; a library that loads may keep every thread waiting for a while


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trouble:
    """A rank that failed or is gone."""

    rank: int
    message: str
    exit_code: int = RankError.exit_code

    def error(self, also: str = "") -> RankError:
        """The trouble as the error that every other rank raises.

        Rank 0 reports it for all; where rank 0 itself is lost, the error has a cause, and every rank reports it.
        """
        error = RankError(f"rank {self.rank}: {self.message}{also}", exit_code=self.exit_code)
        if self.rank == 0:
            error.__cause__ = ConnectionError("rank 0 is lost")
        return error


def await_arrival(store: Any, world: World, watcher: WaitWatcher, timeout_seconds: float) -> dict[int, Facts]:
    """Wait until every rank has arrived at this store, and return where each runs; `RankError` if one does not.

    The lowest rank that has arrived warns about the missing ones for all.
    """
    keys = [f"arrived/{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], json.dumps(_own_facts()))

    def missing() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]

    def arrived() -> dict[int, Facts]:
        return {rank: json.loads(store.get(keys[rank])) for rank in range(world.size) if store.check([keys[rank]])}

    def describe(seconds: float) -> str | None:
        absent = missing()
        if not absent or min(set(range(world.size)) - set(absent)) != world.rank:
            return None
        return (
            f"rank {world.rank} of {world.size} has waited {seconds:.0f} s for {rank_names(absent, {})} to start: not "
            f"connected yet; brim gives up after {timeout_seconds:g} s in all, see the output of what is missing"
        )

    started = checked = time.monotonic()
    with watcher.waiting(describe):
        while not store.check(keys):
            if time.monotonic() - checked >= 1.0:
                checked = time.monotonic()
                if ended := ended_ranks(facts := arrived()):
                    raise RankError(
                        f"rank {world.rank}: {rank_names(ended, process_names(facts))} ended before all "
                        f"{world.size} ranks had connected; see that rank's own output"
                    )
            if time.monotonic() - started > timeout_seconds:
                raise RankError(
                    f"rank {world.rank}: the {world.size} ranks did not all connect within {timeout_seconds:g} s: "
                    f"{rank_names(missing(), {})} did not; see what became of them, then start again"
                )
            time.sleep(ARRIVAL_SECONDS)
    return arrived()


def ended_ranks(facts: Mapping[int, Facts]) -> list[int]:
    """The ranks on this machine whose processes have ended."""
    return [rank for rank, process in processes_here(facts).items() if not _process_lives(process)]


def processes_here(facts: Mapping[int, Facts]) -> dict[int, int]:
    """The process of each rank on this machine."""
    here = _machine()
    return {rank: one["process"] for rank, one in facts.items() if one["machine"] == here}


def process_names(facts: Mapping[int, Facts]) -> dict[int, str]:
    """Where each rank runs, in words."""
    return {rank: f"process {one['process']} on {one['host']}" for rank, one in facts.items()}


class Presence:
    """This rank's signs of life, and what is known of the others'."""

    def __init__(self, store: Any, world: World, name: str) -> None:
        self._store = store
        self._world = world
        self._name = name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="brim-presence", daemon=True)
        self._facts: dict[int, Facts] = {}  # of the others, as they left them
        self._seen: dict[int, tuple[int, float]] = {}  # the last beat, and when it was first seen

    def start(self) -> None:
        """Publish where this rank runs, and start its signs of life."""
        self._store.set(self._key("facts", self._world.rank), json.dumps(_own_facts()))
        self._thread.start()

    def stop(self) -> None:
        """No more signs of life: this rank leaves as planned."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_SECONDS)

    def report_failure(self, message: str, exit_code: int) -> None:
        """Publish at once that this rank has failed."""
        with contextlib.suppress(RuntimeError):
            text = json.dumps({"message": message, "exit_code": exit_code})
            self._store.set(self._key("failure", self._world.rank), text)

    def failure(self) -> Trouble | None:
        """The first other rank that reported a failure."""
        return self._first(self._failure)

    def gone(self) -> Trouble | None:
        """The first other rank that is no longer there."""
        return self._first(self._gone)

    def _first(self, find: Callable[[int], Trouble | None]) -> Trouble | None:
        others = (rank for rank in range(self._world.size) if rank != self._world.rank)
        try:
            return next((found for rank in others if (found := find(rank)) is not None), None)
        except RuntimeError as error:
            # Without torchrun rank 0 holds the store; with it, the agent does.
            return Trouble(rank=0, message=f"the ranks' common store is gone ({first_line(error)})")

    def _failure(self, rank: int) -> Trouble | None:
        report = self._read("failure", rank)
        return (
            None
            if report is None
            else Trouble(rank=rank, message=report["message"], exit_code=int(report["exit_code"]))
        )

    def _gone(self, rank: int) -> Trouble | None:
        facts = self._facts.get(rank) or self._read("facts", rank)
        if facts is not None:
            self._facts[rank] = facts
        if facts is not None and facts["machine"] == _machine() and not _process_lives(facts["process"]):
            ended = f"its process {facts['process']} has ended without a message"
            return Trouble(rank=rank, message=ended + self._log_of(rank))
        beat = int(self._read("beat", rank) or 0)
        last, since = self._seen.get(rank, (-1, 0.0))
        if beat != last:
            self._seen[rank] = (beat, time.monotonic())
        elif time.monotonic() - since > SILENT_SECONDS:
            return Trouble(rank=rank, message=f"no sign of life for {SILENT_SECONDS:g} s" + self._log_of(rank))
        return None

    def _log_of(self, rank: int) -> str:
        log = self._facts.get(rank, {}).get("log")
        return f" (its log: {log})" if log else " (see its own output)"

    def _read(self, kind: str, rank: int) -> Any:
        key = self._key(kind, rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None  # `get` alone would wait

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                self._store.set(self._key("beat", self._world.rank), str(count))
            except RuntimeError:
                return  # the store has ended, and its readers with it
            if self._stop.wait(BEAT_SECONDS):
                return

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._name}/{kind}/{rank}"


def _own_facts() -> Facts:
    return {"machine": _machine(), "host": socket.gethostname(), "process": os.getpid(), "log": _torchrun_log()}


def _machine() -> str:
    """What must be the same for a process id to mean the same process: the host, and the container on it."""
    try:
        inside = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        inside = ""
    return f"{socket.gethostname()} {inside}"


def _process_lives(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # it is there, but belongs to another user


def _torchrun_log() -> str | None:
    """Where torchrun keeps what this rank writes, if it does (`--redirects`, `--tee`)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    log = Path(file).with_name("stderr.log") if file else None
    return str(log) if log is not None and log.exists() else None
