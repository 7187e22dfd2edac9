"""One process at a time writes a run folder: a lock that the kernel holds, and a record of who holds it.

    .lock    in the folder while a process writes it: JSON with `pid`, `host`, `command` and `since`

The lock goes with its process, however that ends: after a kill the file may be left, held by no process. Forked
children, such as loading processes, do not keep it. It knows folders and files, not what kind of run writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import itertools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brim.errors import LostError, RequestError
from brim.settings.caller import given
from brim.storage.run_folder import check_folder, command_line

__all__ = ["LOCK_FILE", "LOCK_SCHEMA", "locked_file", "locked_folder", "read_lock"]

LOCK_SCHEMA = "brim.lock/1"
LOCK_FILE = ".lock"
POLL_SECONDS = 0.05  # between two tries while waiting for another process to end
MOST_RECORD_BYTES = 1 << 20
MOST_TRIES = 20  # to open a lock's file that is removed again and again
HELD = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # what the file system may say

Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _HeldLock:
    """A lock that this process has."""

    path: Path
    file: int  # open descriptor
    thread: int
    made: tuple[Path, ...]  # folders that were made for it, the innermost first


_held: dict[Path, _HeldLock] = {}


@contextlib.contextmanager
def locked_folder(
    output: Path | None, *, command: str, note: Note | None = None, wait_seconds: float = 0.0
) -> Iterator[Path]:
    """A run folder that no other process writes while inside; without `output`, a new one, `runs/<command>-<time>`.

    A folder that cannot be written, or that another process has, is a `RequestError`; after `wait_seconds` of waiting
    for that process, a `LostError`. The thread that has the folder may enter it again. A folder that was made for the
    run and has nothing in it at the end is removed.
    """
    if output is None:
        folder, held = _new_folder(command, note)
    else:
        check_folder(output)
        folder = output
        held = _take(output / LOCK_FILE, output, note, wait_seconds)
    try:
        yield folder
    finally:
        _release(held)


@contextlib.contextmanager
def locked_file(output: Path, *, note: Note | None = None) -> Iterator[None]:
    """As `locked_folder`, for a command whose output is one file: the lock is beside it, `.<name>.lock`."""
    check_folder(output.parent)
    held = _take(output.with_name(f".{output.name}{LOCK_FILE}"), output, note, 0.0)
    try:
        yield
    finally:
        _release(held)


def read_lock(folder: Path) -> dict[str, Any] | None:
    """The record of the process that has, or before it was killed had, the folder; None where there is none."""
    return _record(folder / LOCK_FILE)


def _record(path: Path) -> dict[str, Any] | None:
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == LOCK_SCHEMA else None


def _new_folder(command: str, note: Note | None) -> tuple[Path, _HeldLock | None]:
    """A folder that was not there before, also for the second of two runs that start in the same second."""
    named = Path("runs") / f"{command}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    check_folder(named)
    for folder in itertools.chain([named], (named.with_name(f"{named.name}-{n}") for n in itertools.count(2))):
        if folder.exists():
            continue
        try:
            held = _take(folder / LOCK_FILE, folder, note, 0.0)
        except _InUseError:
            continue
        if all(path.name == LOCK_FILE for path in folder.iterdir()):
            return folder, held
        _release(held)  # another run made it, and ended, in between
    raise AssertionError("there is always another number")


class _InUseError(RequestError):
    """Another process has the folder."""


def _take(path: Path, output: Path, note: Note | None, wait_seconds: float) -> _HeldLock | None:
    """Take the lock; None where this thread has it already."""
    path = Path(os.path.realpath(path.parent), path.name)  # absolute: a run may change its working folder
    before = _held.get(path)
    if before is not None and before.thread == threading.get_ident():
        return None
    made = tuple(itertools.takewhile(lambda folder: not folder.exists(), (path.parent, *path.parent.parents)))
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            file = _open_locked(path, output, note)
        except OSError as error:
            raise RequestError(
                f"{given('output', output)}: it cannot be written ({error.strerror or error}); choose another folder"
            ) from error
        if file is not None:
            break
        if time.monotonic() >= deadline:
            reason = _in_use(output, _record(path))
            raise LostError(f"{reason}, waited {wait_seconds:g} s") if wait_seconds else _InUseError(reason)
        time.sleep(POLL_SECONDS)
    held = _HeldLock(path=path, file=file, thread=threading.get_ident(), made=made)
    _held[path] = held
    return held


def _open_locked(path: Path, output: Path, note: Note | None) -> int | None:
    """The lock's file, locked, with this process's record in it; None: another process has the lock.

    The file of a run that has just ended, and its folder, may be removed between opening and locking it: then it is
    opened again.
    """
    for left in reversed(range(MOST_TRIES)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Never truncated on opening: what is in it is the record of another process until the lock is ours.
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if left == 0:
                raise
            continue
        try:
            free = _lock(file, path, output, note if left == MOST_TRIES - 1 else None)
            if free and (_same_file(file, path) or left == 0):
                _write_record(file)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        if not free:
            return None
    raise AssertionError("the last try returns or raises")


def _lock(file: int, path: Path, output: Path, note: Note | None) -> bool:
    """Lock the file, if no other process has; where there are no locks, go by the record and warn."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except ImportError:  # Windows
        pass
    except OSError as error:
        if error.errno in HELD:
            return False
        if error.errno not in NO_LOCKS:
            raise
    record = _record(path)
    if record is not None and _is_running_here(record):
        return False
    if note is not None:
        note(f"{output}: its file system has no locks; make sure that no other process writes this folder")
    return True


def _is_running_here(record: dict[str, Any]) -> bool:
    """Whether the process of a record is another one of this machine, and alive."""
    pid = record.get("pid")
    if record.get("host") != platform.node() or not isinstance(pid, int) or pid <= 0 or pid == os.getpid():
        return False
    if sys.platform == "win32":
        return False  # there, signal 0 is Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _write_record(file: int) -> None:
    record = {
        "schema": LOCK_SCHEMA,
        "pid": os.getpid(),
        "host": platform.node(),
        "command": command_line() or list(sys.orig_argv),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(file, 0)
    with open(file, "w", encoding="utf-8", closefd=False) as out:
        out.write(json.dumps(record) + "\n")


def _in_use(output: Path, record: dict[str, Any] | None) -> str:
    who = "another process"
    if record is not None:
        who = f"process {record.get('pid')} on {record.get('host')} since {record.get('since')}"
    return f"{given('output', output)}: in use by {who}; wait until it ends, or choose another folder"


def _release(held: _HeldLock | None) -> None:
    """Give the lock up and remove its file, and the folders made for it if nothing is in them."""
    if held is None or _held.get(held.path) is not held:  # in a forked child: it never had the lock
        return
    del _held[held.path]
    with contextlib.suppress(OSError):  # Windows removes no open file
        held.path.unlink(missing_ok=True)
    os.close(held.file)
    for folder in held.made:
        try:
            folder.rmdir()
        except OSError:  # there is something in it
            break


def _forget_in_child() -> None:
    """A forked child shares the lock with its parent: a killed run would keep it for as long as the child lives."""
    for held in _held.values():
        with contextlib.suppress(OSError):
            os.close(held.file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
