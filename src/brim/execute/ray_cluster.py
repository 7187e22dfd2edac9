"""Ray, found or started: the cluster at `RAY_ADDRESS`, or one of this process's own on loopback. The only file that
imports ray; what runs on it is others' matter.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Iterator
from typing import Any

from brim.errors import RequestError, first_line

__all__ = ["connected_ray", "exit_detail", "stay_on_node"]

OBJECT_STORE_BYTES = 256 * 2**20  # of a Ray that is started here: only small things pass through it


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
    with _private() if address == "local" else contextlib.nullcontext():
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
            ray.init(address=address, **quiet, **(own if address == "local" else {}))
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(f"cannot reach Ray at RAY_ADDRESS={address}: {first_line(error)}") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def exit_detail(error: Exception) -> str:
    """What Ray knows of a worker's end, without its guesses at the cause."""
    text = " ".join(str(error).split())
    return (text.partition("exit detail: ")[2] or text).partition(" Some common causes")[0].rstrip(".")


def stay_on_node(node_id: str) -> Any:
    """The scheduling strategy of a task that must run on this node of the cluster."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise RequestError("--on ray needs Ray: pip install 'brim[ray]'") from error
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
