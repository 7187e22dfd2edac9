"""Ray: the cluster at `RAY_ADDRESS` or one of this process's own on loopback, what is started on it, and how that ends.

The only file that imports ray. Callers say what runs and what an answer means; that a worker was lost, with its node,
its process or its device, is distinguished from an error of the work itself here. Ray's own messages are cut to a
line each, and stay off standard output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import LostError, RequestError, first_line
from brim.settings.caller import written

__all__ = ["CallResult", "RayCluster", "WorkerLostError", "connected_ray", "forwarded_variables"]

OBJECT_STORE_BYTES = 256 * 2**20  # of a Ray that is started here: only small things pass through it
MESSAGE_LETTERS = 240  # of what Ray says, where more than the beginning is rarely of use
LISTENER = "ray_listen_error_messages"  # Ray's name for the thread that prints what the cluster broadcasts
NODE_SECONDS = 60.0  # for a short answer of a node
FORWARDED = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "XDG_CACHE_HOME", "OMP_NUM_THREADS")


class WorkerLostError(LostError):
    """A worker is gone with its process or its node, or says that its device is lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallResult:
    """What came of a call: a value, or the error instead, a `WorkerLostError` or what the work itself raised."""

    call: Any
    value: Any = None
    error: Exception | None = None


class RayCluster:
    """A Ray that this process is connected to. A call is a reference of Ray's, or a stream of them."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def resources(self) -> dict[str, float]:
        """All that the cluster has, by Ray's names: CPU, GPU."""
        found: dict[str, float] = self._ray.cluster_resources()
        return found

    def free_resources(self) -> dict[str, float]:
        """What is not in use."""
        found: dict[str, float] = self._ray.available_resources()
        return found

    def start_task(self, function: Callable[..., Any], *arguments: Any, **resources: Any) -> Any:
        """Call a function somewhere, in a process of its own."""
        task = self._ray.remote(max_calls=1)(function).options(**resources, max_retries=0)
        return task.remote(*arguments)

    def start_actor(self, kind: type, *arguments: Any, **resources: Any) -> Any:
        """Make an object somewhere, in a process of its own."""
        return self._ray.remote(kind).options(**resources, max_restarts=0).remote(*arguments)

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Call a method of an actor; that of a generator is a stream, with an answer for each value."""
        return getattr(actor, method).remote(*arguments)

    def next_result(self, calls: Sequence[Any], *, seconds: float | None = None) -> CallResult | None:
        """Wait for any of the calls; None if there is no answer in time."""
        ready, _ = self._ray.wait(list(calls), timeout=seconds, fetch_local=False)
        if not ready:
            return None
        call = ready[0]
        try:
            return CallResult(call=call, value=self._ray.get(next(call) if isinstance(call, Iterator) else call))
        except self._ray.exceptions.RayError as error:
            return CallResult(call=call, error=_own_error(error))

    def ask_nodes(self, function: Callable[[], Any], *, having: str) -> list[tuple[Mapping[str, float], Any]]:
        """Call a short function on every node that has a resource: each node's resources, and its answer."""
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get(having)]
        calls = [self.start_task(function, num_cpus=0, scheduling_strategy=_stay_on(node["NodeID"])) for node in nodes]
        found = []
        for node, call in zip(nodes, calls, strict=True):
            answer = self.next_result([call], seconds=NODE_SECONDS)
            if answer is None or answer.error is not None:
                reason = f"silent for {NODE_SECONDS:g} s" if answer is None else answer.error
                raise LostError(f"a node of the cluster does not answer: {reason}")
            found.append((node["Resources"], answer.value))
        return found

    def cancel(self, call: Any) -> None:
        """End a task; it may be over, or Ray gone."""
        with contextlib.suppress(Exception):
            self._ray.cancel(call, force=True)

    def end_actor(self, actor: Any) -> None:
        """End an actor's process; it may be gone already, or Ray with it."""
        with contextlib.suppress(Exception):
            self._ray.kill(actor)


def forwarded_variables() -> dict[str, str]:
    """The variables of this process that decide what its workers load, and from where."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}


@contextlib.contextmanager
def connected_ray(workers: int | None = None) -> Iterator[RayCluster]:
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
    with private, contextlib.redirect_stdout(_RayMessages()), contextlib.ExitStack() as ending:
        ray = _import_ray()
        if ray.is_initialized():
            yield RayCluster(ray)
            return
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        own = {
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, workers or 1),
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        ending.enter_context(_stop_signal_put_back())
        try:
            context = ray.init(address=address, **quiet, **(own if address == "local" else {}))
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(f"cannot reach Ray at RAY_ADDRESS={address}: {first_line(error)}") from error
        failed = True  # where Ray's logs may explain it
        try:
            yield RayCluster(ray)
            failed = False
        except KeyboardInterrupt:
            failed = False
            raise
        finally:
            ray.shutdown()
            if address == "local" and not failed:
                _remove_session(Path(context.address_info["session_dir"]))


@contextlib.contextmanager
def _stop_signal_put_back() -> Iterator[None]:
    """Ray handles SIGTERM from its start on and leaves that behind, also to what this process forks later."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _stay_on(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


def _own_error(error: Exception) -> Exception:
    """What an error of Ray's stands for: that its worker is lost, or what the work raised."""
    cause = getattr(error, "cause", None)  # of a RayTaskError
    if isinstance(cause, LostError):
        return WorkerLostError(str(cause))
    return cause if isinstance(cause, Exception) else WorkerLostError(_exit_detail(error))


def _exit_detail(error: Exception) -> str:
    """What Ray knows of a worker's end, without its guesses at the cause."""
    if type(error).__name__ in ("ActorUnavailableError", "NodeDiedError"):
        return "it no longer answers, as when its node is lost"
    text = " ".join(str(error).split())
    detail = (text.partition("exit detail: ")[2] or text).partition(" Some common causes")[0].rstrip(".")
    return textwrap.shorten(detail, MESSAGE_LETTERS, placeholder="…")


class _RayMessages(io.TextIOBase):
    """Standard output while Ray is connected: what others write goes to standard error as it is, for the result is all
    that belongs on standard output; of what Ray's cluster broadcasts, the first line of each message, once.

    The loss of a node is left out: the work that ran there reports it, and Ray would add the node's last log lines.
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
