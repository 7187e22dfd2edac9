"""What a run publishes while it is under way, and who reads it: `brim watch`.

    live.json                                   in the run's folder
    $XDG_STATE_HOME/brim/runs/<hash>.json       the same document, where all runs of the user are found

A run only updates a dictionary; a thread writes both files once a second at most, each whole. They are removed when the
run ends, however it ends, unless the process is killed: then `read_runs` finds that the process has gone. What cannot
be written ends the publishing, never the run. It knows neither torch nor what the run is.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import inspect
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from brim.storage.files import read_json
from brim.storage.run_folder import command_line

__all__ = ["LIVE_FILE", "LIVE_SCHEMA", "LiveRun", "both", "read_runs", "registered_runs_folder"]

LIVE_SCHEMA = "brim.live/1"
LIVE_FILE = "live.json"
WRITE_SECONDS = 1.0  # between two writings
JOIN_SECONDS = 5.0  # a file system that hangs may hold the thread, but not the end of the run
CREATED_SECONDS = 2.0  # by which a process's start may differ between two readings: the host's clock is set meanwhile
KILLED_SECONDS = 24 * 3600.0  # for so long a killed run is shown
GONE, HERE, ELSEWHERE = "gone", "here", "elsewhere"

_publishing: contextvars.ContextVar[bool] = contextvars.ContextVar("brim_publishing", default=False)
_Listener = TypeVar("_Listener")


def registered_runs_folder() -> Path:
    """Where the runs of this user are found: `$XDG_STATE_HOME/brim/runs`, by default under `~/.local/state`."""
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "brim" / "runs"


class LiveRun:
    """Publishes one run while a block runs.

        with LiveRun(folder, "eval") as live:
            live.update(state="running", done=64, total=1000)

    `update` is a dictionary's update, and costs as much. Of runs inside one another (the seeds of a training) the
    outermost publishes, and of ranks the first (`publishes`).
    """

    def __init__(
        self, folder: Path, kind: str, *, publishes: bool = True, interval_seconds: float = WRITE_SECONDS
    ) -> None:
        self.error: str | None = None  # why the publishing has ended early
        self._folder = folder.absolute()
        self._publishes = publishes
        self._interval_seconds = interval_seconds
        self.document: dict[str, Any] = {
            "schema": LIVE_SCHEMA, "pid": os.getpid(), "host": platform.node(), "created": None,
            "folder": str(self._folder), "kind": kind, "command": command_line(), "started_at": time.time(),
            "updated_at": None, "state": "starting", "done": None, "total": None, "unit": None, "label": None,
            "part": None,
            "batch_size": None, "batch_size_found": None, "samples_per_second": None, "oom_events": None,
            "seconds_left": None, "metric": None, "loss": None, "waiting_fraction": None, "gpu_wait_fraction": None,
            "gpu_wait_causes": None, "device": None,
            "device_uuid": None, "peak_reserved_bytes": None, "ranks": None, "rank_pids": [],
            "note": None,
        }  # fmt: skip
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._token: contextvars.Token[bool] | None = None

    def update(self, **fields: Any) -> None:
        """Change fields of the document; it is written later, by the thread."""
        self.document.update(fields)

    def __enter__(self) -> Self:
        if self._publishes and not _publishing.get():
            self._token = _publishing.set(True)
            thread = threading.Thread(target=self._run, name="brim-live", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:  # the process may have no more threads
                self.error = str(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _publishing.reset(self._token)
        if self._thread is not None and os.getpid() == self.document["pid"]:  # a forked child has not begun the run
            self._stop.set()
            self._thread.join(JOIN_SECONDS)
            for path in self._paths():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _paths(self) -> tuple[Path, Path]:
        name = hashlib.sha256(str(self._folder).encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return self._folder / LIVE_FILE, registered_runs_folder() / f"{name}.json"

    def _run(self) -> None:
        try:
            progress = _Progress()
            self.document["created"] = psutil.Process().create_time()
            own, registered = self._paths()
            registered.parent.mkdir(parents=True, exist_ok=True)
            while not self._stop.is_set():
                now = time.time()
                fields = {**self.document, "updated_at": now}
                text = json.dumps({**fields, "seconds_left": progress.seconds_left(fields, now)}, default=str)
                for path in (own, registered):
                    _replace(path, text)
                self._stop.wait(self._interval_seconds)
        except Exception as error:
            self.error = str(error)


class _Progress:
    """An estimate of the time left, from how much was done since the first reading."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None  # when, and how much was done by then
        self._unit: str | None = None

    def seconds_left(self, fields: dict[str, Any], now: float) -> float | None:
        done, total, rate = fields["done"], fields["total"], fields["samples_per_second"]
        if done is None or total is None:
            return None
        if fields["kind"] in ("eval", "lm-eval") and rate:
            return float(max(total - done, 0) / rate)
        if self._first is None or self._unit != fields["unit"]:
            self._first, self._unit = (now, done), fields["unit"]
        began, before = self._first
        return float(max(total - done, 0) * (now - began) / (done - before)) if done > before else None


