"""Ray, found or started: the cluster at `RAY_ADDRESS`, or one of this process's own on loopback. The only file that
imports ray; what runs on it is others' matter. Ray's own messages are cut to a line each, and stay off standard output.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import secrets
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brim.errors import RequestError, first_line
from brim.settings.caller import written

__all__ = ["connected_ray", "exit_detail", "stay_on_node"]

OBJECT_STORE_BYTES = 256 * 2**20  # of a Ray that is started here: only small things pass through it
MESSAGE_LETTERS = 240  # of what Ray says, where more than the beginning is rarely of use
LISTENER = "ray_listen_error_messages"  # Ray's name for the thread that prints what the cluster broadcasts


@contextlib.contextmanager
def connected_ray(workers: int | None = None) -> Iterator[Any]:
    """Ray: one that this process is connected to already, the one at `RAY_ADDRESS`, or one of our own on loopback.

    A Ray of our own has a processor for each of `workers`, whatever the machine has.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    if "://" in address:
        raise RequestError(
            f"RAY_ADDRESS={address}: results come as streams, which Ray's client does not have; run this on a machine "
            "of the cluster (ray job submit) with RAY_ADDRESS=auto"
        )
    private = _private() if address == "local" else contextlib.nullcontext()
    with private, contextlib.redirect_stdout(_RayMessages()):
        ray = _import_ray()
        if ray.is_initialized():
            yield ray
            return
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        own = {
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, workers or 1),
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        try:
            context = ray.init(address=address, **quiet, **(own if address == "local" else {}))
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(f"cannot reach Ray at RAY_ADDRESS={address}: {first_line(error)}") from error
        failed = True  # where Ray's logs may tell why
        try:
            yield ray
            failed = False
        except KeyboardInterrupt:
            failed = False
            raise
        finally:
            ray.shutdown()
            if address == "local" and not failed:
                _remove_session(Path(context.address_info["session_dir"]))


def exit_detail(error: Exception) -> str:
    """What Ray knows of a worker's end, without its guesses at the cause."""
    if type(error).__name__ in ("ActorUnavailableError", "NodeDiedError"):
        return "it no longer answers, as when its node is lost"
    text = " ".join(str(error).split())
    detail = (text.partition("exit detail: ")[2] or text).partition(" Some common causes")[0].rstrip(".")
    return textwrap.shorten(detail, MESSAGE_LETTERS, placeholder="…")


def stay_on_node(node_id: str) -> Any:
    """The scheduling strategy of a task that must run on this node of the cluster."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


class _RayMessages(io.TextIOBase):
    """Standard output while Ray is connected: what others write goes to standard error as it is, for the result is all
    that belongs on standard output; of what Ray's cluster broadcasts, the first line of each message, once.

    That a node is lost is left out: those whose work was there say so, and Ray would add the node's last log lines.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def write(self, text: str) -> int:
        """Ray writes a message, or the newline that ends one."""
        if threading.current_thread().name != LISTENER:
            return sys.stderr.write(text)
        first, *_ = [*re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines(), ""]
        line = textwrap.shorten(first.removeprefix("(raylet)"), MESSAGE_LETTERS, placeholder="…")
        lost = "Raylet is terminated" in line or "has been marked dead" in line
        if line and not lost and line not in self._seen:
            self._seen.add(line)
            sys.stderr.write("".join(letter for letter in f"ray: {line}" if letter.isprintable()) + "\n")
        return len(text)

    def flush(self) -> None:
        """As Ray asks for after a message."""
        sys.stderr.flush()


def _remove_session(folder: Path) -> None:
    """The logs and sockets of a Ray that was started here and has ended."""
    latest = folder.parent / "session_latest"
    with contextlib.suppress(OSError):
        if latest.is_symlink() and latest.resolve() == folder.resolve():
            latest.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise RequestError(f"{written('on', 'ray')} needs Ray: pip install 'brim[ray]'") from error
    return ray


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """While inside, a Ray that is started listens on this machine only, and obeys this process only.

    There is no argument for either. For the first Ray takes the switch that it has for laptops with a firewall; for
    the second a token, which it would otherwise leave in the user's home.
    """
    variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    constants: Any = None
    with contextlib.suppress(ImportError):
        from ray._private import ray_constants as constants
    cluster = getattr(constants, "ENABLE_RAY_CLUSTER", None)  # read when ray was imported, perhaps long ago
    if cluster is not None:
        constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        if cluster is not None:
            constants.ENABLE_RAY_CLUSTER = cluster
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@functools.cache
def _token() -> str:
    """One for the life of the process: Ray reads it once."""
    return secrets.token_hex(32)