def _replace(path: Path, text: str) -> None:
    """Write a file whole. Unlike `write_atomic` it makes no folder and does not wait for the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def both(kind: type[_Listener], first: _Listener, second: _Listener) -> _Listener:
    """A listener of that kind which passes every event to two others, in this order."""

    def passed_on(name: str) -> Any:
        def event(self: Any, *arguments: Any, **named: Any) -> None:
            del self
            getattr(first, name)(*arguments, **named)
            getattr(second, name)(*arguments, **named)

        return event

    events = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    made: _Listener = type(f"Both{kind.__name__}", (kind,), {name: passed_on(name) for name in events})()
    return made


# ------------------------------------------------------------------------------------------------ read


def read_runs(folder: Path | None = None) -> list[dict[str, Any]]:
    """The runs of this user on this machine, oldest first; with a folder, the one in it and those below it.

    A run whose process has gone has the state "killed"; it is listed for a day, as long as its folder is there.
    """
    found = {run["folder"]: run for run in _registered() if folder is None or _is_within(run["folder"], folder)}
    if folder is not None:
        own = _document(folder / LIVE_FILE)  # another user's, another machine's, or one with another state directory
        if own is not None:
            found.setdefault(own["folder"], own)
    runs = []
    for run in found.values():
        whereabouts = _process_of(run)
        if whereabouts == ELSEWHERE and folder is None:
            continue
        runs.append({**run, "state": "killed"} if whereabouts == GONE else run)
    return sorted(runs, key=lambda run: (run["started_at"], run["folder"]))


def _registered() -> Iterator[dict[str, Any]]:
    for path in sorted(registered_runs_folder().glob("*.json")):
        run = _document(path)
        if run is None:
            continue
        if _process_of(run) == GONE and _is_over(run):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        yield run


def _document(path: Path) -> dict[str, Any] | None:
    """What a run has published; None for anything else."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("schema") != LIVE_SCHEMA:
        return None
    numbers = all(isinstance(found.get(name), int | float) for name in ("pid", "created", "started_at", "updated_at"))
    whole = numbers and isinstance(found.get("folder"), str) and isinstance(found.get("rank_pids", []), list)
    return found if whole else None


def _is_over(run: dict[str, Any]) -> bool:
    """Whether a killed run is no longer worth showing."""
    return not Path(run["folder"]).is_dir() or time.time() - run["updated_at"] > KILLED_SECONDS


def _process_of(run: dict[str, Any]) -> str:
    """Whether the process of a run is here, gone, or on another machine, where nothing is known of it."""
    if run.get("host") != platform.node():
        return ELSEWHERE
    try:
        process = psutil.Process(int(run["pid"]))
        same = abs(process.create_time() - run["created"]) < CREATED_SECONDS
        return HERE if same and process.status() != psutil.STATUS_ZOMBIE else GONE
    except psutil.NoSuchProcess:
        return GONE
    except psutil.Error:  # it is there, and more may not be asked
        return HERE


def _is_within(folder: str, outer: Path) -> bool:
    return Path(folder).is_relative_to(outer.absolute())
